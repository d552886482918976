"""Make the parts of the READMEs that come from files: diffs, samples of output, tables.

Here:  make docs                       make them anew
       python tools/maintain/docs.py --check    say which are not as they would be made

Where a README says so, in a comment, cog calls one of these functions and puts in what it prints.
"""

import ast
import functools
import importlib
import json
import os
import re
import sys
from itertools import pairwise
from pathlib import Path
from statistics import median

from cogapp import Cog
from PIL import Image

from chapters import ROOT, chapters, diff, diff_size, flags, parent_of, parts
from readme import readmes


def here():
    """Return the folder of the README that cog is at."""
    return Path(sys.modules["cog"].inFile).resolve().parent


def this_chapter():
    """Return the chapter whose README cog is at, and its script's and its parent's path."""
    folder = here()
    name = next(name for name, script in chapters().items() if script.parent == folder)
    return name, chapters()[name], chapters().get(parent_of(name))


def fenced(kind, lines):
    """Print lines as a block."""
    print(f"```{kind}", *lines, "```", sep="\n")


def code(*names, only=""):
    """Print functions of the chapter's script: their first lines, and those that match `only`."""
    _, script, _ = this_chapter()
    source, lines = script.read_text(), []
    for name in names:
        found = [source.splitlines()[number - 1] for number in parts(source)[name]]
        lines += ["", ""] if lines else []
        left_out = False
        for line in found:
            if not line.startswith("def ") and not re.search(only, line):
                left_out = True
                continue
            if left_out:
                lines.append(" " * (len(line) - len(line.lstrip())) + "...")
            lines.append(line)
            left_out = False
        lines += ["    ..."] if left_out else []
    fenced("python", lines)


def hunk(*names, context=3, only=""):
    """Print how functions differ from those of the parent chapter; `context` lines stay around.

    With `only`, a pattern, the changed lines that it matches.
    """
    _, script, parent = this_chapter()
    before, after = parts(parent.read_text()), parts(script.read_text())
    lines = []
    for name in names:
        ours, theirs = after.get(name, ()), before.get(name, ())
        part = [
            (mark, line)
            for mark, line, old, new in diff(parent, script)
            if (mark != "-" and new in ours) or (mark == "-" and old in theirs)
        ]
        changed = [
            n for n, (mark, line) in enumerate(part) if mark != " " and re.search(only, line)
        ]
        if not changed:
            raise ValueError(f"{name}: no changed line is to be shown")
        near = (range(n - context, n + context + 1) for n in changed)
        shown = sorted(set().union(*near) & set(range(len(part))))
        lines.append(f"@@ {name} @@")
        for number, following in pairwise([*shown, None]):
            lines.append("".join(part[number]).rstrip())
            if following is not None and following > number + 1:
                lines.append(f"@@ {name}, further down @@")
    fenced("diff", lines)


def heading(line):
    """Print the first two lines of a table."""
    print(line, f"|{'---|' * (line.count('|') - 1)}", sep="\n")


def chapter_map(*names):
    """Print the table of these chapters, or of all: their docstrings' words, their diffs' sizes."""
    heading("| chapter | what its script does | lines | diff against its parent |")
    for name, script in chapters().items():
        if names and name not in names:
            continue
        source, folder = script.read_text(), script.parent.relative_to(ROOT)
        sentence = ast.get_docstring(ast.parse(source)).partition(".")[0]
        size = "none before it"
        if parent := parent_of(name):
            added, removed = diff_size(chapters()[parent], script)
            size = f"+{added} −{removed} against {parent}"
        page = os.path.relpath(script.with_name("README.md"), here())
        print(f"| [{folder}]({page}) | {sentence} | {source.count(chr(10))} | {size} |")


def defaults(chapter, *names):
    """Print the table of flags of a chapter: what each is without being given, and its help."""
    declared = flags(chapters()[chapter].read_text())
    print("| flag | default | |", "|---|---|---|", sep="\n")
    for name in names:
        options = ast.parse(declared[f"--{name}"]).body[0].value.keywords
        told = {option.arg: option.value.value for option in options if option.arg != "type"}
        print(f"| `--{name}` | {told['default']} | {told['help']} |")


