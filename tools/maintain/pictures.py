"""Draw the pictures of the chapters as SVG files, which follow the reader's light or dark theme.

Here:  make pictures       measure the data of two pictures, and draw all pictures
       python tools/maintain/pictures.py        only draw, from the files in benchmarks/results

pictures.yaml describes the pictures that consist of boxes and arrows. The functions below make the
other pictures: a function computes its data, or reads measured data from a file.
"""

import json
import math
import sys
from html import escape
from itertools import pairwise, product
from pathlib import Path

import torch
import yaml
from transformers import LlamaConfig, LlamaModel

from chapters import ROOT

sys.path += [str(ROOT / "tools/planner"), str(ROOT / "benchmarks")]

from activations import Recorder
from harness import load

ASSETS = ROOT / "assets"
RESULTS = ROOT / "benchmarks/results"
WIDTH = 600
# A line of text is this number of pixels high.
LINE = 20
# These colors stand for four ranks, or for four matrices.
COLORS = ("teal", "blue", "orange", "purple")
STYLE = Path(__file__).with_suffix(".css").read_text()
ARROW = (
    '<marker id="arrow" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="6.5" markerHeight="6.5" '
    'orient="auto"><path d="M0 0L8 4L0 8z"/></marker>'
)


class Picture:
    """Build an SVG picture of `width` × `height` pixels, with a `title` for screen readers."""

    def __init__(self, height, title, width=WIDTH):
        self.height = height
        size = f'width="{width:g}" height="{height:g}" viewBox="0 0 {width:g} {height:g}"'
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" {size}>',
            f"<style>{STYLE}</style>",
            f"<defs>{ARROW}</defs>",
            f"<title>{escape(title)}</title>",
        ]
        self.box(0, 0, width, height, color="paper", line=False)

    def text(self, x, y, text, style="", anchor="middle"):
        """Add the lines of a text at (x, y); center the lines vertically on y."""
        lines = text.splitlines()
        for number, line in enumerate(lines):
            top = y + LINE * (number - (len(lines) - 1) / 2)
            tag = f'<text x="{x:g}" y="{top:g}" class="{style}" text-anchor="{anchor}">'
            self.parts.append(f"{tag}{escape(line)}</text>")

    def box(self, x, y, width, height, text="", color="idle", style="", line=True):
        """Add a filled rectangle with the top left corner (x, y), and a text in its middle."""
        border = ' stroke="var(--line)"' if line else ""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="3" '
            f'fill="var(--{color})"{border}/>'
        )
        self.text(x + width / 2, y + height / 2, text, style)

    def line(self, *points, style="", arrow=False):
        """Add a line through points (x, y); with `arrow`, the line ends in an arrowhead."""
        end = ' marker-end="url(#arrow)"' if arrow else ""
        path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
        self.parts.append(f'<path d="{path}" class="{style}"{end}/>')

    def axes(self, x_label, y_label, x_most, y_least, y_most, every=0):
        """Add two axes; return a function that converts values (x, y) to a position in pixels.

        With `every`, also label the integers on the y-axis, and the multiples of `every` on the
        x-axis.
        """
        left, right, top, bottom = 60, 580, 40, self.height - 60
        self.line((left, top), (left, bottom), (right, bottom))
        self.text((left + right) / 2, bottom + 38, x_label, "quiet")
        self.text(left - 10, top, y_label, "quiet small", "end")

        def point(x, y):
            share = (y - y_least) / (y_most - y_least)
            return left + (right - left) * x / x_most, bottom - (bottom - top) * share

        for x in range(0, x_most + 1, every) if every else ():
            self.text(point(x, 0)[0], bottom + 18, str(x), "quiet")
        for y in range(math.ceil(y_least), math.ceil(y_most)) if every else ():
            self.text(left - 10, point(0, y)[1], str(y), "quiet", "end")
        return point

    def legend(self, y, *entries, left=20):
        """Write a legend: a row of entries (color, text), from left to right."""
        for color, text in entries:
            self.box(left, y - 7, 14, 14, color=color)
            self.text(left + 22, y, text, anchor="start")
            left += 50 + width_of(text)

    def save(self, name):
        """Write the picture to the file `name`.svg in ASSETS."""
        (ASSETS / f"{name}.svg").write_text("\n".join([*self.parts, "</svg>\n"]))


