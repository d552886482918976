"""Add up the bytes of a training step, event by event; the fullest moment must fit."""

from collections import Counter

from activations import segments_of
from setting import (
    ExpertShape,
    adapter_shapes,
    in_flight,
    local_numbers,
    muon_shapes,
    numbers,
    padded_numbers,
    power_of_two,
    shard_numbers,
)
from training_step import stages_of

# activations.py measures these parts of a GPU's memory in a run on fake tensors.
TRACED_PARTS = ["activations", "logits"]
# A plan shows the parts of a GPU's memory in this order.
PARTS = ["parameters", "gradients", "optimizer state", "gathered weights", "full gradients"]
PARTS += TRACED_PARTS
PARTS += ["communication"]


def fullest_step(setting):
    """Return the StepMemory of the pipeline rank whose simulated step needs the most memory."""
    step_class = class_of(setting)
    # If several ranks have stages with the same number of layers and the same other weights,
    # simulate only the first of these ranks, because no later rank keeps more activations.
    different = {}
    for rank, stage in enumerate(stages_of(setting)):
        different.setdefault((len(stage.layers), tuple(stage.root)), rank)
    steps = [step_class(setting, rank) for rank in different.values()]
    for step in steps:
        step.simulate()
    return max(steps, key=lambda step: step.peak)


def class_of(setting):
    """Return the class that simulates a training step with the given setting."""
    sharded = PipelineMemory if setting.pipeline_parallel_size > 1 else ShardedMemory
    return StepMemory if setting.chapter == "02" else sharded


def least_bytes(setting):
    """Return a lower bound of the peak of a step on rank 0, in bytes.

    Count only parts that are known without a simulation, such as the activations that exist when
    the last layer starts.
    """
    step = class_of(setting)(setting, 0)
    step.enter(segment_of(step.depth), step.depth)
    on_gpu = 0 if setting.cpu_offload else step.state["parameters"] + step.state["optimizer state"]
    return sum(step.held.values()) + on_gpu


def state_bytes(model, setting):
    """Return the bytes of the weights, the gradients and the optimizer state that one rank holds.

    For each weight tensor, AdamW keeps two moments of the same size and a step counter of 4 bytes.
    With LoRA, only the adapters have gradients and moments. Adapters, gradients and moments are
    then in float32. With Muon, the matrices and the experts in the layers have only one moment, and
    no counter.
    """
    weights = shard_numbers(model.shapes, setting) * setting.weight_bytes
    trained, shapes = weights, model.shapes
    if setting.lora_rank:
        shapes = adapter_shapes(model.layers, setting.lora_rank)
        trained = shard_numbers(shapes, setting) * 4
        weights += trained
    moments = 2 * trained + 4 * len(shapes)
    if setting.muon:
        one_moment = muon_shapes(model.layers)
        moments -= shard_numbers(one_moment, setting) * setting.weight_bytes + 4 * len(one_moment)
    return {"parameters": weights, "gradients": trained, "optimizer state": moments}