def sample(name, head=None, tail=0, speed=True):
    """Print what a command has printed, from assets/samples: all, or its first and last lines.

    Without speeds where these would mislead, as runs of other chapters were made on another day.
    """
    text = (ROOT / "assets/samples" / f"{name}.txt").read_text()
    lines = (text if speed else re.sub(r"  tokens_per_second \S+", "", text)).splitlines()
    if head is not None:
        lines = [*lines[:head], *(["..."] if head else []), *lines[len(lines) - tail :]]
    fenced("text", lines)


def ratios(file, rows):
    """Print ratios of a file under benchmarks/results: median, lowest, highest.

    `rows` gives the name of each ratio in that file, and what to call it here.
    """
    results = measured(file, "ratios")
    heading("| tokens per second | ratio | lowest – highest |")
    for name, words in rows.items():
        result = results[name]
        low, high = min(result["rounds"]), max(result["rounds"])
        print(f"| {words} | {result['median']:.2f} | {low:.2f} – {high:.2f} |")


def measured(file, what):
    """Return the rows that a file under benchmarks/results has of this."""
    return json.loads((ROOT / "benchmarks/results" / file).read_text())[what]


def largest(file):
    """Print the table of the largest models that trained in a fixed memory per rank."""
    rows = measured(file, "largest")
    heading(f"| ranks, of {rows[0]['gib']:g} GiB each | chapter 03 | chapter 04 | ratio |")
    weights = {(row["ranks"], row["chapter"]): row["weights"] / 1e6 for row in rows}
    for ranks in sorted({row["ranks"] for row in rows}):
        ddp, fsdp = weights[ranks, "03"], weights[ranks, "04"]
        cells = f"{ddp:.0f} million weights | {fsdp:.0f} million weights | {fsdp / ddp:.1f}"
        print(f"| {ranks} | {cells} |")


def memory(file):
    """Print the table of what a rank holds, in MB, by number of ranks and setting."""
    names = {"weights": "weights", "gradients": "gradients", "optimizer": "moments"}
    names |= {"gathered": "most gathered at once", "process at the step": "process"}
    names |= {"process between micro-batches": "process, before a forward"}
    heading(f"| ranks | setting | {' | '.join(names.values())} |")
    for row in measured(file, "costs"):
        cells = " | ".join(f"{row[name] / 1e6:.0f}" for name in names)
        print(f"| {row['ranks']} | {row['setting']} | {cells} |")


def checkpoints(file):
    """Print the table of what saving and loading cost, chapter by chapter."""
    rows = measured(file, "checkpoints")
    heading("| | chapter 02 | chapter 04 | ratio |")
    for name, words in (("save", "save"), ("load", "load"), ("bytes", "bytes on disk")):
        one, other = (
            median(row[name] for row in rows if row["chapter"] == chapter)
            for chapter in ("02", "04")
        )
        show = "{:.2f} GB" if name == "bytes" else "{:.1f} s"
        unit = 1e9 if name == "bytes" else 1
        cells = " | ".join(show.format(value / unit) for value in (one, other))
        print(f"| {words} | {cells} | {other / one:.2f} |")


def reading(file):
    """Print the table of the host memory that reading weights takes, in MB."""
    heading("| ranks | this rank's share | largest tensor | chapter 04 | chapter 05 |")
    rows = {(row["ranks"], row["chapter"]): row for row in measured(file, "reading")}
    for ranks in sorted({ranks for ranks, _ in rows}):
        four, five = rows[ranks, "04"], rows[ranks, "05"]
        told = five["share"], five["largest tensor"], four["peak"], five["peak"]
        print(f"| {ranks} | {' | '.join(f'{bytes_ / 1e6:.0f}' for bytes_ in told)} |")