def width_of(text):
    """Return an estimate of the width of a text's longest line, in pixels, for a wide font."""
    return max(8.6 * len(line) for line in text.splitlines())


def height_of(text):
    """Return the height in pixels of a box around a text."""
    return LINE * len(text.splitlines()) + 16


def between(start, end):
    """Return two points (x, y): the start and the end of an arrow between the edges of two boxes.

    A box is (x, y, half width, half height), and the center of the box is at (x, y).
    """
    (x, y, width, height), (end_x, end_y, end_width, end_height) = start, end
    if y == end_y:
        side = math.copysign(1, end_x - x)
        return (x + side * width, y), (end_x - side * end_width, y)
    if abs(x - end_x) < max(width, end_width) - 12:
        # The wider box spans the center of the narrower box, so add a vertical arrow through this
        # center.
        x = end_x = x if width < end_width else end_x
    side = math.copysign(1, end_y - y)
    return (x, y + side * height), (end_x, end_y - side * end_height)


def flow(name, title, width, boxes, arrows, frames=()):
    """Write a picture of boxes, arrows between boxes, and frames around boxes to `name`.svg.

    The comment at the top of pictures.yaml describes the values of `boxes`, `arrows` and `frames`.
    """
    top, gap = (40, 84) if frames else (10, 44)
    box_places = {}
    for row in sorted({row for _, row, *_ in boxes.values()}):
        inside = {key: (x, text) for key, (x, at, _, text) in boxes.items() if at == row}
        height = max(height_of(text) for _, text in inside.values())
        for key, (x, text) in inside.items():
            box_places[key] = x, top + height / 2, width_of(text) / 2 + 10, height_of(text) / 2
        top += height + gap
    picture = Picture(top - gap + (22 if frames else 10), title, width)
    for text, *keys in frames:
        left = min(box_places[key][0] - box_places[key][2] for key in keys) - 12
        right = max(box_places[key][0] + box_places[key][2] for key in keys) + 12
        upper = min(box_places[key][1] - box_places[key][3] for key in keys) - 28
        lower = max(box_places[key][1] + box_places[key][3] for key in keys) + 12
        picture.box(left, upper, right - left, lower - upper, color="paper")
        picture.text(left + 40, upper + 14, text, "quiet small", "start")
    two_ways = {(end, start) for start, end, *_ in arrows}
    for start, end, *texts in arrows:
        (x, y), (end_x, end_y) = between(box_places[start], box_places[end])
        if (start, end) in two_ways:
            shift = 12 if y < end_y else -12
            x, end_x = x + shift, end_x + shift
        picture.line((x, y), (end_x, end_y), arrow=True)
        for text in texts:
            picture.text((x + end_x) / 2 + 8, (y + end_y) / 2 - 2, text, "small label", "start")
    for key, (_, _, color, text) in boxes.items():
        x, y, half, height = box_places[key]
        picture.box(x - half, y - height, 2 * half, 2 * height, text, color)
    picture.save(name)


def sequence(name, title, width, heads, steps):
    """Write a picture to `name`.svg: the messages between processes, from top to bottom.

    The comment at the top of pictures.yaml describes the values of `heads` and `steps`.
    """
    top = 24 + max(height_of(text) for *_, text in heads)
    # These are the gaps in pixels below each step, which is a box or a message.
    gaps = [14 if where.isdecimal() else 10 for where, _ in steps]
    bottom = top + sum(gaps) + sum(height_of(text) for _, text in steps)
    picture = Picture(bottom, title, width)
    for x, color, text in heads:
        half, height = width_of(text) / 2 + 10, top - 24
        picture.line((x, 10 + height), (x, bottom - 20), style="dashed")
        picture.box(x - half, 10, 2 * half, height, text, color)
    for (where, text), gap in zip(steps, gaps, strict=True):
        height = height_of(text)
        start, end = (heads[int(where[at])][0] for at in (0, -1))
        middle = (start + end) / 2
        if where.isdecimal():
            half = max(width_of(text), end - start + 80) / 2 + 10
            picture.box(middle - half, top, 2 * half, height, text)
        else:
            picture.text(middle, top + height / 2 - 8, text, "small label")
            picture.line((start, top + height - 4), (end, top + height - 4), arrow=True)
            if "=" in where:
                picture.line((end, top + height - 4), (start, top + height - 4), arrow=True)
        top += height + gap
    picture.save(name)


