"""Predict the seconds of a training step by formulas, and from them tokens per second.

Times are in seconds, sizes in bytes, and rates in GB/s. The speed of computation has three causes,
whose sizes are fitted to half of the published runs (fit.py):

- Matrix products and attention reach different shares of a GPU's peak (gpus.py). Small products are
  slower: with HALF_WORK values of hidden states, a product reaches half of the share.
- Cheap operations between the products take the time that the GPU needs to read and write its
  memory, so that they cost narrow models more than wide models.
- Kernels matter (KERNELS): compiled code reads and writes less, and fused kernels are faster.

`--flops-efficiency` replaces these causes by one share of the peak. The other assumptions:

- No rank waits for a slower rank or for data, nothing else uses the links, and collectives do not
  slow down computation.
- The backward pass of a layer takes twice as long as its forward pass, or three times as long with
  full recomputation. Selective recomputation repeats the cheap operations. Under LoRA, the
  matrices' part of the backward pass takes half as long, and adapters cost no time.
- The gather of a layer runs during the computation of the previous layer, and so do reductions.
  Nothing hides the collectives of ranks that split a layer (TP), a sequence (CP) or experts (EP).
- DDP reduces one layer at a time, so its buckets are larger than real buckets.
- Copies of offloaded shards do not overlap with collectives, and AdamW then runs on the host.
  From the second micro-batch on, a rank waits until gradients have been copied and added up.
- A pipeline gathers once per step, reduces at its end, and is as fast as its slowest stage.
- Each layer takes the time of the average layer, even if the first layers of a mixture have no
  experts. All experts receive the same number of tokens.
- A sequence that is split by gathered keys and values is as fast as its last rank, which attends to
  the most keys.
"""

import math
from collections import Counter

from setting import ExpertShape, adapter_shapes, bubble, numbers, padded_numbers, shard_numbers
from training_step import active_numbers, stages_of

# A matrix product whose input has this number of values, tokens times width, reaches only half of
# the usual speed.
HALF_WORK = 400 * 4096
# Each kind of kernels has two numbers. The first number is the speed-up of matrix products and
# attention. The second number counts the hidden states that the cheap operations of a layer read
# and write for each token. "fused" stands for NVIDIA's Transformer Engine. We counted 20, fitted 53
# to published runs, and chose 1.5, so that a product reaches at most 0.6 × 1.5 = 90% of the peak.
KERNELS = {"eager": (1.0, 53), "compiled": (1.0, 20), "fused": (1.5, 20)}
# Each flag has a default, which fits a machine with H100 GPUs, and a help text. NCCL's developers
# report 370 of 450 GB/s for a ring inside a node (https://github.com/NVIDIA/nccl-tests/issues/212),
# and 47 of 50 GB/s for a 400 Gb/s adapter (issue 290).
SPEEDS = {
    "--gpu-tflops": (989.0, "dense TFLOP/s of a GPU in --precision"),
    "--matrix-share": (0.6, "share of its peak that a GPU reaches in matrix products"),
    "--attention-share": (0.33, "share of its peak that a GPU reaches in attention"),
    "--latency": (1.0, "factor for NCCL's estimates of the latency of a hop"),
    "--nvlink-gbs": (370.0, "GB/s that a GPU sends inside its node"),
    "--network-gbs": (47.0, "GB/s that a GPU sends to other nodes"),
    "--gpu-bandwidth-gbs": (3350.0, "GB/s of a GPU's own memory"),
    "--pcie-gbs": (50.0, "GB/s between a GPU and its host"),
    "--pageable-gbs": (6.0, "GB/s from a GPU to pageable host memory"),
    "--cpu-adam-gbs": (200.0, "GB/s of host memory while AdamW runs on the host"),
}
# Each row has NCCL's own estimates for an algorithm and a protocol, from src/graph/tuning.cc at
# b6475625. The first number is the share of the ring's bandwidth that a collective reaches. The
# other numbers are the microseconds of the start, of a hop inside a node, and of a hop between
# nodes. NCCL chooses the fastest row. Only an all-reduce can use a tree, so an all-gather or a
# reduce-scatter of N ranks needs N − 1 hops. The table leaves out NVLink SHARP and PAT
# (https://arxiv.org/abs/2506.20252).
NCCL = {
    ("ring", "Simple"): (1.0, 8.4, 3.4, 14.0),
    ("ring", "LL128"): (0.92, 14.0, 1.9, 4.0),
    ("tree", "Simple"): (0.92, 0.0, 28.0, 28.0),
    ("tree", "LL128"): (0.92 * 120 / 128, 14.0, 1.25, 8.5),
}