class StepMemory:
    """Count the bytes that are in memory during a training step on one rank.

    After simulate(), `most` has the bytes of each part at the peak, and `when` names the moment of
    the peak.

    This class models chapters 02 and 03, which use DDP. DDP's gradient buckets exist during the
    entire run, and every micro-step adds its gradients to the buckets.
    """

    # Only the last stage of a pipeline has the head. Without a pipeline, each rank has the head.
    has_head = True
    # While the rank computes one micro-batch, it also keeps the activations of this number of other
    # micro-batches.
    other_micro_batches = 0

    def __init__(self, setting, rank):
        self.setting, self.model = setting, stages_of(setting)[rank]
        self.depth = len(self.model.layers)
        self.segments = segments_of(setting)
        self.state = state_bytes(self.model, setting)
        self.traced_depth = min(2, len(setting.model.layers))
        last_layer = self.segments[f"layer {self.traced_depth}"]
        self.saved_per_layer = self.segments["head"].start - last_layer.start
        self.held, self.most, self.peak, self.when = Counter(), Counter(), 0, ""

    def simulate(self):
        """Simulate one micro-step, because all micro-steps have the same peak."""
        self.held.update(self.state)
        self.micro_step()

    def micro_step(self):
        """Simulate a micro-step in the order of FSDP's code.

        Under DDP, the methods that gather and reduce do nothing. The weights form groups: group N
        is layer N, and group 0 is the root, which has all weights outside of the layers. If FSDP
        gathers the experts of layer N apart from the layer's other weights, these experts are group
        `depth + N`.
        """
        self.gather(0)
        self.use(0)
        self.forward(0)
        for layer in range(1, self.depth + 1):
            if self.setting.reshard_after_forward and layer > 1:
                for group in self.groups_of(layer - 1):
                    self.free(group)
            for group in self.groups_of(layer):
                self.use(group)
            self.forward(layer)
        self.head()
        for layer in range(self.depth, 0, -1):
            for group in self.groups_of(layer):
                self.use(group)
            # FSDP prefetches the weights of the layer that comes next in the backward pass.
            if layer > 1:
                self.gather(layer - 1)
            self.backward(layer)
            self.reduce(layer)
        self.backward(0)
        self.reduce(0)

    def gather(self, group):
        """Do nothing, because DDP gathers no weights; subclasses gather the weights of a group."""

    # These methods do nothing, because DDP gathers and frees no weights, and the buckets of
    # gradients always exist. In the subclasses, gradients are separate tensors, which stay in
    # memory until a reduction.
    use = free = reduce = add_gradients = gather

    def shapes(self, group):
        """Return the shapes of the weights in a group, which FSDP gathers together."""
        if not group:
            return self.model.root
        shapes = self.model.layers[(group - 1) % self.depth]
        if not self.setting.has_expert_groups:
            return shapes
        is_expert = group > self.depth
        return [shape for shape in shapes if isinstance(shape, ExpertShape) == is_expert]

    def groups_of(self, layer):
        """Return a list with the numbers of the groups that contain the weights of a layer.

        The list has two groups if FSDP gathers the layer's experts apart from its other weights.
        """
        experts = self.depth + layer
        has_experts = self.setting.has_expert_groups and len(self.shapes(experts)) > 0
        return [layer, experts] if has_experts else [layer]

    def name_of(self, group):
        """Return the name of a group of weights that FSDP gathers together."""
        if not group:
            return "embedding, norm and output"
        kind = "experts of layer" if group > self.depth else "layer"
        return f"{kind} {(group - 1) % self.depth + 1}"

    def trained_shapes(self, group):
        """Return the shapes of a group's trained weights, which are only adapters under LoRA."""
        if self.setting.lora_rank:
            return adapter_shapes([self.shapes(group)], self.setting.lora_rank) if group else []
        return self.shapes(group)

    def update_peak(self, when, **temporary):
        """Store the bytes of each part and the moment `when` if the sum of the bytes is a new peak.

        The `temporary` bytes exist only at this moment.
        """
        # First compare only the totals, because adding two Counters is slow, and few moments are a
        # new peak.
        total = sum(self.held.values()) + sum(temporary.values())
        if total > self.peak:
            self.peak, self.when, self.most = total, when, self.held + Counter(temporary)

    def enter(self, name, number):
        """Update `held` with the activations and logits that exist when the segment `name` starts.

        The segment is part of layer `number`. The run on fake tensors has at most two layers, so
        assume that each further layer keeps the same number of bytes as the last traced layer.
        """
        layers_in_trace = self.traced_depth if "head" in name else min(2, number)
        untraced_layers = number - layers_in_trace
        for kind in TRACED_PARTS:
            saved = self.saved_per_layer[kind]
            self.held[kind] = self.segments[name].start[kind] + saved * untraced_layers
            per_micro_batch = self.segments["head"].start[kind]
            per_micro_batch += saved * (self.depth - self.traced_depth)
            self.held[kind] += int(self.other_micro_batches * per_micro_batch)

    def compute(self, when, name):
        """Update the step's peak if the segment `name` has a higher peak."""
        start, most = self.segments[name].start, self.segments[name].most
        temporary = {kind: most[kind] - start[kind] for kind in TRACED_PARTS}
        # Under LoRA, leave out the traced gradients, because these are only the gradients of the
        # small adapters.
        if not self.setting.lora_rank:
            temporary["full gradients"] = most["gradients"] - start["gradients"]
        self.update_peak(when, **temporary)

    def forward(self, group):
        self.compute(f"forward of layer {group}" if group else "embedding", segment_of(group))
        if group < self.depth:
            self.enter(segment_of(group + 1), group + 1)

    def head(self):
        """Simulate the loss and its backward pass, if the rank has the head."""
        self.head_gradients = 0
        if self.has_head:
            self.enter("head", self.depth)
            self.compute("loss", "head")
            self.enter("head backward", self.depth)
            self.compute("backward of the loss", "head backward")
            after_head = self.segments[f"layer {self.traced_depth} backward"].start
            self.head_gradients = 0 if self.setting.lora_rank else after_head["gradients"]
        self.enter(f"{segment_of(self.depth)} backward", self.depth)
        self.add_gradients(self.head_gradients)

    def backward(self, group):
        when = f"backward of layer {group}" if group else "backward of the embedding"
        self.compute(when, f"{segment_of(group)} backward")
        # If chapter 09 splits the experts, the trace has this segment, which begins when the
        # gradients of the layer's experts are complete.
        after_experts = f"{segment_of(group)} backward after experts"
        if after_experts in self.segments:
            self.enter(after_experts, group)
        for experts in self.groups_of(group)[1:] if group else []:
            self.add_gradients(self.gradients_of(experts))
            self.reduce(experts)
        if after_experts in self.segments:
            self.compute(when, after_experts)
        if group:
            self.enter(f"{segment_of(group - 1)} backward", group - 1)
            self.add_gradients(self.gradients_of(group))
        else:
            for kind in TRACED_PARTS:
                self.held[kind] = 0
            self.add_gradients(self.gradients_of(0) - self.head_gradients)

    def gradients_of(self, group):
        """Return the bytes of a group's gradients in the type that the backward pass computes."""
        size = 4 if self.setting.autocast else self.setting.compute_bytes
        return local_numbers(self.trained_shapes(group), self.setting) * size


