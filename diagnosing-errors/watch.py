"""Watch a run: what each rank does, which one is slow, how long the rest takes.

Live:  python diagnosing-errors/watch.py outputs/02-ddp
Once:  python diagnosing-errors/watch.py outputs/02-ddp --once

It reads what watched.py writes to the run's folder, so it works wherever that can be seen. What is
wrong it asks whats_wrong.py, every ten seconds. Exit status of --once: 0 nothing, 1 a fault, 2 no
run, 3 cannot tell.
"""

import argparse
import json
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import median

import whats_wrong
from facts import HERE, gather, tail
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

EVERY = 2  # seconds from look to look
ASK = 5  # pictures from dump to dump: each costs the ranks some milliseconds
COLUMNS = ["rank", "host", "phase", "step", "for", "step s", "data", "GiB", "GPU GiB", "files"]
STYLES = {"alive": "", "finished": "green"}


def parse_args():
    """Return the arguments, and those that whats_wrong.py would have."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, which watched.py was told with --into")
    add("--once", action="store_true", help="print one picture, and end")
    add(
        "--most", type=int, default=32, help="ranks to show, first those of which something is said"
    )
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"{args.run} is no folder; give that of a run, such as outputs/02-ddp")
    args.reach = {HERE: []}
    return args


def span(seconds):
    """Return a time as a person would say it."""
    for unit, size in (("days", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} s"


def last_row(run):
    """Return the last values in metrics.jsonl, if the script writes such a file."""
    row = {}
    for line in tail(Path(run, "metrics.jsonl"), 10_000).splitlines():
        with suppress(ValueError, AttributeError):  # the first line may be half a line
            row |= {name: value for name, value in json.loads(line).items() if value is not None}
    return row


def headline(run, everyone):
    """Return the step, the last metrics and the time left, as far as they are known."""
    steps = [one.step_seconds for one in everyone if one.step_seconds]
    parts = [run, f"{len(everyone)} of {everyone[0].world_size} ranks"]
    if steps:
        parts.append(f"{median(steps):.3g} s a step")
    names = ("step", "loss", "val_loss", "grad_norm", "tokens_per_second", "mfu")
    row = last_row(run)
    parts += [f"{name} {row[name]:,.4g}" for name in names if name in row]
    return "  ".join(parts)


def cells(one):
    """Return a rank's row of the table."""
    phases, memory = one.phases or {}, one.memory or [0]
    return [
        str(one.rank),
        one.host,
        Text(one.phase if one.lives else one.state, STYLES.get(one.state, "red")),
        str(one.step),
        span(max(0, one.quiet)),
        f"{one.step_seconds:.3g}" if one.step_seconds else "",
        f"{phases.get('data', 0):.0%}",
        f"{memory[-1]:.2f}",
        f"{one.device_memory_gib:.2f}" if one.device_memory_gib else "",
        str(one.open_files or ""),
    ]


def picture(facts, most):
    """Return what to show, and the verdict."""
    verdict, ranks = whats_wrong.judge(facts)
    everyone = list(ranks.values())
    if not everyone:
        return Text(verdict["reason"]), verdict
    named = set(verdict["ranks"]).union(*(other["ranks"] for other in verdict["also"]))
    shown = sorted(everyone, key=lambda one: one.rank not in named)[:most]
    rows = {one.rank: cells(one) for one in shown}
    used = [any(str(row[at]) for row in rows.values()) for at in range(len(COLUMNS))]
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name, has_values in zip(COLUMNS, used, strict=True):
        if has_values:
            table.add_column(name, justify="left" if name in ("host", "phase") else "right")
    for rank, row in sorted(rows.items()):
        kept = [cell for cell, has_values in zip(row, used, strict=True) if has_values]
        table.add_row(*kept, style="bold" if rank in named else "")
    lines = [Text(headline(facts["run"], everyone)), table]
    if len(everyone) > most:
        lines.append(Text(f"and {len(everyone) - most} more ranks"))
    fault = verdict["kind"] not in whats_wrong.NO_FAULT
    for finding in [verdict, *verdict["also"]]:
        text = f"{finding['kind']}{whats_wrong.who(finding)}: {finding['reason']}"
        lines.append(Text(text, "bold red" if fault else "green"))
    if fault:
        lines.append(Text(f"next: python diagnosing-errors/whats_wrong.py {facts['run']}"))
    return Group(*lines), verdict


def watch_live(args, console):
    """Show the run until Ctrl-C."""
    with Live(console=console, auto_refresh=False, screen=console.is_terminal) as live:
        for turn in count():
            facts = gather(args, ask=turn % ASK == 0)
            live.update(picture(facts, args.most)[0], refresh=True)
            time.sleep(EVERY)


def main():
    """Show the run once, or until Ctrl-C."""
    args = parse_args()
    console = Console(highlight=False)
    if not args.once:
        try:
            watch_live(args, console)
        except KeyboardInterrupt:
            return
    shown, verdict = picture(gather(args), args.most)
    console.print(shown)
    known = int(verdict["kind"] not in whats_wrong.NO_FAULT)
    sys.exit(3 if verdict["kind"] == "unknown" else known)


if __name__ == "__main__":
    main()