def forward_flops(setting):
    """Return the FLOPs of a token's forward pass, as three numbers.

    The numbers are for the matrices of an average layer, the attention of a layer, and the head. A
    token needs 2 FLOPs for each weight that it uses and, for attention, 4 × width × sequence length
    in each layer: PaLM, appendix B, https://arxiv.org/abs/2204.02311. Looking up an embedding needs
    no FLOPs.
    """
    model, config = setting.model, setting.model.config
    matrices = 2 * active_numbers(model) / len(model.layers)
    attention = 4 * attention_width(config) * setting.seq_length
    return matrices, attention, 2 * config.vocab_size * config.hidden_size


def forward_seconds(setting):
    """Return the seconds of a token's forward pass on one GPU, as four numbers.

    Three numbers are for the parts of a layer: matrix products, attention, and cheap operations.
    The fourth number is for the head.
    """
    matrices, attention, head = forward_flops(setting)
    peak = setting.gpu_tflops * 1e12
    if setting.flops_efficiency:
        rate = peak * setting.flops_efficiency
        return matrices / rate, attention / rate, 0.0, head / rate
    faster, passes = KERNELS[setting.kernels]
    config = setting.model.config
    ranks = setting.tensor_parallel_size * setting.context_parallel_size
    work = setting.micro_batch_size * setting.seq_length / ranks * config.hidden_size
    rate = peak * faster * setting.matrix_share
    cheap = passes * 2 * config.hidden_size / setting.gpu_bandwidth_gbs / 1e9
    attention /= peak * faster * setting.attention_share
    head /= rate * work / (work + HALF_WORK)
    # The products of experts are smaller, because each expert gets only a part of the tokens.
    experts = [s[0] for layer in setting.model.layers for s in layer if isinstance(s, ExpertShape)]
    if experts:
        work *= config.num_experts_per_tok / experts[0] * setting.expert_parallel_size
    matrices /= rate * work / (work + HALF_WORK)
    return matrices, attention, cheap, head


def attention_width(config, heads="num_attention_heads"):
    """Return the total width of attention heads; `heads` names the setting with their number.

    If keys and values have different widths, as in DeepSeek-V3, use the mean of both widths.
    """
    all_heads = getattr(config, "num_attention_heads", 0)
    head_width = getattr(config, "head_dim", None) or config.hidden_size // max(1, all_heads)
    if getattr(config, "qk_head_dim", None):
        head_width = (config.qk_head_dim + config.v_head_dim) / 2
    return head_width * (getattr(config, heads, None) or all_heads)


def collective(setting, kind, size, ranks, nodes, gbs):
    """Return the seconds that a collective takes, and the bytes that each rank sends in a ring.

    The full tensor has `size` bytes. The ring spans `nodes` nodes, and a rank sends `gbs` GB/s.
    """
    if ranks == 1:
        return 0.0, 0.0
    rounds, times = 2 if kind == "all-reduce" else 1, []
    sent = rounds * size * (ranks - 1) / ranks
    for (algorithm, _), (share, start, inside, between) in NCCL.items():
        if algorithm == "ring":
            hops, wire = (rounds * (ranks - nodes), rounds * (nodes - 1)), sent
        elif kind == "all-reduce":
            hops, wire = (2 * (ranks / nodes - 1), 2 * math.ceil(math.log2(nodes))), 2 * size
        else:
            continue
        latency = start + hops[0] * inside + hops[1] * between
        times.append(wire / (share * gbs * 1e9) + setting.latency * latency / 1e6)
    return min(times), sent