def saves(file):
    """Print the table of how long saves take, in the background and not."""
    found = measured(file, "saves")
    names = {"plain": "a save that is waited for"}
    names |= {"stall": "`--checkpoint-async`, until it trains on"}
    names |= {"in the background": "`--checkpoint-async`, until it is on the disk"}
    heading(f"| of {found['bytes'] / 1e9:.2f} GB | ratio to the first |")
    for name, words in names.items():
        ratio = median(row[name] / row["plain"] for row in found["rounds"])
        print(f"| {words} | {ratio:.2f} |")


def planner(file):
    """Print the table of planned and measured peaks; fail if not all shards are as planned."""
    heading("| chapter and case | ranks | flags | measured | planned |")
    for row in measured(file, "rows"):
        assert row["exact"], row["case"]
        peaks = " | ".join(f"{row[name]['peak'] / 1e6:.2f}" for name in ("measured", "planned"))
        print(f"| {row['case']} | {row['ranks']} | `{row['flags']}` | {peaks} |")


def bubbles(file):
    """Print the table of how long ranks were idle under each schedule, and what they kept."""
    print("| schedule | micro-batches | idle | formula | micro-batches kept, rank 0 – 3 |")
    print("|---|---|---|---|---|")
    for row in measured(file, "rows"):
        kept = ", ".join(f"{number:g}" for number in row["in flight"])
        cells = f"{row['micro_batches']} | {row['bubble']:.3f} | {row['formula']:.3f} | {kept}"
        print(f"| {row['schedule']} | {cells} |")


def activations(file):
    """Print the table of what ranks of chapter 08 keep for the backward, in MB, by length."""
    rows = measured(file, "rows")
    heading(f"| tokens | {' | '.join(row['case'] for row in rows)} |")
    for length in rows[0]["bytes"]:
        cells = " | ".join(f"{row['bytes'][length] / 1e6:.0f}" for row in rows)
        print(f"| {int(length):,} | {cells} |")


def plan(config):
    """Print, as comments, what the planner has said of a file under configs."""
    text = (ROOT / "assets/samples/05-plans.txt").read_text()
    for line in text.splitlines():
        name, told = line.split(" on ", 1)
        if name.lower().endswith(config):
            print(f"# {told.replace(': ', ':|#   ', 1)}".replace("|", "\n"))


def faults(file):
    """Print the table of the verdicts on runs that were broken on purpose."""
    heading("| fault | script | right verdicts |")
    runs = {}
    for row in measured(file, "rows"):
        runs.setdefault((row["fault"], row["script"]), []).append(row)
    for (name, script), rows in runs.items():
        seconds = [row["verdict"] for row in rows if "verdict" in row]
        after = f", after {median(seconds):.0f} s" if seconds else ""
        right = sum(row["right"] for row in rows)
        print(f"| {name} | `{script}` | {right} of {len(rows)}{after} |")


def fault(name):
    """Print what one broken run showed: lines of its log, and the verdict of whats_wrong.py."""
    rows = measured("faults-cpu-2cores.json", "rows")
    rows = [row for row in rows if row["fault"] == name and row["right"]]
    row = next(row for row in rows if row["said"].upper() in row["text"])  # asked once more, too
    verdict = row["text"].rstrip().rpartition("\n\n")[2].splitlines()
    log = [line for line in row["log"] if "ChildFailedError" not in line]
    fenced("text", [*log[:3], "", *verdict])


def watching(file):
    """Print what watched.py costs a step of chapter 01."""
    heading("| | time of a step, to that of its neighbours without watched.py |")
    for name, shares in measured(file, "shares").items():
        print(f"| {name} | {median(shares):.3f} ({min(shares):.3f} – {max(shares):.3f}) |")