def segment_of(group):
    """Return the name of the traced segment that has the memory of a group's forward pass.

    The trace has at most two layers, so its layer 2 stands for all later layers.
    """
    return f"layer {min(2, group)}" if group else "embedding"


class ShardedMemory(StepMemory):
    """Count the bytes of a step in chapters 04 to 09, where FSDP2 gathers weights.

    Allocate and free buffers in the same order as torch/distributed/fsdp/_fully_shard.
    """

    # Simulate at most this number of micro-steps, because later micro-steps need the same memory.
    micro_steps = 2

    def simulate(self):
        """Simulate the first `micro_steps` micro-steps, or all micro-steps if the step has fewer.

        When the second micro-step starts, the gradient shards of the first micro-step already use
        memory.
        """
        shards_on_device = not (self.setting.cpu_offload and self.setting.cuda)
        if shards_on_device:
            self.held.update({name: self.state[name] for name in ("parameters", "optimizer state")})
        for micro_step in range(min(self.micro_steps, self.setting.accumulation)):
            self.adds_shards = micro_step == 0 and shards_on_device
            self.gathered, self.gather_buffers = set(), {}
            self.last_gather_buffer, self.reduce_buffer = 0, 0
            self.is_forward = True
            self.micro_step()
            self.held["communication"] -= self.reduce_buffer

    def gather(self, group):
        """Allocate the output buffer of a group's all-gather.

        The input buffer, if FSDP needs one, exists only for a moment.
        """
        if group in self.gathered or group in self.gather_buffers:
            return
        setting = self.setting
        # Leave out weights with only one shard, because the rank already has these weights in full.
        output = padded_numbers(self.shapes(group), setting, least_shards=2)
        output *= setting.compute_bytes
        # FSDP copies the shard to change its type, or to move it to the GPU.
        copies_shard = setting.compute_bytes != setting.weight_bytes or setting.cpu_offload
        shard = shard_numbers(self.shapes(group), setting) * setting.compute_bytes
        input_copy = shard if copies_shard else 0
        # Without GPUs, Gloo gathers into a second buffer of the same size as the output.
        gloo_copy = 0 if setting.cuda else output
        when = f"all-gather of {self.name_of(group)}"
        self.update_peak(when, communication=output + input_copy + gloo_copy)
        self.held["communication"] += output
        self.gather_buffers[group] = output

    def use(self, group):
        """Complete a group's all-gather: copy the gathered weights out of the output buffer."""
        if group in self.gathered:
            return
        self.gather(group)
        self.held["gathered weights"] += self.gathered_bytes(group)
        self.gathered.add(group)
        self.update_peak(f"copy of {self.name_of(group)}")
        output = self.gather_buffers.pop(group)
        if self.is_forward:
            # Free the buffer of the previously gathered group only now, because FSDP keeps this
            # buffer until the copy of the current group's weights has been launched.
            self.held["communication"] -= self.last_gather_buffer
            self.last_gather_buffer = output
        else:
            self.held["communication"] -= output

    def add_gradients(self, size):
        """Add `size` bytes to the full gradients."""
        self.held["full gradients"] += size

    def free(self, group):
        if group in self.gathered:
            self.held["gathered weights"] -= self.gathered_bytes(group)
            self.gathered.remove(group)

    def gathered_bytes(self, group):
        """Return the bytes of a group's gathered weights, with FSDP's padding."""
        return padded_numbers(self.shapes(group), self.setting) * self.setting.compute_bytes

    def head(self):
        # FSDP frees the output buffer of the last all-gather when the model's forward pass ends,
        # before the script computes the loss.
        self.held["communication"] -= self.last_gather_buffer
        self.is_forward = False
        super().head()

    def reduce(self, group):
        """Reduce a group's gradients to shards; keep the input buffer until the next reduction."""
        setting = self.setting
        self.free(group)
        self.held["communication"] -= self.reduce_buffer
        size = 4 if setting.lora_rank else setting.weight_bytes
        self.reduce_buffer = padded_numbers(self.trained_shapes(group), setting) * size
        self.held["communication"] += self.reduce_buffer
        when = f"reduce-scatter of {self.name_of(group)}"
        self.update_peak(when)
        self.held["full gradients"] -= self.gradients_of(group)
        shard = shard_numbers(self.trained_shapes(group), setting) * size
        # Without GPUs, Gloo reduces in a second buffer of the same size as the input, unless there
        # is only one shard.
        uses_gloo = not setting.cuda and setting.shards > 1
        gloo_copy = self.reduce_buffer if uses_gloo else 0
        self.update_peak(when, communication=shard + gloo_copy)
        # Only the first micro-step allocates gradient shards, because later micro-steps add their
        # gradients to these shards.
        if self.adds_shards:
            self.held["gradients"] += shard


