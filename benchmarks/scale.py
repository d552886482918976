"""Predict on paper how each chapter's way to split scales from 8 to 4096 GPUs: speed and memory.

Here:  python benchmarks/scale.py --plot scale.png
Else:  python benchmarks/scale.py -m meta-llama/Llama-3.1-70B --recompute full --network-gbs 25

Nothing is measured. One step is played on streams: one computes, one sends among the ranks of a
copy of the model, one among copies, and one among the ranks that split a layer, for which the first
one waits. A pipeline is idle as the formula of chapter 07 says. Bytes are those that tests count in
runs of chapters 04 to 07, shapes and memory are the planner's, and what a collective takes is
nccl's own model. One number is fitted: the share of a GPU's peak that computing reaches, at 8 GPUs
of a published run. What that run did on 128 GPUs is then predicted. All flags of
05-large-model/will_it_fit.py are understood.
"""

import argparse
import copy
import dataclasses
import functools
import importlib.util
import itertools
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path

from matplotlib.figure import Figure

from harness import in_rows

ROOT = Path(__file__).resolve().parent.parent
PLANNER = ROOT / "05-large-model/will_it_fit.py"
DEVICES = [2**power for power in range(3, 13)]
SHOWN, SWEPT = [8, 64, 512, 4096], 512  # numbers of devices that are printed, and swept over tokens
TOKENS = [512, 1024, 2048, 4096, 8192, 16384]  # of a device's one sample
SCENES = {"as published": ""}  # flags, on top of those that are given
SCENES |= {f"{tokens} tokens": f"--batch-size 1 --seq-length {tokens}" for tokens in TOKENS}
SCENES["4096 tokens, 100 Gb/s"] = f"{SCENES['4096 tokens']} --network-gbs 12"
SCENES["8 × 4096 tokens, 100 Gb/s"] = f"{SCENES['4096 tokens, 100 Gb/s']} --micro-steps 8"

# What was published: https://github.com/pytorch/torchtitan, llama3_h100_202412_torchtitan.md under
# benchmarks. H100s with 400 Gb/s each, 8 in a node; FSDP, 2 samples per GPU, selective
# recomputation; tokens per second and GPU. The length is that of its configuration, llama3_8b.toml.
THEIRS = ["--gpu-bandwidth-gbs", "2400"]  # their H100s have HBM2e, 96 GB of it
SETTINGS = "-m meta-llama/Llama-3.1-8B --seq-length 8192 --batch-size 2 --recompute selective"
PUBLISHED = [
    {"run": "eager", "devices": 8, "tokens_per_second": 5762, "gib": 82.4},
    {"run": "eager", "devices": 128, "tokens_per_second": 5605, "gib": 67.0},
    {"run": "compiled", "devices": 8, "tokens_per_second": 6667, "gib": 77.0},
    {"run": "compiled", "devices": 128, "tokens_per_second": 6514, "gib": 62.0},
]

AGAIN = 7  # collectives of a split layer's backward that recomputes: 4, and all but one of 4 again

# GB/s of an H100. What nccl's developers say it reaches, of 450 and 50: a ring inside a node,
# https://github.com/NVIDIA/nccl-tests/issues/212, and a 400 Gb/s adapter, issue 290 there.
SPEEDS = {  # flag: default, help
    "--nvlink-gbs": (370.0, "a GPU sends inside its node"),
    "--network-gbs": (47.0, "a GPU's share of the network"),
    "--gpu-bandwidth-gbs": (3350.0, "of a GPU's own memory"),
    "--pcie-gbs": (50.0, "between a GPU and its host"),
    "--pageable-gbs": (6.0, "to host memory that is pageable"),
    "--cpu-adam-gbs": (200.0, "a host's memory, in AdamW"),
}

# How nccl itself reckons, src/graph/tuning.cc at b6475625: share of the ring's bandwidth; then
# microseconds to start, per hop inside a node, per hop between nodes. It takes what is fastest. A
# tree is for all-reduce only, so an all-gather or reduce-scatter takes N − 1 hops. NVLink SHARP and
# PAT, https://arxiv.org/abs/2506.20252, which is to spare large N these hops, are left out.
NCCL = {
    ("ring", "Simple"): (1.0, 8.4, 3.4, 14.0),
    ("ring", "LL128"): (0.92, 14.0, 1.9, 4.0),
    ("tree", "Simple"): (0.92, 0.0, 28.0, 28.0),
    ("tree", "LL128"): (0.92 * 120 / 128, 14.0, 1.25, 8.5),
}