def contenders(file):
    """Print the table of who took part in benchmarks/speed.py, the fastest first."""
    rounds, details = measured(file, "speeds"), measured(file, "details")
    heading("| who | speed, of chapter 01 | first step after | peak memory | a save | last loss |")
    order = sorted(details, key=lambda name: -median(told[name] / told["01"] for told in rounds))
    for name in order:
        told, shares = details[name], [speeds[name] / speeds["01"] for speeds in rounds]
        speed = f"{median(shares):.2f} ({min(shares):.2f} – {max(shares):.2f})"
        costs = f"{told['first step']:.0f} s | {told['peak memory']:.2f} GiB"
        save = f"{told['save_checkpoint']:.2f} s" if "save_checkpoint" in told else ""
        print(f"| {name} | {speed} | {costs} | {save} | {told['loss']:.4f} |")


def same_work(file):
    """Print how far losses are from chapter 01's, and whose are further away.

    Weights in bf16 are other work from the start.
    """
    details = measured(file, "details")
    away = {name: told["loss difference"] for name, told in details.items()}
    away = {name: loss for name, loss in away.items() if not name.startswith("pure-bf16")}
    far = {name: loss for name, loss in away.items() if loss > 0.01}
    most = max(loss for name, loss in away.items() if name not in far)
    print(f"Of the {len(away)} with weights in float32, {len(away) - len(far)} do the same work:")
    print(f"none of their logged losses is further than {most:.4f} from chapter 01's.", end="")
    print(f" The others: {', '.join(far)}." if far else "")


def evaluation(file):
    """Print the sentence on what an evaluation of 8 samples costs chapter 01, in steps on 8."""
    speed = median(speeds["01"] for speeds in measured(file, "speeds"))
    steps = measured(file, "details")["01"]["evaluate"] * speed / (8 * 256)
    print(f"In chapter 01, an evaluation of 8 samples takes {steps:.2f} times as long as")
    print("a training step on as many.")


def goals(file):
    """Print the table of the ratios that have a goal, and whether it is reached."""
    heading("| ratio of speeds | goal | median | lowest – highest | |")
    for name, ratio in measured(file, "ratios").items():
        if ratio["goal"]:
            verdict = "reached" if ratio["median"] >= ratio["goal"] else "**missed**"
            low, high = min(ratio["rounds"]), max(ratio["rounds"])
            cells = f"{ratio['goal']:.2f} | {ratio['median']:.2f} | {low:.2f} – {high:.2f}"
            print(f"| {name} | at least {cells} | {verdict} |")


def floor(file):
    """Print the table of what a step of chapter 01 takes above the bare loop's, part by part."""
    ours, bare = measured(file, "parts").values()
    whole = sum(bare.values())
    heading("| part | chapter 01 | bare loop | above it |")
    for part in ours | {"a step": None}:
        of = [sum(each.values()) if part == "a step" else each[part] for each in (ours, bare)]
        cells = (f"{share / whole:.1%}" for share in (*of, of[0] - of[1]))
        print(f"| {part} | {' | '.join(cells)} |")


@functools.cache
def predicted():
    """Return what benchmarks/scale.py predicts."""
    sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module("scale").predict([])


def scale(scene="as published", devices=(8, 64, 512, 4096)):
    """Print the table of a scene: tokens/s per device, share of a step that waits, GiB if known."""
    heading(f"| | {' | '.join(f'{number:,} devices' for number in devices)} |")
    rows = [row for row in predicted()["rows"] if row["scene"] == scene]
    for name in dict.fromkeys(row["strategy"] for row in rows):
        cells = {
            row["devices"]: f"{row['tokens_per_second']:,.0f}, {row['share']:.1%}"
            + (f", {row['gib']:.0f} GiB" if "gib" in row else "")
            for row in rows
            if row["strategy"] == name
        }
        print(f"| {name} | {' | '.join(cells[number] for number in devices)} |")