class PipelineMemory(ShardedMemory):
    """Count the bytes of a step on a pipeline rank.

    In each step, the rank gathers weights once, and reduces gradients once. Simulate one
    micro-batch at the moment when the rank keeps the activations of the largest number of
    micro-batches. At this moment, the rank also keeps the summed gradients. Each micro-batch has
    its own receive buffers: see torch/distributed/pipelining/stage.py.
    """

    micro_steps = 1

    def __init__(self, setting, rank):
        super().__init__(setting, rank)
        ranks, micro_batches = setting.pipeline_parallel_size, setting.accumulation
        self.has_head = rank == ranks - 1
        kept = in_flight(setting.pipeline_schedule, rank, ranks, micro_batches)
        self.other_micro_batches = kept - 1
        # Each stage receives hidden states and their gradients, but the first stage receives no
        # hidden states, and the last stage receives no gradients.
        buffers_per_micro_batch = 2 * setting.num_stages // ranks - (rank == 0) - self.has_head
        tokens = setting.micro_batch_size * setting.seq_length
        tokens //= setting.context_parallel_size * setting.tensor_parallel_size
        hidden_bytes = tokens * setting.model.config.hidden_size * setting.compute_bytes
        self.held["communication"] = micro_batches * buffers_per_micro_batch * hidden_bytes
        gradients = local_numbers(self.model.shapes, setting)
        self.held["full gradients"] = gradients * setting.weight_bytes

    def reduce(self, group):
        """Free a group's gradients, because the rank has added them to its summed gradients."""
        self.held["full gradients"] -= self.gradients_of(group)