STRATEGIES = {  # chapter, what the planner calls it, a replica in each node; colour, width, dashes
    "DDP": ("02", {}, False, "#9a9a9a", 2, "-"),
    "FSDP, layers kept": ("05", {"reshard_after_forward": False}, False, "#8fd0ca", 7, "-"),
    "FSDP, gathered twice": ("05", {}, False, "#1f3b5c", 2.2, "-"),
    "hybrid": ("05", {}, True, "#e08a3c", 2.2, "-"),
    "FSDP, CPU offload": ("05", {"cpu_offload": True}, False, "#c8553d", 2, (0, (4, 2))),
    "tensor parallel": ("06", {}, False, "#6b4c9a", 2.2, "-"),  # in each node; FSDP across nodes
    "pipeline": (
        "07",
        {},
        False,
        "#4d8b3d",
        2.2,
        "-",
    ),  # across nodes, up to 8 stages; FSDP in each
}
FITTED = "FSDP, gathered twice"  # what was published
WAYS = {  # devices that split a layer, and stages, of which the fastest number is taken
    "FSDP": ([1], [1]),
    "TP": ([8], [1]),
    "PP": ([1], [2, 4, 8, 16, 32]),
    "TP and PP": ([8], [2, 4, 8, 16, 32]),
}
STEP = "--global-batch-size 1024 --seq-length 4096"  # in which these are compared
LAYERS_OF = [f"meta-llama/Llama-3.{size}" for size in ("2-1B", "1-8B", "1-70B", "1-405B")]
ASSUMPTIONS = [
    "weak scaling: each device takes the same number of tokens, whatever their number",
    "no device waits for a slower one or for data; nothing else uses the links",
    "collectives slow no computation down; what recomputing takes is in the fitted share",
    "the fitted share holds for any number of tokens, and backward takes twice as long as forward",
    "gathers run one layer ahead; collectives among the same ranks run one after the other",
    "FSDP2 pads each tensor's first dimension to a multiple of the ranks, and sends the padding",
    "DDP reduces one layer at a time, which are larger buckets than its own",
    "offloaded shards are copied in line with their collective; AdamW then runs on the host",
    "there a rank waits for the gradients of later micro-steps, which are copied and added up",
    "layers are split among the devices of a node, which together take as many samples as alone",
    "nothing hides what they send one another for that",
    "a pipeline gathers once a step, reduces at its end, and is as fast as its slowest stage",
    "what stages send hides behind computing, if it takes less time",
    "memory is the planner's, with its fragmentation and overhead; DDP recomputes as the others do",
]


def parse_args(argv=None):
    """Return the planner's arguments together with those of this script."""
    about = __doc__.partition("\n")[0]
    epilog = f"all flags of will_it_fit.py are understood; given are {SETTINGS}"
    parser = argparse.ArgumentParser(description=about, epilog=epilog, allow_abbrev=False)
    add, number = parser.add_argument, planner().at_least
    add("--devices", type=number(1), nargs="+", default=DEVICES, help="how many there are in all")
    add("--micro-steps", type=number(1), default=1, help="of a step, of --batch-size samples each")
    add("--latency", type=number(0.0), default=1.0, help="of a hop, in multiples of nccl's figure")
    add("--gpu-tflops", type=number(0.001), default=989.0, help="dense bf16 TFLOP/s of a GPU")
    add("--gpu-fp32-tflops", type=number(0.001), default=67.0, help="the same, in float32")
    for name, (speed, what) in SPEEDS.items():
        add(name, type=number(0.001), default=speed, help=f"GB/s, {what}")
    ways = {"nargs": "+", "choices": STRATEGIES, "default": list(STRATEGIES)}
    add("--strategies", **ways, help="ways to split the model")
    add("--output", type=Path, help="a JSON file")
    add("--plot", type=Path, help="a PNG file")
    own, others = parser.parse_known_args(argv)
    args = planner().parse_args([*shlex.split(SETTINGS), *others])
    args.micro_batch_size, args.accumulation = args.batch_size, own.micro_steps
    vars(args).update(vars(own))
    if bad := [n for n in args.devices if n > args.gpus_per_node and n % args.gpus_per_node]:
        parser.error(f"--devices {bad[0]}: no multiple of --gpus-per-node {args.gpus_per_node}")
    return args


