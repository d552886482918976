"""Watch a run: what each rank does, which rank is slow, and what is wrong.

Live:  python diagnosing-errors/watch.py outputs/02-ddp
Once:  python diagnosing-errors/watch.py outputs/02-ddp --once

watch.py reads the files that watched.py writes to the run's folder, so it works on each machine
that sees the folder. Every ten seconds it asks the ranks for their stacks, and judges the run as
whats_wrong.py does. The exit status of --once is also that of whats_wrong.py.
"""

import argparse
import json
import sys
import time
from contextlib import suppress
from itertools import count
from pathlib import Path
from statistics import median

from facts import gather, reach_of, tail
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text
from whats_wrong import NO_FAULT, judge, status_of, who

# Seconds between two tables.
INTERVAL = 2
# Ask for stacks in every fifth table, because each request costs the ranks some milliseconds.
TABLES_PER_REQUEST = 5
# Show at most this number of ranks; ranks that the verdict names come first.
MAX_RANKS = 32
COLUMNS = ["rank", "host", "phase", "step", "for", "step s", "data", "GiB", "GPU GiB", "files"]


def parse_args():
    """Parse and check the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("run", type=Path, help="the run's folder, as passed to watched.py --into")
    parser.add_argument("--once", action="store_true", help="print one table")
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"run {args.run}: not a folder; pass a run's folder, such as outputs/02-ddp")
    return args


def headline(run, ranks):
    """Return the run's folder, the number of ranks, and the latest metrics of the script."""
    parts = [run, f"{len(ranks)} of {ranks[0].world_size} ranks"]
    if steps := [rank.step_seconds for rank in ranks if rank.step_seconds]:
        parts.append(f"{median(steps):.3g} s per step")
    row = {}
    for line in tail(Path(run, "metrics.jsonl")).splitlines():
        # The first line may be cut.
        with suppress(ValueError, TypeError):
            row |= json.loads(line)
    names = ("step", "loss", "val_loss", "grad_norm", "tokens_per_second", "mfu")
    parts += [f"{name} {row[name]:,.4g}" for name in names if row.get(name) is not None]
    return "  ".join(parts)


def cells(rank):
    """Return a rank's row of the table."""
    color = "" if rank.state in ("alive", "finished") else "red"
    return [
        str(rank.rank),
        rank.host,
        Text(rank.phase if rank.state == "alive" else rank.state, color),
        str(rank.step),
        f"{max(0, rank.quiet):.0f} s",
        f"{rank.step_seconds or 0:.3g}",
        f"{rank.phases.get('data', 0):.0%}",
        f"{rank.memory[-1]:.2f}",
        f"{rank.device_memory_gib or 0:.2f}",
        str(rank.open_files or ""),
    ]


def draw(facts):
    """Return the table with the verdict below it, and the verdict."""
    verdict, ranks = judge(facts)
    findings = [verdict, *verdict["also"]]
    named = {number for finding in findings for number in finding["ranks"]}
    ranks = sorted(ranks.values(), key=lambda rank: (rank.rank not in named, rank.rank))
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in ("host", "phase") else "right")
    for rank in ranks[:MAX_RANKS]:
        table.add_row(*cells(rank), style="bold" if rank.rank in named else "")
    lines = [Text(headline(facts["run"], ranks)), table] if ranks else []
    if len(ranks) > MAX_RANKS:
        lines.append(Text(f"and {len(ranks) - MAX_RANKS} more ranks"))
    color = "green" if verdict["kind"] in NO_FAULT else "bold red"
    for finding in findings:
        lines.append(Text(f"{finding['kind']}{who(finding)}: {finding['reason']}", color))
    return Group(*lines), verdict


def main():
    """Print one table, or draw tables until Ctrl-C."""
    args = parse_args()
    console = Console(highlight=False)
    reach = reach_of()
    if args.once:
        table, verdict = draw(gather(args.run, reach))
        console.print(table)
        sys.exit(status_of(verdict))
    live = Live(console=console, auto_refresh=False, screen=console.is_terminal)
    with suppress(KeyboardInterrupt), live:
        for turn in count():
            facts = gather(args.run, reach, ask=turn % TABLES_PER_REQUEST == 0)
            live.update(draw(facts)[0], refresh=True)
            time.sleep(INTERVAL)


if __name__ == "__main__":
    main()