def results(name):
    """Return the parsed content of the file `name`.json in benchmarks/results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


# ---- 01 --------------------------------------------------------------------------------------
def killed_run():
    """Show the loss of a run that was killed twice, and the loss of an uninterrupted run."""
    runs = results("killed")
    losses = [loss for _, loss in runs["straight"]]
    picture = Picture(340, "The loss of a run that was killed twice lies on that of a straight run")
    point = picture.axes("step", "loss", len(losses), min(losses), max(losses), every=20)
    picture.line(*(point(*row) for row in runs["straight"]), style="wide")
    for rows in runs["starts"]:
        picture.line(*(point(*row) for row in rows), style="strong")
    for height, (rows, later) in zip((84, 124), pairwise(runs["starts"]), strict=True):
        x, y = point(*rows[-1])
        picture.line((x, y), (x, height + 14), style="dashed")
        picture.box(x - 4, y - 4, 8, 8, color="strong")
        text = f"kill -9 after step {rows[-1][0]}: continues with step {later[0][0]}"
        picture.text(580, height, text, "warn", "end")
    picture.text(570, 24, "wide: a run that nobody stopped; thin: the killed run", "quiet", "end")
    picture.save("01-killed")


# ---- 02 --------------------------------------------------------------------------------------
def two_ranks():
    """Show one training step of chapter 02 on two ranks, as the profiler recorded the step."""
    ranks = results("step")["ranks"]
    picture = Picture(270, "One step of two ranks: buckets are sent while the backward pass runs")
    starts = [span[0] for spans in ranks for parts in spans.values() for span in parts]
    ends = [sum(span) for spans in ranks for parts in spans.values() for span in parts]
    zero, scale = min(starts), 490 / (max(ends) - min(starts))
    colors = {"forward": "teal", "backward": "blue", "clip and step": "purple"}
    buckets = list(zip(*(sorted(spans["all-reduce"]) for spans in ranks), strict=True))
    for rank, spans in enumerate(ranks):
        top = 20 + 95 * rank
        picture.text(95, top + 15, f"rank {rank}", "bold", "end")
        picture.text(95, top + 50, "gradients", "small", "end")
        for name, color in colors.items():
            for start, length in spans[name]:
                x, width = 102 + scale * (start - zero), scale * length
                picture.box(x, top, width, 30, name if width > 70 else "", color, "small")
        for number, bucket in enumerate(buckets, 1):
            # No rank can send a bucket before the slowest rank has filled the same bucket, so the
            # time before this moment is waiting.
            start, length = bucket[rank]
            sent = max(begin for begin, _ in bucket)
            wait = max(0, min(sent, start + length) - start)
            x, split = 102 + scale * (start - zero), scale * wait
            picture.box(x, top + 36, split, 28, color="paper")
            picture.box(x + split, top + 36, scale * (length - wait), 28, color="orange")
            picture.text(x - 4, top + 50, str(number), "small", "end")
    picture.line((102, 208), (592, 208))
    interval = 10 ** int(math.log10(490 / scale))
    for time in range(0, int(490 / scale), interval):
        picture.text(102 + scale * time, 222, f"{time} ms" if time else "0", "quiet small")
    entries = ("orange", "sends a bucket"), ("paper", "waits for the other rank")
    picture.legend(250, *entries, ("purple", "clip, optimizer"))
    picture.save("02-step")


def ring_rounds(ranks):
    """Simulate a ring all-reduce; return a list with an entry for the start and for each round.

    `entry[rank][piece]` is the number of ranks whose values this rank has added up in this piece.
    """
    rounds = [[[1] * ranks for _ in range(ranks)]]
    for number in range(2 * (ranks - 1)):
        held, new = rounds[-1], [list(row) for row in rounds[-1]]
        for rank in range(ranks):
            # In the first round, a rank sends the piece with the rank's own number. Later, a rank
            # sends the piece that it received in the previous round.
            piece = (rank - number) % ranks
            target = (rank + 1) % ranks
            is_sum = number < ranks - 1
            new[target][piece] = held[rank][piece] + (held[target][piece] if is_sum else 0)
        rounds.append(new)
    return rounds


def ring():
    """Show the pieces of four ranks at the start and after each round of a ring all-reduce."""
    picture = Picture(464, "A ring all-reduce of four ranks takes three rounds, and three more")
    size, rounds = 30, ring_rounds(4)
    for number, (before, held) in enumerate(pairwise([rounds[0], *rounds])):
        left = 24 + 146 * (number if number < 4 else number - 3)
        top = 52 if number < 4 else 252
        name = f"round {number}" if number else "at the start"
        picture.text(left + 2 * size, top - 32, name, "bold")
        for rank in range(4):
            x = left + size * rank
            picture.text(x + size / 2, top - 12, f"r{rank}", "quiet small")
            for piece, count in enumerate(held[rank]):
                is_new = count != before[rank][piece]
                color = "orange" if is_new else "teal" if count == 4 else "paper"
                picture.box(x, top + size * piece, size, size, str(count), color)
    picture.text(24, 280, "rounds 1 – 3:\nreduce-scatter", anchor="start")
    picture.text(24, 332, "rounds 4 – 6:\nall-gather", anchor="start")
    note = "A column holds the pieces of a rank. A number says how many ranks\nare added up in it."
    picture.text(24, 408, note, "quiet", "start")
    picture.legend(444, ("orange", "just received"), ("teal", "the sum of all ranks"))
    picture.save("02-ring")


# ---- 04 --------------------------------------------------------------------------------------
def held_parts(ranks, ranks_per_node):
    """Return the memory that one of `ranks` ranks needs under each kind of sharding.

    The result has a list of pairs for each kind. A pair is the color of a part of the memory, such
    as the gradients, and the bytes per weight of this part.
    """

    def copy(size):
        return [("teal", 4 / size), ("blue", 4 / size), ("orange", 8 / size)]

    zero_2 = [*copy(ranks), ("purple", 2)]
    hybrid = copy(min(ranks, ranks_per_node))
    return {"DDP": copy(1), "hybrid": hybrid, "ZeRO-2": zero_2, "ZeRO-3": copy(ranks)}


def held_bytes():
    """Show the memory that a model of 8 billion weights needs on each of 16 GPUs, by sharding."""
    # Count weights in billions, so that the products with bytes per weight are in GB.
    weights = 8
    picture = Picture(284, "DDP holds everything on each device; sharding divides it")
    scale = 440 / (16 * weights)
    for number, (name, parts) in enumerate(held_parts(16, 8).items()):
        top, left = 20 + 58 * number, 80
        picture.text(left - 10, top + 20, name, "bold", "end")
        for color, size in parts:
            picture.box(left, top, scale * weights * size, 40, color=color)
            left += scale * weights * size
        total = weights * sum(size for _, size in parts)
        picture.text(left + 8, top + 20, f"{total:g} GB", anchor="start")
    entries = ("teal", "weights"), ("blue", "gradients"), ("orange", "AdamW's moments")
    picture.legend(266, *entries, ("purple", "gathered"))
    picture.save("04-holds")


def gathered_layers():
    """Show when a device holds each of four layers in full, with ZeRO-2 and with ZeRO-3."""
    turns = [("F", n) for n in range(1, 5)] + [("B", n) for n in range(4, 0, -1)]
    picture = Picture(420, "ZeRO-3 holds a layer while it is computed; ZeRO-2 from its forward on")
    for number, name in enumerate(("ZeRO-3", "ZeRO-2")):
        top, left, width = 50 + 190 * number, 130, 54
        picture.text(10, top - 26, name, "bold", "start")
        for turn, (kind, layer) in enumerate(turns):
            picture.text(left + width * (turn + 0.5), top - 26, f"{kind}{layer}", "quiet")
        for layer in range(1, 5):
            y = top + 34 * (layer - 1) - 10
            picture.text(left - 10, y + 15, f"layer {layer}", anchor="end")
            forward, backward = layer - 1, 8 - layer
            for turn in range(8):
                color = "orange" if turn + 1 in (forward, backward) else "idle"
                color = "purple" if number == 1 and forward <= turn <= backward else color
                color = "teal" if turn in (forward, backward) else color
                picture.box(left + width * turn, y, width - 2, 30, color=color, line=False)
    picture.legend(400, ("teal", "computes"), ("orange", "arrives"), ("purple", "stays gathered"))
    picture.save("04-gathered")


# ---- 05 --------------------------------------------------------------------------------------
class History(Recorder):
    """Record how many bytes of tensors are live after each operation that creates a tensor."""

    def __init__(self):
        self.history = []
        super().__init__()

    def update_peaks(self):
        """Append the current number of live bytes to the history."""
        self.history.append(self.live.total())


def live_bytes(recompute):
    """Return a list of the live bytes, without weights, during a training step.

    The list has a number for each operation that creates a tensor. The model has eight layers. With
    `recompute`, each layer recomputes its activations in the backward pass.
    """
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 4}
    model = LlamaModel(LlamaConfig(num_hidden_layers=8, vocab_size=64, use_cache=False, **sizes))
    for weight in model.parameters():
        # Free each gradient as soon as it is ready, as FSDP does after reducing it.
        weight.register_post_accumulate_grad_hook(lambda weight: setattr(weight, "grad", None))
    if recompute:
        model.activation_checkpointing_enable({"use_reentrant": False})
    with History() as recorder:
        recorder.weights = {weight.untyped_storage()._cdata for weight in model.parameters()}
        hidden = model(torch.zeros(1, 512, dtype=torch.int64)).last_hidden_state
        hidden.sum().backward()
    return recorder.history


def kept_activations():
    """Show the bytes of activations during a training step, with and without recomputation.

    The model has eight layers.
    """
    kept, full = live_bytes(recompute=False), live_bytes(recompute=True)
    picture = Picture(330, "Without recomputation, activations grow until the backward pass starts")
    top_label = f"{max(kept) / 2**20:.0f} MiB"
    point = picture.axes("one step: forward, then backward", top_label, 1, 0, max(kept))
    for history, style in ((kept, ""), (full, "strong")):
        last = len(history) - 1
        picture.line(*(point(n / last, size) for n, size in enumerate(history)), style=style)
    picture.text(356, 70, "--recompute none", anchor="start")
    share = max(full) / max(kept)
    picture.text(320, 206, f"--recompute full: at most {share:.0%}", "warn")
    picture.save("05-kept")


# ---- 07 --------------------------------------------------------------------------------------
def turns_of(schedule, ranks, micro_batches):
    """Return a dictionary of the passes that the pipeline ranks run in the turns of a schedule.

    The keys are (rank, turn). A rank has no key for an idle turn. The value "F1" is the forward
    pass of micro-batch 1, and "B1" is its backward pass.
    """
    turns = {}
    for rank in range(ranks):
        # Count the later ranks, because the first micro-batch goes through these ranks and back
        # before this rank gets a gradient.
        later_ranks = ranks - 1 - rank
        for n in range(1, micro_batches + 1):
            forward, backward = rank + n, micro_batches + ranks - 1 + later_ranks + n
            if schedule == "1f1b":
                backward = ranks - 1 + later_ranks + 2 * n
                # After `later_ranks + 1` forward passes, a rank alternates backward and forward
                # passes.
                forward = rank - 1 + 2 * n if n > later_ranks + 1 else forward
            turns |= {(rank, forward): f"F{n}", (rank, backward): f"B{n}"}
    return turns


def schedule(name, ranks=3, micro_batches=4):
    """Show the pass that each pipeline rank runs in each turn of the schedule `name`.

    For each rank, also show the largest number of micro-batches whose activations it keeps.
    """
    turns = turns_of(name, ranks, micro_batches)
    last = max(turn for _, turn in turns)
    picture = Picture(100 + 40 * ranks, f"What each rank of {name} runs in each turn")
    width = 440 / last
    picture.text(64 + 440 + 44, 20, "keeps", "quiet")
    for turn in range(1, last + 1):
        picture.text(64 + width * (turn - 0.5), 20, str(turn), "quiet")
    for rank in range(ranks):
        top = 36 + 40 * rank
        picture.text(8, top + 18, f"rank {rank}", anchor="start")
        kept = most = 0
        for turn in range(1, last + 1):
            step = turns.get((rank, turn), "")
            change, color = {"F": (1, "teal"), "B": (-1, "blue"), "": (0, "paper")}[step[:1]]
            kept += change
            most = max(most, kept)
            picture.box(64 + width * (turn - 1), top, width - 2, 36, step, color, line=bool(step))
        picture.text(64 + 440 + 44, top + 18, str(most), "bold")
    picture.legend(72 + 40 * ranks, ("teal", "forward"), ("blue", "backward"), ("paper", "idle"))
    picture.save(f"07-{name}")


# ---- 08 --------------------------------------------------------------------------------------
def context():
    """Show how four context-parallel ranks share the work of attention: gather and Ulysses."""
    picture = Picture(610, "Gather: all keys for some queries. Ulysses: all tokens of some heads")
    size = 26
    picture.text(20, 22, "gather: each rank attends from its tokens", "bold", "start")
    picture.text(60 + 4 * size, 52, "keys", "quiet")
    for query, key in product(range(8), range(8)):
        color = COLORS[query // 2] if key <= query else "paper"
        picture.box(60 + size * key, 66 + size * query, size, size, color=color)
    for rank in range(4):
        y = 66 + size * (2 * rank + 1)
        picture.text(52, y, f"rank {rank}", "small", "end")
        pairs = sum(query + 1 for query in (2 * rank, 2 * rank + 1))
        picture.text(60 + 8 * size + 14, y, f"{pairs} of 36 pairs of tokens", "quiet", "start")
    picture.text(20, 314, "Ulysses: exchange tokens for heads", "bold", "start")
    for number, name in enumerate(("q, k, v", "attention", "output")):
        left = 60 + 190 * number
        picture.text(left + 2 * size, 346, name, "quiet")
        for token, head in product(range(8), range(4)):
            color = COLORS[head if name == "attention" else token // 2]
            picture.box(left + size * head, 362 + size * token, size, size, color=color)
        if number:
            picture.line((left - 78, 466), (left - 8, 466), arrow=True)
            picture.text(left - 44, 450, "all-to-all", "warn small")
    picture.text(52, 466, "tokens", "quiet small", "end")
    picture.text(52, 584, "heads", "quiet small", "end")
    picture.legend(584, *((color, f"rank {rank}") for rank, color in enumerate(COLORS)), left=200)
    picture.save("08-context")


# ---- 09 --------------------------------------------------------------------------------------
def experts():
    """Show the path of token 0 to two of eight experts, which four ranks share, and back."""
    # Sample random scores in place of a router, which gives each token a score for each expert.
    scores = 4 * torch.rand(8, 8, generator=torch.Generator().manual_seed(5))
    best, chosen = scores.topk(2)
    weights = best.softmax(1)
    tokens, middle, results = 78, 212, 346
    picture = Picture(452, "A token travels to its two experts on other ranks, and back")
    # Each rank has two tokens and two experts. The boxes of token N and of expert N begin at the x
    # position lefts[N].
    lefts = [20 + 146 * (number // 2) + 64 * (number % 2) for number in range(8)]
    for number, left in enumerate(lefts):
        rank = number // 2
        color, center = COLORS[rank], left + 30
        if number % 2 == 0:
            picture.text(left + 62, 22, f"rank {rank}", "bold")
        for y in (tokens, results):
            picture.box(left, y, 60, 32, f"token {number}", color, "small")
        picture.box(left, middle, 60, 58, color=color)
        picture.text(center, middle + 18, f"expert {number}", "small")
        visitors = [str(token) for token in range(8) if number in chosen[token]]
        picture.text(center, middle + 40, " ".join(visitors), "quiet small")
    start = lefts[0] + 30
    for expert, weight in zip(chosen[0].tolist(), weights[0].tolist(), strict=True):
        center = lefts[expert] + 30
        picture.line((start, tokens + 34), (center, middle - 3), style="strong", arrow=True)
        picture.line((center, middle + 60), (start, results - 3), style="strong", arrow=True)
        picture.text(center + 8, middle + 69, f"× {weight:.2f}", "warn small", "start")
    picture.text(20, 56, "each rank routes its own tokens", "quiet", "start")
    picture.text(580, 156, "all-to-all: tokens to experts", "warn small", "end")
    picture.text(580, 318, "all-to-all: results to tokens", "warn small", "end")
    picture.text(20, 404, "a token adds up the results of its experts", "quiet", "start")
    picture.text(20, 432, "numbers in an expert: the tokens that chose it", "quiet", "start")
    picture.save("09-experts")


# ---- related topics --------------------------------------------------------------------------
def muon_exchange():
    """Show how two ranks exchange shards to get full matrices, and return shards of updates."""
    picture = Picture(290, "Each rank gets two full matrices, and returns their shards")
    names = ("shards of the momentum", "full matrices", "shards of the update")
    for number, name in enumerate(names):
        left = 20 + 206 * number
        picture.text(left + 74, 20, name, "bold small")
        for matrix, half in product(range(4), range(2)):
            # In the middle of the picture, a rank has both halves of two matrices. On the left and
            # on the right, a rank has one half of each of the four matrices.
            rank, row, height = (matrix // 2, half, 30) if number == 1 else (half, matrix // 2, 38)
            x, y = left + 74 * (matrix % 2), 58 + 112 * rank + height * row
            text, color = f"{'ABCD'[matrix]} {('top', 'bottom')[half]}", COLORS[matrix]
            picture.box(x, y, 62, 30, text, color, "small")
        if number:
            picture.line((left - 62, 148), (left - 8, 148), arrow=True)
            picture.text(left - 35, 132, "all-to-all", "warn small")
    for rank in range(2):
        picture.text(20, 44 + 112 * rank, f"rank {rank}", "quiet", "start")
    picture.text(300, 270, "in the middle, each rank orthogonalizes its full matrices", "quiet")
    picture.save("muon-exchange")


def muon_curves():
    """Show the validation losses of AdamW and of Muon, each at its best learning rate."""
    sweep = load(ROOT / "related-topics/muon/sweep.py")
    curves = {}
    for optimizer, by_rate in sweep.curves_of(results("muon")["rows"]).items():
        rate = sweep.best_of(by_rate)
        curves[optimizer] = rate, by_rate[rate]
    losses = [loss for _, curve in curves.values() for loss in curve.values()]
    last = max(curves["Muon"][1])
    picture = Picture(340, "At its best rate, Muon has a lower validation loss than AdamW")
    lowest, highest = math.floor(min(losses)), math.ceil(max(losses))
    point = picture.axes("step", "loss", last, lowest, highest, every=40)
    styles = ("AdamW", "", "", 16), ("Muon", "strong", "warn", -18)
    for optimizer, style, text_style, above in styles:
        rate, curve = curves[optimizer]
        picture.line(*(point(*row) for row in curve.items()), style=style)
        x, y = point(last, curve[last])
        picture.text(x, y - above, f"{optimizer}, peak rate {rate:g}", text_style, "end")
    picture.save("muon-curves")


def main():
    """Write all pictures into ASSETS."""
    described = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    for name, picture in described.items():
        draw = flow if "boxes" in picture else sequence
        draw(name, **picture)
    killed_run()
    two_ranks()
    ring()
    held_bytes()
    gathered_layers()
    kept_activations()
    schedule("gpipe")
    schedule("1f1b")
    context()
    experts()
    muon_exchange()
    muon_curves()


if __name__ == "__main__":
    main()