def scale_layers():
    """Print the table of what a layer takes if FSDP gathers it and if tensor parallelism splits it.

    In each cell: milliseconds, and GB that a device sends.
    """
    names = ["computing", "in the group", "FSDP alone", "FSDP across groups", "TP pays below"]
    heading(f"| model | devices | {' | '.join(names)} |")
    for row in predicted()["layers"]:
        ways = [("group", "group_gb"), ("FSDP", "FSDP_gb"), ("across", "across_gb")]
        sent = " | ".join(f"{1e3 * row[time]:.1f} ms, {row[gb]:.1f} GB" for time, gb in ways)
        model, pays = row["model"].rpartition("/")[2], f"{row['pays below']:,.0f} tokens"
        print(f"| {model} | {row['devices']} | {1e3 * row['compute']:.1f} ms | {sent} | {pays} |")


def scale_first():
    """Print the table of the fastest layouts that fit, for each way to split: tokens/s a device."""
    rows = predicted()["first"]
    ways = ["FSDP", "TP", "PP", "TP and PP"]
    heading("| model | devices | FSDP alone | and TP | and PP | and both | fastest |")
    for row in rows:
        speeds = {way: row[way]["tokens_per_second"] for way in ways if way in row}
        cells = []
        for way in ways:
            stages = row[way]["stages"] if way in row else 1
            speed = f"{speeds[way]:,.0f}" if way in row else "–"
            cells.append(speed + (f" ({stages} stages)" if stages > 1 else ""))
        best = max(speeds, key=speeds.get, default="does not fit")
        model = row["model"].rpartition("/")[2]
        print(f"| {model} | {row['devices']:,} | {' | '.join(cells)} | {best} |")


def scale_lessons():
    """Print what the scenes of benchmarks/scale.py teach, with their numbers."""
    found = {(row["scene"], row["strategy"], row["devices"]): row for row in predicted()["rows"]}
    fsdp, hybrid, offload = "FSDP, gathered twice", "hybrid", "FSDP, CPU offload"
    split, least = "tensor parallel", "512 tokens"
    few, many = "2048 tokens", "8 × 4096 tokens, 100 Gb/s"

    def speed(scene, strategy, devices):
        return found[scene, strategy, devices]["tokens_per_second"]

    def sent(scene, strategy):
        return found[scene, strategy, 512]["network_gb"]

    waits = [found[f"{tokens} tokens", fsdp, 512]["share"] for tokens in (1024, 2048, 4096)]
    told = "{:.0%} of a step with 1,024 tokens per device, {:.0%} with 2,048, {:.0%} with 4,096"
    mid, most = (speed(few, fsdp, n) / speed(few, fsdp, 8) for n in (256, 4096))
    ahead = [n for scene, name, n in found if (scene, name) == (few, hybrid)]
    ahead = min(n for n in ahead if speed(few, hybrid, n) > speed(few, fsdp, n))
    gain = speed(few, hybrid, 4096) / speed(few, fsdp, 4096)
    slow = speed(many, hybrid, 512) / speed(many, fsdp, 512) - 1
    one = many.removeprefix("8 × ")
    full = "as published"
    alone, ddp = found[full, offload, 8], found[full, "DDP", 8]["gib"]
    staged = speed(many, "pipeline", 512) / speed(many, fsdp, 512) - 1, sent(many, "pipeline")
    alike = found[full, "pipeline", 512]["share"]
    splits = [(least, 8), (least, 4096), (few, 8)]
    splits = [speed(scene, split, n) / speed(scene, fsdp, n) for scene, n in splits]
    cost = [1 - speed(full, offload, n) / speed(full, fsdp, n) for n in (8, 512)]
    print(
        f"""
- **Many tokens hide the network.** On 512 devices FSDP waits {told.format(*waits)}.
- **FSDP stops scaling by latency, not by bytes.** A gather takes N − 1 hops. With 2,048 tokens,
  a device is {mid:.2f} times as fast among 256 as among 8, and {most:.2f} times among 4,096.
- **DDP has a tree and keeps its speed**, but does not fit: {ddp:.0f} GiB.
- **Hybrid pays** where those hops show: with 2,048 tokens from {ahead:,} devices on, on 4,096
  {gain:.1f} times as fast. It pays with accumulation, too: on 100 Gb/s, 8 micro-batches of 4,096
  tokens and 512 devices, a GPU sends {sent(many, hybrid):.1f} GB between nodes instead of
  {sent(many, fsdp):.1f}, and is {slow:.0%} faster. With one micro-batch it sends about as much as
  FSDP ({sent(one, hybrid):.1f} and {sent(one, fsdp):.1f} GB), and is slower.
- **Tensor parallel pays** with few tokens per device: with 512, a device is {splits[0]:.1f} times
  as fast as with FSDP in one node, and {splits[1]:.1f} times among 4,096. With 2,048 in one node it
  reaches {splits[2]:.0%} of FSDP's speed.
- **Pipeline** needs many micro-batches. On 100 Gb/s, with 64 in 8 stages, a GPU sends
  {staged[1]:.1f} GB between nodes, and is {staged[0]:.0%} faster than with FSDP. With 8, as many as
  stages, it is idle for {alike:.0%} of a step.
- **Offload** costs {cost[0]:.0%} on one node, where the host's AdamW takes {alone["host"]:.1f} of
  {alone["step"]:.1f} s, and {cost[1]:.0%} on 512 devices, which share that work.
""".strip()
    )


