"""Predict on paper how fast each chapter's way to split trains on 8 to 4,096 GPUs.

Here:  python tools/planner/scale.py
Else:  python tools/planner/scale.py -m meta-llama/Llama-3.1-70B --recompute full --network-gbs 25

Nothing is measured. A step is simulated event by event, as for the planner's memory, but the events
take time on streams: one stream computes, one sends among the ranks that share a copy of the model,
one among copies, and one among the ranks that split a layer. A pipeline is idle as the formula of
chapter 07 says. Shapes and bytes are the planner's, and the time of a collective follows NCCL's own
model. One number is fitted: the share of its peak that a GPU reaches, to a published run on 8 GPUs.
The same run on 128 GPUs is then predicted. The flags of training and of machines are accepted.

What is assumed besides:

- Each device processes the same number of tokens, whatever the number of devices.
- No device waits for a slower one or for data, and nothing else uses the links.
- Collectives do not slow down computation. The fitted share includes selective recomputation.
- The fitted share is the same for any number of tokens. A backward pass takes twice as long as the
  forward pass, and three times as long with full recomputation.
- Gathers run one layer ahead. Collectives among the same ranks run one after the other.
- FSDP pads the first dimension of each tensor to a multiple of the ranks, and sends the padding.
- DDP reduces one layer at a time, so its buckets are larger than the real ones.
- Copies of offloaded shards run in line with their collectives, and AdamW then runs on the host.
  From the second micro-batch on, a rank waits until gradients have been copied and added up.
- The devices of a node split layers. Together they process the same number of samples as alone,
  and nothing hides the traffic between them.
- A pipeline gathers once per step, reduces at its end, and is as fast as its slowest stage. The
  traffic between stages is hidden if it takes less time than computation.
"""

import functools
import itertools
import json
import shlex
import sys
from collections import Counter, defaultdict
from pathlib import Path

import will_it_fit as planner
from memory import fullest_step
from training_step import Step, bubble, fail, load_config, model_of, numbers, setting_of

DEVICES = [2**power for power in range(3, 13)]
# The numbers of devices that tables show.
SHOWN = [8, 64, 512, 4096]
# The flags of each scene, on top of the given flags.
SCENES = {"as published": ""}
SCENES |= {
    f"{tokens} tokens": f"--batch-size 1 --seq-length {tokens}"
    for tokens in (512, 1024, 2048, 4096)
}
SCENES["4096 tokens, 100 Gb/s"] = f"{SCENES['4096 tokens']} --network-gbs 12"
SCENES["8 × 4096 tokens, 100 Gb/s"] = f"{SCENES['4096 tokens, 100 Gb/s']} --micro-steps 8"

# The published run: https://github.com/pytorch/torchtitan, llama3_h100_202412_torchtitan.md under
# benchmarks. It used nodes of 8 H100s with 400 Gb/s each, FSDP, 2 samples per GPU and selective
# recomputation. The speed is in tokens per second and GPU. The length is that of its configuration,
# llama3_8b.toml. Its H100s have 96 GB of HBM2e.
PUBLISHED_FLAGS = ["--gpu-bandwidth-gbs", "2400"]
DEFAULTS = "-m meta-llama/Llama-3.1-8B --seq-length 8192 --batch-size 2 --recompute selective"
PUBLISHED = [
    {"run": "eager", "devices": 8, "tokens_per_second": 5762, "gib": 82.4},
    {"run": "eager", "devices": 128, "tokens_per_second": 5605, "gib": 67.0},
    {"run": "compiled", "devices": 8, "tokens_per_second": 6667, "gib": 77.0},
    {"run": "compiled", "devices": 128, "tokens_per_second": 6514, "gib": 62.0},
]

# The speeds of an H100 and its links: flag, default and help. NCCL's developers report 370 of 450
# GB/s for a ring inside a node (https://github.com/NVIDIA/nccl-tests/issues/212), and 47 of 50 for
# a 400 Gb/s adapter (issue 290).
SPEEDS = {
    "--gpu-tflops": (989.0, "dense TFLOP/s of a GPU in --precision"),
    "--latency": (1.0, "multiple of NCCL's estimates per hop"),
    "--nvlink-gbs": (370.0, "GB/s that a GPU sends inside its node"),
    "--network-gbs": (47.0, "GB/s, a GPU's share of the network"),
    "--gpu-bandwidth-gbs": (3350.0, "GB/s of a GPU's own memory"),
    "--pcie-gbs": (50.0, "GB/s between a GPU and its host"),
    "--pageable-gbs": (6.0, "GB/s to host memory that is pageable"),
    "--cpu-adam-gbs": (200.0, "GB/s of a host's memory, in AdamW"),
}