@functools.cache
def planner():
    """Return chapter 05's planner as a module."""
    spec = importlib.util.spec_from_file_location("will_it_fit", PLANNER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def model_of(name, *changes):
    """Return the shapes of a model's weights, with changes of its configuration."""
    asked = argparse.Namespace(model_name=name, config=list(changes))
    return planner().model_of(planner().load_config(asked)[0])


# ---- one step, played on streams -------------------------------------------------------------


def head_of(model):
    """Return how many weights the output layer has."""
    return model.config.vocab_size * model.config.hidden_size


def flops_of(model, setting):
    """Return the FLOPs of one micro-step on one rank: of the layers, and of the output layer.

    A token takes 6 per weight and 12 × layers × width × sequence length for attention: PaLM,
    appendix B, https://arxiv.org/abs/2204.02311. Looking up an embedding takes none.
    """
    tokens, config = setting.batch * setting.length, model.config
    heads = config.num_attention_heads
    width = heads * (getattr(config, "head_dim", None) or config.hidden_size // heads)
    inside = sum(map(planner().numbers, model.layers))
    layers = 6 * inside + 12 * len(model.layers) * width * setting.length
    return layers * tokens, 6 * head_of(model) * tokens


def peak_of(args, setting):
    """Return the FLOP/s that a GPU could do at best."""
    return 1e12 * (args.gpu_tflops if setting.bf16 else args.gpu_fp32_tflops)


def links(args, setting):
    """Return the GB/s at which a rank sends inside a copy of the model, and between copies.

    A ring that spans nodes leaves each node once, through the network links of all its GPUs. Rings
    of which each GPU of a node has one of its own share these links.
    """
    here = args.gpus_per_node // setting.size  # ranks of a ring in a node
    across = min(args.nvlink_gbs, here * args.network_gbs)
    inside = across if setting.shards > here else args.nvlink_gbs
    if args.nodes == 1:
        return inside, args.nvlink_gbs
    return inside, across if setting.chapter == "02" else args.network_gbs


def collective(args, kind, size, ranks, nodes, gbs):
    """Return the seconds that a collective takes, and the bytes that each rank sends in a ring.

    `size` bytes are the whole tensor's. The ring spans so many nodes, at `gbs` GB/s.
    """
    if ranks == 1:
        return 0.0, 0.0
    rounds, times = 2 if kind == "all-reduce" else 1, []
    sent = rounds * size * (ranks - 1) / ranks
    for (algorithm, _), (share, start, inside, between) in NCCL.items():
        if algorithm == "ring":
            hops, wire = (rounds * (ranks - nodes), rounds * (nodes - 1)), sent
        elif kind == "all-reduce":
            hops, wire = (2 * (ranks / nodes - 1), 2 * (nodes - 1).bit_length()), 2 * size
        else:
            continue
        latency = start + hops[0] * inside + hops[1] * between
        times.append(wire / (share * gbs * 1e9) + args.latency * latency / 1e6)
    return min(times), sent


class Step:
    """Plays one step of a strategy on one rank; `share` of the GPU's peak is reached."""

    def __init__(self, args, setting, share):
        self.args, self.setting = args, setting
        self.model = model_of(args.model_name, *args.config)
        self.stages = planner().parts_of(self.model, setting.size, setting.pipeline)
        self.part = self.stages[0]  # whose weights are sent
        self.free, self.busy, self.sent = defaultdict(float), Counter(), Counter()
        self.depth = len(self.model.layers)
        self.back = 3 if self.setting.recompute == "full" else 2  # times as long as forward
        rate = peak_of(self.args, self.setting) * share
        layers, head = (flops / self.setting.size for flops in flops_of(self.model, self.setting))
        self.head, self.layer = head / 3 / rate, layers / 3 / rate / self.depth  # forward seconds

    def add(self, stream, seconds, after=0.0, sent=0.0):
        """Put work on a stream, where one waits for the other, to begin when `after` has come.

        Return when it is done. A stream sends so many bytes.
        """
        self.free[stream] = max(self.free[stream], after) + seconds
        self.busy[stream] += seconds
        self.sent[stream] += sent
        return self.free[stream]

    def ring(self, stream):
        """Return the ranks of a stream's ring, the nodes that it spans, and its GB/s."""
        setting = self.setting
        inside, between = links(self.args, setting)
        if stream == "replicas":  # one rank of each node
            return setting.replicas, setting.replicas, between
        if setting.chapter == "02":
            return setting.ranks, self.args.nodes, between
        return setting.shards, -(-setting.shards * setting.size // self.args.gpus_per_node), inside

    def send(self, stream, kind, size, after, copied=0.0):
        """Put a collective on a stream once `after` has come; return when it is done.

        A copy from or to the host in line with it takes so many seconds.
        """
        ranks, nodes, gbs = self.ring(stream)
        seconds, sent = collective(self.args, kind, size, ranks, nodes, gbs)
        if nodes > 1:  # a ring leaves each node once
            self.sent["network"] += sent * nodes / ranks
        return self.add(stream, seconds + copied, after, sent)

    def among(self, times, numbers):
        """Let what is computed next wait for collectives among the ranks that split a layer.

        So many all-gathers or reduce-scatters of so many numbers, in the precision of the forward.
        """
        args, setting = self.args, self.setting
        size = numbers * setting.compute_bytes
        seconds, sent = collective(args, "all-gather", size, setting.size, 1, args.nvlink_gbs)
        after = self.free["compute"]
        self.free["compute"] = self.add("group", times * seconds, after, times * sent)

    def copy(self, numbers, seconds):
        """Return the seconds that a shard of what is offloaded takes, of which 1 GB takes these."""
        size = numbers * self.setting.weight_bytes / self.setting.shards
        return size / 1e9 * seconds if self.setting.offload else 0.0

    def adam(self):
        """Step the optimizer when all is there: 10 numbers of each weight are read or written."""
        args, setting = self.args, self.setting
        numbers = 10 * setting.weight_bytes * self.model.weights / setting.shards / setting.size
        numbers /= len(self.stages)
        ready = max(self.free.values())
        if setting.offload:
            host = args.cpu_adam_gbs / args.gpus_per_node
            return self.add("host", numbers / host / 1e9, ready)
        return self.add("compute", numbers / args.gpu_bandwidth_gbs / 1e9, ready)

    def play(self):
        """Play the step, and return it."""
        play = self.replicated if self.setting.chapter == "02" else self.sharded
        for number in range(self.setting.accumulation if len(self.stages) == 1 else 0):
            play(first=number == 0, last=number == self.setting.accumulation - 1)
        if len(self.stages) > 1:
            self.pipelined()
        self.seconds = self.adam()
        return self

    def replicated(self, first, last):
        """Play a micro-step of DDP: the last one's gradients are reduced while more are made."""
        self.add("compute", self.depth * self.layer + self.head)
        numbers, model = planner().numbers, self.model
        tied = model.config.tie_word_embeddings
        parts = [(2 * self.head, 0 if tied else head_of(model))]
        parts += [(self.back * self.layer, numbers(layer)) for layer in reversed(model.layers)]
        parts += [(0.0, numbers(model.root) - parts[0][1])]
        for seconds, weights in parts:
            done = self.add("compute", seconds)
            if last and weights:
                self.send("copy", "all-reduce", 4 * weights, done)

    def numbers(self, group):
        """Return the numbers of a group's tensors, padded: 0 is the root, then come the layers."""
        shapes = self.part.layers[group - 1] if group else self.part.root
        return planner().shard_numbers(shapes, self.setting.shards) * self.setting.shards

    def gather(self, group, after):
        """Gather a group; return when it is there. What is offloaded comes from the host first."""
        numbers = self.numbers(group)
        copied = self.copy(numbers, 1 / self.args.pcie_gbs)
        return self.send("copy", "all-gather", numbers * self.setting.compute_bytes, after, copied)

    def reduce(self, group, first, last, after):
        """Reduce a group's gradients to shards, and in the last micro-step those of replicas.

        Under offload, those of the first micro-step go to pinned memory. For later ones a
        rank waits until they are copied and added up.
        """
        args, setting, numbers = self.args, self.setting, self.numbers(group)
        later = 1 / args.pageable_gbs + 3 * args.gpus_per_node / args.cpu_adam_gbs
        copied = self.copy(numbers, 1 / args.pcie_gbs if first else later)
        size = numbers * setting.weight_bytes
        done = self.send("copy", "reduce-scatter", size, after, copied)
        if setting.offload and not first:
            self.free["compute"] = max(self.free["compute"], done)
        if last and setting.replicas > 1:
            self.send("replicas", "all-reduce", size / setting.shards, done)

    def sharded(self, first, last):
        """Play a micro-step of FSDP: each group is there when it computes, one comes ahead."""
        setting = self.setting
        hidden = setting.batch * setting.length * self.model.config.hidden_size
        here = {0: self.gather(0, self.free["compute"])}
        here[1] = self.gather(1, 0.0)
        self.among(1, hidden)  # of the embedding
        for number in range(1, self.depth + 1):
            done = self.add("compute", self.layer, here[number])
            self.among(4, hidden)
            if number < self.depth:
                here[number + 1] = self.gather(number + 1, done - self.layer)
        self.among(2, head_of(self.model))  # its weights, and their gradient
        self.add("compute", 3 * self.head)  # forward and backward
        for number in range(self.depth, 0, -1):
            done = self.add("compute", self.back * self.layer, here[number])
            self.among(4 if setting.recompute == "none" else AGAIN, hidden)
            if number > 1 and setting.reshard:
                here[number - 1] = self.gather(number - 1, done - self.back * self.layer)
            self.reduce(number, first, last, self.free["compute"])
        self.among(1, hidden)
        self.reduce(0, first, last, self.free["compute"])

    def pipelined(self):
        """Play a step of the stages that compute longest; when the last ends, all reduce."""
        setting, ranks, count = self.setting, len(self.stages), self.setting.accumulation
        layers = [len(part.layers) * (1 + self.back) * self.layer for part in self.stages]
        layers[-1] += 3 * self.head
        rank = max(range(ranks), key=layers.__getitem__)
        self.part, hidden = self.stages[rank], setting.batch * setting.length
        hidden *= self.model.config.hidden_size
        depth, passes = len(self.part.layers), setting.pipeline.num_stages // ranks
        size = 2 * passes * count * hidden * setting.compute_bytes / setting.size
        sent = self.add("stages", size / self.args.network_gbs / 1e9, sent=size)
        self.sent["network"] += size
        here = [self.gather(group, 0.0) for group in range(depth + 1)]
        for number in range(1, depth + 1):  # the first forward
            self.add("compute", self.layer, here[number])
        start = self.free["compute"] - depth * self.layer
        self.add("compute", count * layers[rank] - depth * self.layer)
        again = 4 if setting.recompute == "none" else AGAIN
        self.among(count * depth * (4 + again), hidden)
        self.among(count * 2 if rank == ranks - 1 else 0, head_of(self.model))
        share = planner().bubble(setting.pipeline.pipeline_schedule, ranks, count)
        self.free["compute"] += (self.free["compute"] - start) * share / (1 - share)
        self.free["compute"] = max(self.free["compute"], sent)
        for group in range(depth, -1, -1):
            self.reduce(group, True, True, self.free["compute"])


def at_scale(args, strategy, devices):
    """Return the arguments for so many devices, and the planner's setting; all recompute alike."""
    args, (chapter, changes, hybrid, *_) = copy.copy(args), STRATEGIES[strategy]
    args.ranks, args.nodes = devices, max(1, devices // args.gpus_per_node)
    args.replicas = args.nodes if hybrid else 1
    args.tensor_parallel_size = min(devices, args.gpus_per_node) if chapter == "06" else 1
    args.micro_batch_size *= args.tensor_parallel_size
    if chapter == "07":  # the stages' samples are as many micro-batches as they would take alone
        depth = len(model_of(args.model_name, *args.config).layers)
        args.pipeline_parallel_size = min(args.nodes, 8, 1 << (depth.bit_length() - 1))
        args.accumulation *= args.pipeline_parallel_size
    setting = planner().setting_of(args, chapter, changes)
    return args, dataclasses.replace(setting, recompute=args.recompute)


# ---- many steps ------------------------------------------------------------------------------


def row_of(args, strategy, devices, share):
    """Return what a step takes, in seconds, and what of it waits for what is sent."""
    step = Step(*at_scale(args, strategy, devices), share).play()
    busy, setting, seconds = step.busy, step.setting, step.seconds
    exposed = max(0.0, seconds - busy["compute"] - busy["host"])
    sends = sum(busy[stream] for stream in ("copy", "replicas", "group", "stages"))
    hidden = max(0.0, sends - exposed)
    tokens = setting.batch * setting.length * setting.accumulation // setting.size
    tokens //= len(step.stages)
    row = {"strategy": strategy, "devices": devices, "tokens": tokens, "step": seconds}
    row |= {"compute": busy["compute"], "host": busy["host"], "exposed": exposed, "hidden": hidden}
    row |= {"share": exposed / seconds, "network_gb": step.sent["network"] / 1e9}
    return row | {"tokens_per_second": tokens / seconds}


def gib_of(args, strategy, devices):
    """Return what the planner says a GPU must have, in GiB."""
    model = model_of(args.model_name, *args.config)
    return gib(args, planner().play(model, at_scale(args, strategy, devices)[1]))


def gib(args, step):
    """Return what a GPU must have for a step of the planner's, in GiB."""
    tensors = sum(step.most.values()) / planner().GIB
    return tensors * (1 + args.fragmentation) + args.gpu_overhead_gib


def fit(run):
    """Return the share of the peak with which 8 devices are as fast as published."""
    args = parse_args(THEIRS)
    published = {(row["run"], row["devices"]): row["tokens_per_second"] for row in PUBLISHED}
    low, high = 0.01, 1.0
    for _ in range(40):
        share = (low + high) / 2
        speed = row_of(args, FITTED, 8, share)["tokens_per_second"]
        low, high = (share, high) if speed < published[run, 8] else (low, share)
    return share


def compare(shares):
    """Return the published figures beside the predicted ones, from the shares fitted on 8."""
    rows, args = [], parse_args(THEIRS)
    for point in PUBLISHED:
        speed = row_of(args, FITTED, point["devices"], shares[point["run"]])["tokens_per_second"]
        error = speed / point["tokens_per_second"] - 1
        row = point | {"fitted": point["devices"] == 8, "predicted": speed, "error": error}
        rows.append(row | {"predicted_gib": gib_of(args, FITTED, point["devices"])})
    return rows


def all_rows(argv, share):
    """Return the rows of all scenes; those of the first have the memory, too."""
    rows = []
    for scene, flags in SCENES.items():
        args = parse_args([*argv, *shlex.split(flags)])
        for strategy, devices in itertools.product(args.strategies, args.devices):
            row = {"scene": scene} | row_of(args, strategy, devices, share)
            rows.append(row | ({} if flags else {"gib": gib_of(args, strategy, devices)}))
    return rows


def layer_rows(share):
    """Return of a layer of several models how long a device computes and sends, and what, in GB.

    What FSDP sends does not depend on the tokens. With fewer than `pays below` it takes longer for
    that than tensor parallelism takes to compute and to send; FSDP across its groups comes to more
    than that with even fewer.
    """
    rows = []
    for name, devices in itertools.product(LAYERS_OF, (8, SWEPT)):
        args = parse_args(["-m", name, "--recompute", "none", *SCENES["1024 tokens"].split()])
        ways = (at_scale(args, way, devices) for way in (FITTED, "tensor parallel"))
        alone, split = (Step(*way, share) for way in ways)
        for step in (alone, split):
            step.gather(1, 0.0)
            step.gather(1, 0.0)
            step.reduce(1, True, True, 0.0)
        width, tokens = split.model.config.hidden_size, args.seq_length
        split.among(8, split.setting.batch * tokens * width)
        row = {"model": name, "devices": devices, "width": width, "tokens": tokens}
        row |= {"compute": 3 * split.layer}
        row |= {"group": split.busy["group"], "group_gb": split.sent["group"] / 1e9}
        row |= {"FSDP": alone.busy["copy"], "FSDP_gb": alone.sent["copy"] / 1e9}
        row |= {"across": split.busy["copy"], "across_gb": split.sent["copy"] / 1e9}
        row["pays below"] = row["FSDP"] / (row["compute"] + row["group"]) * tokens
        rows.append(row)
    return rows


def layouts(args, devices, size, ranks):
    """Return settings of so many devices, for a step of the global batch, that need not fit."""
    groups = devices // size // ranks
    if not groups or args.global_batch_size % groups:
        return
    samples = args.global_batch_size // groups  # of a step, for each group
    ways = itertools.product({1, size}, {groups, max(1, 8 // size)}, ("selective", "full"))
    for batch, shards, recompute in ways:
        if samples < batch * ranks or groups % shards:
            continue
        args = copy.copy(args)
        args.ranks, args.nodes = devices, max(1, devices // args.gpus_per_node)
        args.replicas, args.tensor_parallel_size = groups // shards, size
        args.pipeline_parallel_size = ranks
        args.micro_batch_size, args.accumulation = batch, samples // batch
        yield args, planner().setting_of(args, "07", {"recompute": recompute})


def seconds_of(args, setting, share):
    """Return what a step takes; of many micro-steps, all but the first and last take as long."""
    count = setting.accumulation
    if setting.pipeline.num_stages > 1 or count < 4:
        return Step(args, setting, share).play().seconds
    few = (dataclasses.replace(setting, accumulation=number) for number in (2, 3))
    two, three = (Step(args, some, share).play().seconds for some in few)
    return three + (count - 3) * (three - two)


def first_rows(share):
    """Return the fastest layout that fits of each way to split, from 8 to 4,096 devices."""
    rows = []
    for name, devices in itertools.product(LAYERS_OF[1:], SHOWN):
        args, model = parse_args(["-m", name, *shlex.split(STEP)]), model_of(name)
        row = {"model": name, "devices": devices}
        for way, (sizes, pipelines) in WAYS.items():
            found = []
            for size, ranks in itertools.product(sizes, pipelines):
                found += [
                    (seconds_of(*each, share), len(found) + number, each)
                    for number, each in enumerate(layouts(args, devices, size, ranks))
                ]
            for seconds, _, (_, setting) in sorted(found, key=lambda each: each[:2]):
                if gib(args, planner().play(model, setting)) <= args.gpu_memory_gib:
                    tokens = args.global_batch_size * args.seq_length / seconds / devices
                    ranks = setting.pipeline.pipeline_parallel_size
                    row[way] = {"tokens_per_second": tokens, "stages": ranks}
                    break
        rows.append(row)
    return rows


# ---- report ----------------------------------------------------------------------------------


def show(results):
    """Print what is predicted."""
    for row in results["published"]:
        how = "fitted" if row["fitted"] else f"error {row['error']:+.1%}"
        print(
            f"{row['run']:9}{row['devices']:4} GPUs: published {row['tokens_per_second']:,} "
            f"tokens/s per GPU, {row['gib']:.1f} GiB; predicted {row['predicted']:,.0f} ({how}), "
            f"{row['predicted_gib']:.1f} GiB"
        )
    names, tokens = "compute group FSDP across".split(), results["layers"][0]["tokens"]
    print(f"\na layer, {tokens:,} tokens: ms to compute, in a group, of FSDP, of it across groups")
    for row in results["layers"]:
        times = "".join(f"{1e3 * row[name]:9.2f}" for name in names)
        pays = f"splitting it pays below {row['pays below']:,.0f} tokens"
        print(f"{row['model']:26}{row['devices']:5}{times}  {pays}")
    print("\nof each device: tokens/s, share of a step that waits, GB that it sends between nodes")
    shown = sorted({row["devices"] for row in results["rows"]} & set(SHOWN))
    for scene, rows in itertools.groupby(results["rows"], lambda row: row["scene"]):
        print(f"{scene:28}{''.join(f'{number:<24,}' for number in shown)}".rstrip())
        for strategy, some in itertools.groupby(rows, lambda row: row["strategy"]):
            cells = (text_of(row) for row in some if row["devices"] in SHOWN)
            print(f"  {strategy:26}{''.join(cells)}".rstrip())


def text_of(row):
    """Return a row in 24 letters."""
    return f"{row['tokens_per_second']:5,.0f}{row['share']:7.1%}{row['network_gb']:6.1f}      "


def curves(axes, rows, x, y, title, label):
    """Draw a curve of each strategy into a panel; what coincides is seen around the other."""
    for strategy, (*_, color, width, dashes) in STRATEGIES.items():
        points = [(row[x], row[y]) for row in rows if row["strategy"] == strategy]
        axes.plot(*zip(*points, strict=True), color=color, lw=width, ls=dashes, label=strategy)
    ticks, top = sorted({row[x] for row in rows}), 1.08 * max(row[y] for row in rows)
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], rotation=45, fontsize=8)
    axes.set(title=title, ylabel=label, xlabel=f"{x} of each device" if x == "tokens" else x)
    axes.set_ylim(0, top)
    axes.yaxis.set_major_formatter("{x:,.0f}" if top > 1 else "{x:.0%}" if top > 0.1 else "{x:.1%}")
    axes.grid(color="#e6e6e6")
    axes.spines[["top", "right"]].set_visible(False)


def draw(results, path):
    """Write a PNG: speed against the number of devices, with many tokens each and with few."""
    figure = Figure(figsize=(8.3, 4.4), dpi=100, layout="constrained")
    speed, fast = figure.subplots(1, 2)
    large, small = ([row for row in results["rows"] if row["scene"] == scene]
                    for scene in ("as published", "2048 tokens"))  # fmt: skip
    each, per_second = f"{large[0]['tokens']:,} tokens each", "tokens per second and device"
    curves(speed, large, "devices", "tokens_per_second", each, per_second)
    curves(fast, small, "devices", "tokens_per_second", "2,048 tokens each", "")
    speed.set_ylim(0.9 * min(row["tokens_per_second"] for row in large))
    if results["machine"]["model_name"] in SETTINGS:
        mark(speed, results["published"])
    handles, labels = speed.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False, fontsize=8)
    figure.savefig(path)


def mark(axes, published):
    """Draw what was published, and what is predicted for it."""
    for run, marker in (("compiled", "o"), ("eager", "s")):
        rows = [row for row in published if row["run"] == run]
        devices, style = [row["devices"] for row in rows], {"color": "black", "zorder": 9}
        speeds, predicted = ([row[y] for row in rows] for y in ("tokens_per_second", "predicted"))
        axes.plot(devices, speeds, marker, mfc="white", label=f"published, {run}", **style)
        label = {"label": "predicted from 8 for 128"} if run == "eager" else {}
        axes.plot(devices, predicted, ls=":", marker="x", ms=5, **style, **label)


def machine_of(args, shares):
    """Return the model of the machine, and all else that is assumed."""
    names = "model_name gpus_per_node gpu_tflops gpu_bandwidth_gbs nvlink_gbs network_gbs pcie_gbs"
    machine = {name: getattr(args, name) for name in [*names.split(), "cpu_adam_gbs", "latency"]}
    nccl = {", ".join(name): list(numbers) for name, numbers in NCCL.items()}
    return machine | {"fitted shares of gpu_tflops": shares, "nccl": nccl, "assumed": ASSUMPTIONS}


def predict(argv):
    """Return all that is predicted with these arguments, and what is assumed."""
    args, shares = parse_args(argv), {run: fit(run) for run in ("eager", "compiled")}
    share = shares["compiled"]
    results = {"machine": machine_of(args, shares), "published": compare(shares)}
    results |= {"layers": layer_rows(share), "first": first_rows(share)}
    return results | {"rows": all_rows(argv, share)}


def main():
    """Predict, print, and write down what was asked for."""
    args, results = parse_args(), predict(sys.argv[1:])
    show(results)
    if args.output:
        args.output.write_text(in_rows(results) + "\n")
    if args.plot:
        draw(results, args.plot)


if __name__ == "__main__":
    main()