def host_memory(setting, part):
    """Return the bytes of each part of a node's CPU memory at the peak, and the phase of the peak.

    `part` is the Model of one rank. At the start, each rank of chapters 02 to 04 builds the entire
    model in CPU memory. From chapter 05 on, a rank builds only the weights outside of the layers
    and one layer at a time. Offloaded weights and gradients are in pinned memory. torch rounds the
    size of each pinned tensor up to a power of two: see CachingHostAllocator.h. Before DCP writes
    tensors of a GPU, it copies the tensors to pinned memory or, with --checkpoint-async, to memory
    that is not pinned: see _state_dict_stager.py.
    """
    # Without GPUs, all tensors are in CPU memory, and the simulated step already counts them.
    if not setting.cuda:
        return {}, "the step"
    state = state_bytes(part, setting)
    sizes = [shard_numbers([shape], setting) * setting.weight_bytes for shape in part.shapes]
    pinned = sum(map(power_of_two, sizes))
    model, layer = setting.model, max(map(numbers, setting.model.layers), default=0)
    built_weights = model.weights if setting.chapter < "05" else numbers(model.root) + layer
    built_bytes = built_weights * (setting.weight_bytes if setting.lora_rank else 4)
    train = {"parameters": pinned} if setting.cpu_offload else {}
    start = {"model in the making": built_bytes} | train
    if setting.cpu_offload:
        train["gradients"] = state["gradients"] if setting.lora_rank else pinned
        train["optimizer state"] = state["optimizer state"]
    if setting.lora_rank:
        train["copy being saved"] = state["gradients"] + state["optimizer state"]
    elif setting.checkpoint_async:
        train["copy being saved"] = state["parameters"] + state["optimizer state"]
    elif not setting.cpu_offload and setting.chapter != "02":
        # DCP holds its copies of the weights and the two moments until it closes the file.
        train["copy being saved"] = 3 * pinned
    phases = [(start, "the start"), (train, "training")]
    if setting.lora_rank:
        # When fine-tuning/lora ends, it merges the adapters into the layers' matrices, in float32
        # on the CPU. Rank 0 then also holds one full layer, and the bytes of that layer's file.
        matrices = [shape for layer in part.layers for shape in layer if len(shape) == 2]
        at_export = {
            "parameters": train.get("parameters", 0),
            "merged weights": 4 * shard_numbers(matrices, setting),
            "the layer that rank 0 writes": 2 * 4 * layer / setting.gpus_per_node,
        }
        phases.append((at_export, "the export"))
    fullest, when = max(phases, key=lambda phase: sum(phase[0].values()))
    return {name: size * setting.gpus_per_node for name, size in fullest.items() if size}, when