def scale_published():
    """Print the table of what a published run reached, and what benchmarks/scale.py says of it."""
    heading("| run | GPUs | tokens/s per GPU, published | predicted | GiB, published | predicted |")
    for row in predicted()["published"]:
        how = "fitted" if row["fitted"] else f"{row['error']:+.1%}"
        speeds = f"{row['tokens_per_second']:,} | {row['predicted']:,.0f} ({how})"
        gib = f"{row['gib']:.1f} | {row['predicted_gib']:.1f}"
        print(f"| {row['run']} | {row['devices']} | {speeds} | {gib} |")


def where(file):
    """Print the table of where the time of a step goes, in percents of it."""
    names = ("compute", "exposed", "data", "host", "hidden")
    heading(f"| chapter | ranks | {' | '.join(names)} |")
    for row in measured(file, "rows"):
        compiled = " `--compile`" if row["compiled"] else ""
        cells = " | ".join(f"{row[name]:.1%}" for name in names)
        print(f"| {row['chapter']}{compiled} | {row['ranks']} | {cells} |")


def gpu_checks():
    """Print a table for each machine on which benchmarks/gpu_check.py has run."""
    verdicts = {True: "passed", False: "**failed**", None: "skipped"}
    found = sorted((ROOT / "benchmarks/results").glob("gpu-check-*.json"))
    found = [path for path in found if path.stem != "gpu-check-cpu"]  # which only tries the code
    for path in found:
        machine(path.name)
        print()
        heading("| check | result | numbers | |")
        for row in measured(path.name, "rows"):
            numbers = ", ".join(f"{name} {value:.4g}" for name, value in row["numbers"].items())
            reason = row["reason"].replace("|", "/").replace("\n", " ")
            print(f"| {row['name']} | {verdicts[row['passed']]} | {numbers} | {reason} |")
        print()
    if not found:
        print("No GPU has been at hand yet: these checks have run with `--device cpu` only.")


def loaded(path):
    """Return a script of a related topic as a module."""
    sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module("contenders").load(str(ROOT / "related-topics" / path))


def listing(path, name):
    """Print a function of a script."""
    source = (ROOT / path).read_text()
    fenced("python", [source.splitlines()[number - 1] for number in parts(source)[name]])


def batch_sizes(file):
    """Print the table of losses by batch size: the best of all rates, and those of three rules."""
    sweep, rows = loaded("batch-size-and-lr/sweep.py"), measured(file, "rows")
    losses = sweep.losses_of(rows)
    by_rule = sweep.scaled(losses)
    heading(f"| samples per step | steps | best of all rates | {' | '.join(by_rule)} |")
    for batch, by_rate in losses.items():
        rates = [min(by_rate, key=by_rate.get), *(rates[batch] for rates in by_rule.values())]
        cells = (f"{by_rate[lr]:.3f} at {lr:g}" for lr in rates)
        print(f"| {batch} | {rows[0]['samples'] // batch:,} | {' | '.join(cells)} |")


