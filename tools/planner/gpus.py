"""Define the kinds of GPUs that `--gpu` names, in the planner and in the dry run.

The speed of a link is the speed that NCCL reaches, not the maker's number: 370 of 450 GB/s for a
ring inside a node of H100s (https://github.com/NVIDIA/nccl-tests/issues/212), and 47 of 50 GB/s for
a 400 Gb/s adapter (issue 290). Other links get the same shares of their maker's number. An RTX 4090
cannot reach the memory of its neighbors, so its data passes through the host at half the speed.
Shares of the peak are fitted to published runs on A100s and H100s (fit.py); other GPUs get
the shares of the H100. The speed of the network is that of the maker's own nodes with eight GPUs;
nodes in a cloud may have a slower network.
"""

from typing import NamedTuple

from training_step import fail

# These fields describe a GPU in torch; no flag of the planner sets them.
IN_TORCH = "name", "capability"


class Gpu(NamedTuple):
    """Hold the memory and the speeds of a GPU and its node; `name` is the GPU's name in torch.

    All fields outside of IN_TORCH have the names of the planner's arguments.
    """

    name: str
    capability: tuple
    gpu_memory_gib: float
    # gpu_tflops is the peak of dense matrix products, in TFLOP/s: in bf16, or on a T4, in fp16.
    gpu_tflops: float
    # Matrix products and attention reach these shares of the peak.
    matrix_share: float
    attention_share: float
    gpu_bandwidth_gbs: float
    nvlink_gbs: float
    network_gbs: float
    pcie_gbs: float

    @property
    def values(self):
        """Return the values that this GPU gives to the planner's flags, by argument name."""
        return {name: value for name, value in self._asdict().items() if name not in IN_TORCH}


HOPPER, AMPERE = (0.6, 0.33), (0.72, 0.62)
GPUS = {
    "T4-16GB": Gpu("Tesla T4", (7, 5), 15, 65, *HOPPER, 300, 6, 5.9, 12),
    "A100-40GB": Gpu("NVIDIA A100-SXM4-40GB", (8, 0), 40, 312, *AMPERE, 1555, 247, 23.5, 25),
    "A100-80GB": Gpu("NVIDIA A100-SXM4-80GB", (8, 0), 80, 312, *AMPERE, 2039, 247, 23.5, 25),
    "H100-80GB": Gpu("NVIDIA H100 80GB HBM3", (9, 0), 80, 989, *HOPPER, 3350, 370, 47, 50),
    "H200-141GB": Gpu("NVIDIA H200", (9, 0), 140, 989, *HOPPER, 4800, 370, 47, 50),
    "B200-180GB": Gpu("NVIDIA B200", (10, 0), 179, 2250, *HOPPER, 8000, 740, 47, 50),
    "L40S-48GB": Gpu("NVIDIA L40S", (8, 9), 45, 362, *HOPPER, 864, 25, 11.75, 25),
    "RTX4090-24GB": Gpu("NVIDIA GeForce RTX 4090", (8, 9), 24, 165, *HOPPER, 1008, 12, 1.2, 25),
    "MI300X-192GB": Gpu("AMD Instinct MI300X", (9, 4), 192, 1307, *HOPPER, 5300, 368, 47, 50),
}


def gpu_kind(text):
    """Return the key in GPUS that a value of --gpu means; exit unless exactly one key matches."""
    found = [kind for kind in GPUS if kind == text or kind.partition("-")[0] == text]
    if len(found) == 1:
        return found[0]
    problem, choices = "unknown kind", list(GPUS)
    if found:
        problem, choices = "several kinds", found
    fail(f"--gpu {text}: {problem}; choose {', '.join(choices[:-1])} or {choices[-1]}")


def set_defaults(parser, argv):
    """If --gpu names a GPU, make its memory and its speeds the parser's defaults."""
    kind = parser.parse_known_args(argv)[0].gpu
    if kind:
        parser.set_defaults(**GPUS[kind].values)