# NCCL's own estimates, src/graph/tuning.cc at b6475625: the share of the ring's bandwidth; then the
# microseconds to start, per hop inside a node, and per hop between nodes. NCCL chooses the fastest.
# Only an all-reduce can use a tree, so an all-gather or reduce-scatter needs N − 1 hops. NVLink
# SHARP and PAT (https://arxiv.org/abs/2506.20252), which saves hops, are left out.
NCCL = {
    ("ring", "Simple"): (1.0, 8.4, 3.4, 14.0),
    ("ring", "LL128"): (0.92, 14.0, 1.9, 4.0),
    ("tree", "Simple"): (0.92, 0.0, 28.0, 28.0),
    ("tree", "LL128"): (0.92 * 120 / 128, 14.0, 1.25, 8.5),
}

# The chapter of each strategy, and its changes of the flags.
STRATEGIES = {
    "DDP": ("02", {}),
    "FSDP, layers kept": ("05", {"reshard_after_forward": False}),
    "FSDP, gathered twice": ("05", {}),
    "hybrid": ("05", {}),
    "FSDP, CPU offload": ("05", {"cpu_offload": True}),
    "tensor parallel": ("06", {}),
    "pipeline": ("07", {}),
}
# The strategy of the published run.
FITTED = "FSDP, gathered twice"
# The tensor-parallel sizes and the pipeline sizes to try for each combination.
WAYS = {
    "FSDP": ([1], [1]),
    "TP": ([8], [1]),
    "PP": ([1], [2, 4, 8, 16, 32]),
    "TP and PP": ([8], [2, 4, 8, 16, 32]),
}
MODELS = [f"meta-llama/Llama-3.{size}" for size in ("2-1B", "1-8B", "1-70B", "1-405B")]


def parse_args(argv=None):
    """Return the arguments, among them the shapes of the model."""
    parser = planner.parser_of(__doc__, f"The defaults are {DEFAULTS}")
    add, number = parser.add_argument, planner.at_least
    add("--output", type=Path, help="instead, write the rows of the READMEs to this file")
    add("--micro-steps", type=number(1), default=1, help="micro-batches of a step")
    for name, (speed, description) in SPEEDS.items():
        minimum = 0.0 if name == "--latency" else 0.001
        add(name, type=number(minimum), default=speed, help=description)
    words = sys.argv[1:] if argv is None else argv
    args = planner.parse(parser, [*shlex.split(DEFAULTS), *words])
    args.micro_batch_size, args.accumulation = args.batch_size, args.micro_steps
    if DEVICES[-1] % args.gpus_per_node:
        fail(f"--gpus-per-node {args.gpus_per_node}: nodes are not full; choose a power of 2")
    args.model = model_of(load_config(args)[0])
    return args


# ---- one step --------------------------------------------------------------------------------