def same_bits(file):
    """Print the table of which runs have the same bits."""
    heading("| chapter and layout | the same command twice | stopped and resumed | against 01 |")
    for row in measured(file, "rows"):
        found = [row[name] for name in ("twice", "resumed", "norm")]
        cells = ("identical" if one["identical"] else f"{one['difference']:.1e}" for one in found)
        print(f"| {row['layout']} | {' | '.join(cells)} |")


def waits(file):
    """Print the table of the share of a step that waits for data."""
    heading("| data | c | share of a step that waits | predicted |")
    for row in measured(file, "rows"):
        if row["workers"] is None:
            print(f"| memory-mapped tokens, as in the chapters | | {row['share']:.1%} | |")
            continue
        ahead, cost = row["workers"], row["cost"]
        predicted = max(0, 1 - ahead / cost) if ahead else cost / (cost + 1)
        processes = f"{ahead} worker{'s' * (ahead != 1)}" if ahead else "no workers"
        print(f"| `DataLoader`, {processes} | {cost:.1f} | {row['share']:.1%} | {predicted:.0%} |")


def patch(path):
    """Print the hunks of a patch."""
    lines = (ROOT / path).read_text().splitlines()
    fenced("diff", [line for line in lines if not line.startswith(("---", "+++"))])


def preparing(file):
    """Print the table of how long programs need to tokenize the same text."""
    heading("| program | time | lowest – highest | first file after |")
    for row in measured(file, "rows"):
        spread = f"{row['low']:.2f} – {row['high']:.2f}"
        print(f"| {row['name']} | {row['time']:.2f} | {spread} | {row['first file']:.0%} of it |")
    size, rounds = measured(file, "megabytes"), measured(file, "rounds")
    print(f"\n{size} MB of text; medians of {rounds} rounds, as multiples of two workers' time.")


def frameworks(file):
    """Print the table of speed, memory and saves of frameworks, as ratios to two chapters."""
    ratios = measured(file, "ratios")
    heading("| | tokens per second / 03 | / 04 | peak memory / 03 | / 04 | a save / 03 | / 04 |")
    for name in dict.fromkeys(ratio.partition(" / ")[0] for ratio in ratios):
        keys = (
            f"{name} / {chapter}, {what}"
            for what in ("speed", "memory", "save")
            for chapter in ("03", "04")
        )
        cells = (with_range(ratios[key]["rounds"]) if key in ratios else "1" for key in keys)
        print(f"| {name} | {' | '.join(cells)} |")


def with_range(values):
    """Return the median, and the lowest and highest where these are a fifth of it apart."""
    low, middle, high = min(values), median(values), max(values)
    return f"{middle:.2f}" + (f" ({low:.2f} – {high:.2f})" if high - low > middle / 5 else "")


def sizes(file):
    """Print the table of sizes for --config, and what each of them needs."""
    shapes = loaded("own-architecture/sizes.py").SHAPES
    names = ["size", "width × layers", "heads, of keys and values", "weights", "embeddings"]
    names += ["billion tokens", "GPU hours", "on 1 GPU", "on 8 GPUs"]
    heading(f"| {' | '.join(names)} |")
    for row in measured(file, "rows"):
        hours = row["gpu_hours"]
        width, layers, heads, kv_heads, *_ = shapes[row["size"]]
        share = f"{row['embeddings'] / row['weights']:.0%}"
        cells = [f"{width} × {layers}", f"{heads}, {kv_heads}", f"{row['weights']:,}", share]
        cells += [f"{row['tokens'] / 1e9:.1f}", f"{hours:,.{2 if hours < 1 else 0}f}"]
        for gpus in ("1 GPUs", "8 GPUs"):
            cells.append(f"{row[gpus]['gib']:.0f} GiB, `{row[gpus]['setting']}`")
        print(f"| {row['size']} | {' | '.join(cells)} |")