def ring(setting, name):
    """Return a ring's number of ranks, the number of nodes that it spans, and its speed in GB/s.

    `name` is the kind of group whose ranks form the ring. A ring that spans nodes leaves each node
    once, and uses the network links of all its ranks in the node.
    """
    if name == "tensor":
        return setting.tensor_parallel_size, 1, setting.nvlink_gbs
    # Assume that a ring of replicas has one rank on each node, so all its messages use the network.
    if name == "replicas":
        return setting.replicas, setting.replicas, setting.network_gbs
    ranks = setting.ranks if setting.chapter == "02" else setting.shards
    local_ranks = setting.gpus_per_node // setting.tensor_parallel_size
    if name == "context":
        ranks = setting.context_parallel_size
    # EP: consecutive ranks have different experts, so only some ranks of a node hold shards of the
    # same experts.
    if name == "expert copy":
        ranks = setting.expert_shards
        local_ranks = max(1, setting.gpus_per_node // setting.expert_parallel_size)
    nodes = -(-ranks // local_ranks)
    across = min(setting.nvlink_gbs, local_ranks * setting.network_gbs)
    return ranks, nodes, across if nodes > 1 else setting.nvlink_gbs


def overlapped(count, compute, communication):
    """Return the seconds of `count` layers that communicate while a neighboring layer computes.

    `compute` and `communication` are the seconds of one layer. One of the `count` communications
    overlaps with nothing; the caller adds the seconds of this communication.
    """
    return compute + (count - 1) * max(compute, communication)


class StepTime:
    """Add up the seconds of a step in `seconds`.

    `busy` has the seconds of computation on the GPU, and of AdamW on the host. `sent` has the bytes
    that a rank sends in each kind of group. `sent["network"]` has the rank's share of the bytes
    that leave its node.
    """

    def __init__(self, setting):
        self.setting, self.sent = setting, Counter()
        self.tokens = setting.micro_batch_size * setting.seq_length
        ranks = setting.tensor_parallel_size * setting.context_parallel_size
        parts = [self.tokens / ranks * seconds for seconds in forward_seconds(setting)]
        matrices, attention, cheap, head = parts
        # Plan for the last context-parallel rank, because its tokens attend to the most keys.
        if setting.context_parallel_style == "gather":
            attention *= 2 - 1 / setting.context_parallel_size
        # Compute the seconds of a micro-batch in a layer's forward pass, in both passes of the
        # head, and in a layer's backward pass.
        self.forward, self.head = matrices + attention + cheap, 3 * head
        self.backward = 2 * self.forward + self.repeated(matrices, attention, cheap)
        # LoRA: the backward pass computes no gradients of frozen matrices.
        if setting.lora_rank:
            self.backward -= matrices
            self.head -= head
        # Find the slowest stage, because a pipeline is as fast as this stage. Without a pipeline,
        # there is one stage.
        stages = stages_of(setting)
        work = [len(stage.layers) * (self.forward + self.backward) for stage in stages]
        work[-1] += self.head
        slowest = work.index(max(work))
        self.has_head, self.model = slowest == len(work) - 1, stages[slowest]
        self.head *= self.has_head
        self.depth = len(self.model.layers)
        self.busy = Counter(compute=setting.accumulation * work[slowest])
        self.add_blocking_collectives()
        if setting.chapter == "02":
            self.seconds = self.replicated_step()
        elif len(stages) > 1:
            self.seconds = self.pipeline_step()
        else:
            self.seconds = self.sharded_step()
        optimizer = self.optimizer_step(len(stages))
        self.seconds += optimizer
        self.busy["host" if setting.cpu_offload else "compute"] += optimizer

    def repeated(self, matrices, attention, cheap):
        """Return the seconds that recomputation adds to a layer's backward pass.

        The arguments are the seconds of the parts of the layer's forward pass.
        """
        full = matrices + attention + cheap
        return {"none": 0.0, "selective": cheap, "full": full}[self.setting.recompute]

    def send(self, name, kind, size, times=1):
        """Return the seconds of a collective.

        Add the bytes of `times` collectives of this size to `sent`.
        """
        ranks, nodes, gbs = ring(self.setting, name)
        seconds, sent = collective(self.setting, kind, size, ranks, nodes, gbs)
        self.sent[name] += times * sent
        # Divide the bytes that leave a node among the ring's ranks in the node, because a ring
        # leaves each node only once.
        if nodes > 1:
            self.sent["network"] += times * sent * nodes / ranks
        return seconds

    def add_blocking_collectives(self):
        """Add the collectives of TP, CP and EP to the seconds of a layer's passes and of the head.

        Nothing overlaps with these collectives, because both passes wait for the results.
        """
        setting, config, count = self.setting, self.model.config, self.setting.accumulation
        repeats = setting.recompute != "none"
        # TP: a layer has 4 collectives of hidden states in each pass, and recomputation repeats 3
        # of these collectives.
        hidden = self.tokens * config.hidden_size * setting.compute_bytes
        hidden /= setting.context_parallel_size
        times = count * self.depth * (8 + 3 * repeats)
        seconds = self.send("tensor", "all-gather", hidden, times)
        self.forward += 4 * seconds
        self.backward += (4 + 3 * repeats) * seconds
        # TP: without a pipeline, add two all-to-alls, of the embedding's result and of the result's
        # gradient. An all-to-all takes as long as an all-gather of one rank's part. In the stage
        # with the head, also add two collectives: of the head's weights, and of the gradient of
        # these weights.
        if setting.pipeline_parallel_size == 1:
            part = hidden / setting.tensor_parallel_size
            self.head += 2 * self.send("tensor", "all-gather", part, 2 * count)
        head = config.vocab_size * config.hidden_size * setting.compute_bytes * self.has_head
        self.head += 2 * self.has_head * self.send("tensor", "all-gather", head, 2 * count)
        # CP: gather the keys and values of all tokens or, with Ulysses, exchange this rank's part
        # of keys, values, queries and results.
        width = 2 * attention_width(config, "num_key_value_heads")
        if setting.context_parallel_style == "ulysses":
            width = (width + 2 * attention_width(config)) / setting.context_parallel_size
        size = self.tokens * width * setting.compute_bytes / setting.tensor_parallel_size
        times = count * self.depth * (2 + repeats)
        seconds = self.send("context", "all-gather", size, times)
        self.forward += seconds
        self.backward += (1 + repeats) * seconds
        # EP: each pass has two all-to-alls. The first sends hidden states or gradients to the
        # experts, and the second sends the results back.
        choices = getattr(config, "num_experts_per_tok", None) or 0
        size = choices * hidden / setting.tensor_parallel_size
        share = sum(any(isinstance(s, ExpertShape) for s in layer) for layer in self.model.layers)
        share /= self.depth
        times = count * self.depth * share * (4 + 2 * repeats)
        seconds = share * self.exchange(size, times)
        self.forward += 2 * seconds
        self.backward += (2 + 2 * repeats) * seconds

    def exchange(self, size, times):
        """Return the seconds of an all-to-all.

        Add the bytes of `times` all-to-alls of this size to `sent`. In an all-to-all, a rank
        divides `size` bytes equally among the ranks of its expert-parallel group.
        """
        setting, ranks = self.setting, self.setting.expert_parallel_size
        if ranks == 1:
            return 0.0
        local_ranks = min(ranks, setting.gpus_per_node)
        inside, between = size * (local_ranks - 1) / ranks, size * (ranks - local_ranks) / ranks
        seconds = max(inside / setting.nvlink_gbs, between / setting.network_gbs) / 1e9
        # Add the latency of only the slowest hop, because all messages start at the same time.
        _, start, local_hop, far_hop = NCCL["ring", "Simple"]
        seconds += setting.latency * (start + (far_hop if between else local_hop)) / 1e6
        self.sent["expert"] += times * (inside + between)
        self.sent["network"] += times * between
        return seconds

    def per_group(self, kind, times, seconds_per_gb=0.0):
        """Return the seconds of a layer's collective, and the seconds of the root's collective.

        The root holds the weights outside of the layers. An all-gather collects weights, a
        reduce-scatter reduces gradients to shards, and an all-reduce adds up the gradient shards of
        replicas. Add the bytes of `times[0]` collectives of layers, and of `times[1]` collectives
        of the root, to `sent`. Under offload, the rank also copies its shard, and the copy does not
        overlap with the collective.
        """
        setting, seconds = self.setting, []
        size = setting.compute_bytes if kind == "all-gather" else setting.weight_bytes
        # LoRA's adapters are small, so the collectives of their gradients count as nothing.
        if setting.lora_rank and kind != "all-gather":
            return 0.0, 0.0
        # For replicas, count only a shard, without padding, because replicas all-reduce shards.
        name, elements = "copy", padded_numbers
        if kind == "all-reduce":
            name, elements = "replicas", shard_numbers
        for groups, count in ((self.model.layers, times[0]), ([self.model.root], times[1])):
            shapes = [shape for group in groups for shape in group]
            shard = shard_numbers(shapes, setting) / len(groups)
            copied = setting.cpu_offload * shard * setting.weight_bytes / 1e9
            seconds.append(copied * seconds_per_gb)
            # EP: count experts separately, because experts and other weights have different numbers
            # of shards.
            apart = setting.expert_parallel_size > 1
            experts = [shape for shape in shapes if apart and isinstance(shape, ExpertShape)]
            others = [shape for shape in shapes if not (apart and isinstance(shape, ExpertShape))]
            full = elements(others, setting) / len(groups) * size
            seconds[-1] += self.send(name, kind, full, count)
            if experts:
                full = elements(experts, setting) / len(groups) * size
                seconds[-1] += self.send(name.replace("copy", "expert copy"), kind, full, count)
        return seconds

    def sharded_step(self):
        """Return the seconds of a step under FSDP, without the optimizer."""
        setting, depth, count = self.setting, self.depth, self.setting.accumulation
        # In each micro-step, gather the last layer only once, because it stays gathered until the
        # backward pass. Gather the other layers twice if they are freed after the forward pass.
        reshards, seconds_per_gb = setting.reshard_after_forward, 1 / setting.pcie_gbs
        times = count * (2 * depth - 1 if reshards else depth), count
        gather, root_gather = self.per_group("all-gather", times, seconds_per_gb)
        # Add the first gathers and the last reductions in full, because no computation hides them.
        forward = root_gather + gather + overlapped(depth, self.forward, gather)
        second_gather = gather if reshards else 0.0
        reduce, root_reduce = self.per_group("reduce-scatter", (depth, 1), seconds_per_gb)
        seconds = count * (forward + self.head) + reduce + root_reduce
        seconds += overlapped(depth, self.backward, second_gather + reduce)
        if count > 1:
            # Under offload, the gradients of later micro-steps go to pageable host memory, where
            # the CPU adds them to the gradients of earlier micro-steps.
            adding = 3 * setting.gpus_per_node / setting.cpu_adam_gbs
            times = (count - 1) * depth, count - 1
            seconds_per_gb = 1 / setting.pageable_gbs + adding
            reduce, root_reduce = self.per_group("reduce-scatter", times, seconds_per_gb)
            backward = overlapped(depth, self.backward, second_gather + reduce) + reduce
            if setting.cpu_offload:
                backward = depth * (max(self.backward, second_gather) + reduce)
            seconds += (count - 1) * (backward + root_reduce)
        replicas, root_replicas = self.per_group("all-reduce", (depth, 1))
        slower = max(self.backward, second_gather + reduce)
        exposed = overlapped(depth, slower, replicas) - depth * slower
        return seconds + exposed + replicas + root_replicas

    def replicated_step(self):
        """Return the seconds of a step under DDP, without the optimizer.

        The last micro-step reduces all gradients.
        """
        depth, config = self.depth, self.model.config
        head = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
        # Send the gradient of an untied output layer first, because the backward pass computes it
        # first.
        first = self.send("copy", "all-reduce", 4 * head)
        size = 4 * sum(map(numbers, self.model.layers)) / depth
        layer = self.send("copy", "all-reduce", size, depth)
        root = self.send("copy", "all-reduce", 4 * (numbers(self.model.root) - head))
        compute = depth * (self.forward + self.backward) + self.head
        backward = overlapped(depth, self.backward, layer) + layer
        backward = max(backward, first + depth * layer)
        return self.setting.accumulation * compute - depth * self.backward + backward + root

    def pipeline_step(self):
        """Return the seconds of a step of a pipeline, without the optimizer.

        The ranks reduce gradients only at the end of the step.
        """
        setting, depth, count = self.setting, self.depth, self.setting.accumulation
        # Assume that, for each micro-batch, each stage of a rank sends hidden states and, later,
        # gradients.
        size = 2 * setting.num_stages // setting.pipeline_parallel_size * count * self.tokens
        size *= self.model.config.hidden_size * setting.compute_bytes
        size /= setting.tensor_parallel_size * setting.context_parallel_size
        self.sent["network"] += size
        seconds_per_gb = 1 / setting.pcie_gbs
        gather, root_gather = self.per_group("all-gather", (depth, 1), seconds_per_gb)
        waiting = root_gather + gather + overlapped(depth, self.forward, gather)
        work = count * (depth * (self.forward + self.backward) + self.head)
        idle = bubble(setting.pipeline_schedule, setting.pipeline_parallel_size, count)
        seconds = waiting - depth * self.forward + work / (1 - idle)
        reduce, root_reduce = self.per_group("reduce-scatter", (depth, 1), seconds_per_gb)
        replicas, root_replicas = self.per_group("all-reduce", (depth, 1))
        reduced = overlapped(depth, reduce, replicas) + replicas + root_reduce + root_replicas
        return max(seconds, size / setting.network_gbs / 1e9) + reduced

    def optimizer_step(self, stages):
        """Return the seconds of AdamW, which reads or writes 10 numbers for each trained weight."""
        setting = self.setting
        ranks = setting.shards * setting.tensor_parallel_size * stages
        size = 10 * setting.weight_bytes * setting.model.weights / ranks
        if setting.lora_rank:
            size = 40 * numbers(adapter_shapes(setting.model.layers, setting.lora_rank)) / ranks
        if setting.cpu_offload:
            return size * setting.gpus_per_node / setting.cpu_adam_gbs / 1e9
        return size / setting.gpu_bandwidth_gbs / 1e9


def speed_of(setting, kind=StepTime):
    """Return a dictionary with the speed of a setting.

    `kind` is the class that adds up the seconds.

    `step` is the seconds of a step, and `tokens_per_second` is the tokens per second of one GPU.
    `mfu` is the share of the GPUs' peak that the model's FLOPs use, without recomputation.
    `exposed` is the share of the step that a rank spends neither on computation nor on AdamW.
    `network_gb` is the rank's share of the GB that leave its node.
    """
    step = kind(setting)
    tokens = setting.global_batch_size * setting.seq_length / setting.ranks
    matrices, attention, head = forward_flops(setting)
    flops = 3 * (len(setting.model.layers) * (matrices + attention) + head)
    if setting.lora_rank:
        flops -= len(setting.model.layers) * matrices + head
    waiting = max(0.0, step.seconds - step.busy["compute"] - step.busy["host"])
    speed = {"step": step.seconds, "tokens_per_second": tokens / step.seconds}
    speed["mfu"] = speed["tokens_per_second"] * flops / setting.gpu_tflops / 1e12
    return speed | {"exposed": waiting / step.seconds, "network_gb": step.sent["network"] / 1e9}