def forward_flops(setting):
    """Return the FLOPs of the forward pass of a micro-batch: of a layer, and of the output layer.

    A token needs 2 per weight and 4 × width × sequence length for attention in each layer: PaLM,
    appendix B, https://arxiv.org/abs/2204.02311. Looking up an embedding needs none.
    """
    tokens, model = setting.micro_batch_size * setting.seq_length, setting.model
    heads = model.config.num_attention_heads
    width = heads * (getattr(model.config, "head_dim", None) or model.config.hidden_size // heads)
    layer_weights = sum(map(numbers, model.layers)) / len(model.layers)
    layer = 2 * layer_weights + 4 * width * setting.seq_length
    return layer * tokens, 2 * model.config.vocab_size * model.config.hidden_size * tokens


def collective(setting, kind, size, ranks, nodes, gbs):
    """Return the seconds that a collective takes, and the bytes that each rank sends in a ring.

    The full tensor has `size` bytes. The ring spans this number of nodes, at `gbs` GB/s.
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
        times.append(wire / (share * gbs * 1e9) + setting.latency * latency / 1e6)
    return min(times), sent


class StepSeconds(Step):
    """Add up the seconds of a step on streams, if a GPU reaches `share` of its peak.

    The streams are "compute", "host" (AdamW under offload), "copy" (ranks that share a copy of the
    model), "replicas" (copies), "group" (ranks that split a layer) and "stages".
    """

    def __init__(self, setting, share):
        super().__init__(setting.model, setting)
        config = setting.model.config
        self.head_numbers = config.vocab_size * config.hidden_size
        # Under DDP, the gradient of an output layer that is not tied is ready first.
        self.reduced_first = 0 if config.tie_word_embeddings else self.head_numbers
        # For each stream: the time when it ends, the seconds that it works, and the bytes it sends.
        self.end, self.busy, self.sent = defaultdict(float), Counter(), Counter()
        rate = 1e12 * setting.gpu_tflops * share * setting.tensor_parallel_size
        self.layer, self.head = (flops / rate for flops in forward_flops(setting))
        self.layer_backward = self.layer * (3 if setting.recompute == "full" else 2)
        # The collectives of a split layer's backward pass; recomputation repeats 3 of 4.
        self.backward_exchanges = 4 if setting.recompute == "none" else 7
        # For each gathered group: the time when it arrives. A gather begins at `start`, together
        # with the computation of the previous layer.
        self.ready, self.start = {}, 0.0
        self.is_first = self.is_last = True

    def simulate(self):
        """Simulate the step, and return it."""
        setting = self.setting
        if len(self.stages) > 1:
            self.simulate_pipeline()
        else:
            for number in range(setting.accumulation):
                self.is_first, self.is_last = number == 0, number == setting.accumulation - 1
                self.ready, self.start = {}, self.end["compute"]
                self.micro_step()
        self.seconds = self.optimizer_step()
        return self

    def add(self, stream, seconds, after=0.0, sent=0.0):
        """Put work that sends bytes on a stream; it begins at `after` or later. Return its end."""
        self.end[stream] = max(self.end[stream], after) + seconds
        self.busy[stream] += seconds
        self.sent[stream] += sent
        return self.end[stream]

    def ring(self, stream):
        """Return the ranks of a stream's ring, the number of nodes that it spans, and its GB/s.

        A ring that spans nodes leaves each node once, through the network links of all its GPUs. If
        each GPU of a node has a ring of its own, the rings share these links.
        """
        setting = self.setting
        if stream == "group":
            return setting.tensor_parallel_size, 1, setting.nvlink_gbs
        # The ring of replicas has one rank of each node.
        if stream == "replicas":
            return setting.replicas, setting.replicas, setting.network_gbs
        local_ranks = setting.gpus_per_node // setting.tensor_parallel_size
        ranks = setting.ranks if setting.chapter == "02" else setting.shards
        nodes = -(-ranks // local_ranks)
        across = min(setting.nvlink_gbs, local_ranks * setting.network_gbs)
        return ranks, nodes, across if nodes > 1 else setting.nvlink_gbs

    def send(self, stream, kind, size, after, copied=0.0):
        """Put a collective on a stream, in line with a copy from or to the host; return its end."""
        ranks, nodes, gbs = self.ring(stream)
        seconds, sent = collective(self.setting, kind, size, ranks, nodes, gbs)
        # A ring leaves each node once.
        if nodes > 1:
            self.sent["network"] += sent * nodes / ranks
        return self.add(stream, seconds + copied, after, sent)

    def exchange(self, times, count):
        """Let computation wait for all-gathers or reduce-scatters of `count` numbers in a group."""
        size, after = count * self.setting.compute_bytes, self.end["compute"]
        seconds, sent = collective(self.setting, "all-gather", size, *self.ring("group"))
        self.end["compute"] = self.add("group", times * seconds, after, times * sent)

    def exchange_hidden(self, times):
        """Let computation wait for collectives of the hidden states of a micro-batch."""
        tokens = self.setting.micro_batch_size * self.setting.seq_length
        self.exchange(times, tokens * self.model.config.hidden_size)

    def offload_seconds(self, group, seconds_per_gb):
        """Return the seconds to copy a group's shard from or to the host, if it is offloaded."""
        size = self.padded_numbers(group) * self.setting.weight_bytes / self.setting.shards
        return size / 1e9 * seconds_per_gb if self.setting.cpu_offload else 0.0

    def gather(self, group):
        if group not in self.ready and self.setting.chapter != "02":
            size = self.padded_numbers(group) * self.setting.compute_bytes
            copied = self.offload_seconds(group, 1 / self.setting.pcie_gbs)
            self.ready[group] = self.send("copy", "all-gather", size, self.start, copied)

    def use(self, group):
        self.gather(group)
        if group:
            self.start = max(self.end["compute"], self.ready.get(group, 0.0))

    def free(self, group):
        self.ready.pop(group, None)

    def forward(self, group):
        if group:
            self.add("compute", self.layer, self.start)
        self.exchange_hidden(4 if group else 1)

    def head_backward(self):
        """Compute the loss and its backward pass; a group gathers the head and its gradient."""
        self.exchange(2, self.head_numbers)
        done = self.add("compute", 3 * self.head)
        if self.setting.chapter == "02" and self.is_last and self.reduced_first:
            self.send("copy", "all-reduce", 4 * self.reduced_first, done)

    def backward(self, group):
        if group:
            self.add("compute", self.layer_backward, self.start)
        self.exchange_hidden(self.backward_exchanges if group else 1)

    def reduce(self, group):
        """Reduce a group's gradients to shards, and in the last micro-step those of replicas.

        Under offload, gradients of the first micro-step go to pinned memory. A rank waits until
        later ones have been copied and added up.
        """
        setting = self.setting
        self.free(group)
        if setting.chapter == "02":
            if self.is_last:
                size = 4 * (numbers(self.shapes(group)) - (0 if group else self.reduced_first))
                self.send("copy", "all-reduce", size, self.end["compute"])
            return
        later = 1 / setting.pageable_gbs + 3 * setting.gpus_per_node / setting.cpu_adam_gbs
        copied = self.offload_seconds(group, 1 / setting.pcie_gbs if self.is_first else later)
        size = self.padded_numbers(group) * setting.weight_bytes
        done = self.send("copy", "reduce-scatter", size, self.end["compute"], copied)
        if setting.cpu_offload and not self.is_first:
            self.end["compute"] = max(self.end["compute"], done)
        if self.is_last and setting.replicas > 1:
            self.send("replicas", "all-reduce", size / setting.shards, done)

    def simulate_pipeline(self):
        """Simulate a step of the slowest stages; when the last ends, all stages reduce."""
        setting, ranks, count = self.setting, len(self.stages), self.setting.accumulation
        layer = self.layer + self.layer_backward
        seconds = [len(stage.layers) * layer for stage in self.stages]
        seconds[-1] += 3 * self.head
        rank = max(range(ranks), key=seconds.__getitem__)
        self.use_stage(rank)
        # Each micro-batch sends hidden states and their gradients through each stage of the rank.
        size = 2 * setting.num_stages // ranks * count * setting.compute_bytes
        size *= setting.micro_batch_size * setting.seq_length * self.model.config.hidden_size
        size /= setting.tensor_parallel_size
        sent = self.add("stages", size / setting.network_gbs / 1e9, sent=size)
        self.sent["network"] += size
        for group in range(self.depth + 1):
            self.gather(group)
        # The first forward pass waits for the gathers.
        for group in range(1, self.depth + 1):
            self.add("compute", self.layer, self.ready[group])
        start = self.end["compute"] - self.depth * self.layer
        self.add("compute", count * seconds[rank] - self.depth * self.layer)
        self.exchange_hidden(count * self.depth * (4 + self.backward_exchanges))
        self.exchange(2 * count if rank == ranks - 1 else 0, self.head_numbers)
        share = bubble(setting.pipeline_schedule, ranks, count)
        self.end["compute"] += (self.end["compute"] - start) * share / (1 - share)
        self.end["compute"] = max(self.end["compute"], sent)
        for group in range(self.depth, -1, -1):
            self.reduce(group)

    def optimizer_step(self):
        """Run AdamW after all other work; it reads or writes 10 numbers for each weight."""
        setting = self.setting
        ranks = setting.shards * setting.tensor_parallel_size * len(self.stages)
        size = 10 * setting.weight_bytes * setting.model.weights / ranks
        ready = max(self.end.values())
        if setting.cpu_offload:
            return self.add(
                "host", size * setting.gpus_per_node / setting.cpu_adam_gbs / 1e9, ready
            )
        return self.add("compute", size / setting.gpu_bandwidth_gbs / 1e9, ready)


# ---- many steps ------------------------------------------------------------------------------


def at_scale(args, strategy, devices):
    """Return the Setting of a strategy on this number of devices."""
    chapter, changes = STRATEGIES[strategy]
    setting = setting_of(args, chapter, {"recompute": args.recompute} | changes)
    setting.ranks, setting.nodes = devices, max(1, devices // args.gpus_per_node)
    # A replica in each node.
    setting.replicas = setting.nodes if strategy == "hybrid" else 1
    # Split layers inside a node, and use FSDP across nodes.
    if chapter == "06":
        setting.tensor_parallel_size = min(devices, args.gpus_per_node)
        setting.micro_batch_size *= setting.tensor_parallel_size
    # Up to 8 stages across nodes, and FSDP inside a node. The stages share the samples that they
    # would process alone, as micro-batches.
    if chapter == "07":
        depth = len(args.model.layers)
        ranks = min(setting.nodes, 8, 1 << (depth.bit_length() - 1))
        setting.pipeline_parallel_size = ranks
        setting.reshard_after_forward = ranks == 1
        setting.accumulation *= ranks
    return setting


def row_of(setting, strategy, share):
    """Return the seconds of a step, and how many of them wait for communication."""
    step = StepSeconds(setting, share).simulate()
    busy, seconds = step.busy, step.seconds
    exposed = max(0.0, seconds - busy["compute"] - busy["host"])
    tokens = setting.micro_batch_size * setting.seq_length * setting.accumulation
    tokens //= setting.tensor_parallel_size * setting.pipeline_parallel_size
    row = {"strategy": strategy, "devices": setting.ranks, "tokens": tokens, "step": seconds}
    row |= {"compute": busy["compute"], "host": busy["host"], "exposed": exposed}
    row |= {"share": exposed / seconds, "network_gb": step.sent["network"] / 1e9}
    return row | {"tokens_per_second": tokens / seconds}


def gib_of(setting):
    """Return the GiB that a GPU needs for a setting."""
    tensors = fullest_step(setting.model, setting).most.total()
    return tensors / planner.GIB * (1 + setting.fragmentation) + setting.gpu_overhead_gib


@functools.cache
def fitted_share(run):
    """Return the share of the peak that makes 8 devices as fast as published."""
    setting, low, high = at_scale(parse_args(PUBLISHED_FLAGS), FITTED, 8), 0.01, 1.0
    published = {(row["run"], row["devices"]): row["tokens_per_second"] for row in PUBLISHED}
    for _ in range(40):
        share = (low + high) / 2
        speed = row_of(setting, FITTED, share)["tokens_per_second"]
        low, high = (share, high) if speed < published[run, 8] else (low, share)
    return share


def published_rows():
    """Return the published figures next to the predicted ones."""
    rows, args = [], parse_args(PUBLISHED_FLAGS)
    for point in PUBLISHED:
        setting = at_scale(args, FITTED, point["devices"])
        speed = row_of(setting, FITTED, fitted_share(point["run"]))["tokens_per_second"]
        error = speed / point["tokens_per_second"] - 1
        row = point | {"fitted": setting.ranks == 8, "predicted": speed, "error": error}
        rows.append(row | {"predicted_gib": gib_of(setting)})
    return rows


def scene_rows(scene, share):
    """Return the rows of a scene; only the rows of the first scene have the memory."""
    args, rows = parse_args(shlex.split(SCENES[scene])), []
    for strategy, devices in itertools.product(STRATEGIES, DEVICES):
        setting = at_scale(args, strategy, devices)
        rows.append({"scene": scene} | row_of(setting, strategy, share))
        if not SCENES[scene]:
            rows[-1]["gib"] = gib_of(setting)
    return rows


def layer_rows(share):
    """Return the seconds and the GB of one layer of several models, gathered or split.

    FSDP's traffic does not depend on the tokens. With fewer tokens than "pays below", it takes
    longer than tensor parallelism takes to compute and to send.
    """
    rows = []
    for name, devices in itertools.product(MODELS, (8, 512)):
        args = parse_args(["-m", name, "--recompute", "none", *SCENES["1024 tokens"].split()])
        ways = (at_scale(args, way, devices) for way in (FITTED, "tensor parallel"))
        alone, split = (StepSeconds(way, share) for way in ways)
        for step in (alone, split):
            step.gather(1)
            step.free(1)
            step.gather(1)
            step.reduce(1)
        split.exchange_hidden(4 + split.backward_exchanges)
        row = {"model": name, "devices": devices, "compute": 3 * split.layer}
        row |= {"group": split.busy["group"], "group_gb": split.sent["group"] / 1e9}
        row |= {"FSDP": alone.busy["copy"], "FSDP_gb": alone.sent["copy"] / 1e9}
        row |= {"across": split.busy["copy"], "across_gb": split.sent["copy"] / 1e9}
        row["pays below"] = row["FSDP"] / (row["compute"] + row["group"]) * args.seq_length
        rows.append(row)
    return rows


def layouts(args, devices, tp_size, stages):
    """Yield the settings of this number of devices for a step of the global batch."""
    groups = devices // tp_size // stages
    if not groups or args.global_batch_size % groups:
        return
    samples = args.global_batch_size // groups
    ways = itertools.product({1, tp_size}, {groups, max(1, 8 // tp_size)}, ("selective", "full"))
    for batch, shards, recompute in ways:
        if samples < batch * stages or groups % shards:
            continue
        sizes = {"ranks": devices, "nodes": max(1, devices // args.gpus_per_node)}
        sizes |= {"replicas": groups // shards, "tensor_parallel_size": tp_size}
        sizes |= {"micro_batch_size": batch, "accumulation": samples // batch}
        sizes |= {"pipeline_parallel_size": stages, "recompute": recompute}
        yield setting_of(args, "07", sizes)


def seconds_of(setting, share):
    """Return the seconds of a step; all micro-steps but the first and the last take the same."""
    count = setting.accumulation
    if setting.pipeline_parallel_size > 1 or count < 4:
        return StepSeconds(setting, share).simulate().seconds
    steps = [StepSeconds(setting.changed(accumulation=n), share).simulate() for n in (2, 3)]
    two, three = (step.seconds for step in steps)
    return three + (count - 3) * (three - two)


def fastest_rows(share):
    """Return the fastest layout that fits, for each model, number of devices and way to split."""
    rows = []
    for name, devices in itertools.product(MODELS[1:], SHOWN):
        args = parse_args(["-m", name, "--global-batch-size", "1024", "--seq-length", "4096"])
        row = {"model": name, "devices": devices}
        for way, sizes in WAYS.items():
            found = [
                (seconds_of(setting, share), setting)
                for tp_size, stages in itertools.product(*sizes)
                for setting in layouts(args, devices, tp_size, stages)
            ]
            for seconds, setting in sorted(found, key=lambda layout: layout[0]):
                if gib_of(setting) <= args.gpu_memory_gib:
                    tokens = args.global_batch_size * args.seq_length / seconds / devices
                    stages = setting.pipeline_parallel_size
                    row[way] = {"tokens_per_second": tokens, "stages": stages}
                    break
        rows.append(row)
    return rows


def predictions():
    """Return the rows of all tables that the READMEs show, by table."""
    share = fitted_share("compiled")
    return {
        "published": published_rows(),
        "scenes": [row for scene in SCENES for row in scene_rows(scene, share)],
        "layers": layer_rows(share),
        "fastest": fastest_rows(share),
    }


def main():
    """Print what a device does with each strategy, on each number of devices."""
    args = parse_args()
    if args.output:
        args.output.write_text(json.dumps(predictions()) + "\n")
        return
    print("of each device: tokens/s, share of a step that waits, GiB that it needs")
    print(" " * 22 + "".join(f"{devices:16,} devices" for devices in SHOWN))
    for strategy in STRATEGIES:
        line = f"{strategy:22}"
        for devices in SHOWN:
            setting = at_scale(args, strategy, devices)
            row = row_of(setting, strategy, fitted_share("compiled"))
            line += f"{row['tokens_per_second']:10,.0f}{row['share']:7.1%}{gib_of(setting):7.1f}"
        print(line)


if __name__ == "__main__":
    main()