def environments(rank=3):
    """Print the table of what each launcher told one rank."""
    heading(
        "| launcher | rank | ranks in all | rank on its node | where to meet | GPUs | threads |"
    )
    results = json.loads((ROOT / "benchmarks/results/environments.json").read_text())
    for launcher, found in results.items():
        told = found["ranks"][rank]["variables"]
        groups = [[name] for name in found["names"]]
        groups.append([name for name in told if name.startswith(("MASTER", "SLURM_STEP_NODE"))])
        groups[-1] += [name for name in ("SLURM_JOB_ID", "SLURM_STEP_ID") if name in told]
        groups += [["CUDA_VISIBLE_DEVICES"], ["OMP_NUM_THREADS"]]
        cells = (", ".join(f"`{n}={told[n]}`" for n in names if n in told) for names in groups)
        print(f"| {launcher} | {' | '.join(cell or 'not set' for cell in cells)} |")


def families():
    """Print which families of transformers each chapter trains, and why it refuses the others."""
    rows = measured("families.json", "rows")
    columns = list(dict.fromkeys(row["chapter"] for row in rows))
    cells, reasons = {}, []
    for row in rows:
        cell = {"equal": "yes", "wrong": "**wrong**"}.get(row["verdict"])
        if cell is None:
            reason = reason_of(row)
            reasons += [reason] if reason not in reasons else []
            cell = f"no ({reasons.index(reason) + 1})"
        cells.setdefault(row["family"], {})[row["chapter"]] = cell
    heading(f"| model | {' | '.join(columns)} |")
    for family, by_chapter in sorted(cells.items()):
        kind, *settings = family.split("+")
        name = " ".join([kind, *(f"`{setting}`" for setting in settings)])
        print(f"| {name} | {' | '.join(by_chapter.get(column, '') for column in columns)} |")
    print("\nThe lines with which the chapters refuse a model:\n")
    for number, reason in enumerate(reasons, 1):
        print(f"{number}. `{reason}`")


def reason_of(row):
    """Return the line that refuses a model, without what differs between models."""
    reason = row["refused"].replace(row["family"], "NAME")
    reason = re.sub(r"how to split \S+", "how to split MODULE", reason)
    reason = re.sub(r"(tokens alone|be split): \w+\(.*", r"\1: ...", reason)
    reason = re.sub(r"because it has \w+", "because it has FEATURE", reason)
    return re.sub(r"NAME has \d+ key-value", "NAME has N key-value", reason)


def machine(file, *packages):
    """Print in a sentence on what a file under benchmarks/results was measured, with packages."""
    facts = measured(file, "machine")
    versions = ", ".join(f"{name} {facts[name]}" for name in ("torch", "transformers", *packages))
    gpus = facts.get("gpus", "")
    if gpus and not isinstance(gpus, str):  # as benchmarks/gpu_check.py has them
        gpus = f"{facts['count']} x {gpus[0]['name']}"
    flags = "" if facts["bf16 flags"] == "none" else f" ({facts['bf16 flags']})"
    cpu = f"{facts['cores']} cores of an {facts['cpu']}{flags}"
    print(f"{gpus and f'{gpus}, '}{cpu}, {versions}.")


def shrink_pictures():
    """Give pictures a palette of 64 colours: plots look the same in a quarter of the bytes."""
    for path in sorted(ROOT.glob("assets/*.png")):
        if (picture := Image.open(path)).mode != "P":
            picture.convert("RGB").quantize(64).save(path, optimize=True)


def main():
    """Have cog make all parts, or with --check none; the exit status says whether all is well."""
    if "--check" not in sys.argv:
        shrink_pictures()
    files = [*readmes(), *sorted(ROOT.glob("*/configs/*.args"))]
    options = ["--check", "--diff"] if sys.argv[1:] == ["--check"] else ["-r"]
    command = ["cog", *options, "-P", "-p", "from docs import *", *map(str, files)]
    sys.exit(Cog().main(command))


if __name__ == "__main__":
    main()
