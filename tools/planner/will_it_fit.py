"""Check before you rent GPUs whether a model fits in memory, and how fast it trains.

Here:  python tools/planner/will_it_fit.py --model-name tiny --nodes 1 --gpus-per-node 4
Big:   python tools/planner/will_it_fit.py @05-large-model/configs/llama-3.1-405b.args \
           --nodes 8 --gpus-per-node 8 --gpu-memory-gib 80 --host-memory-gib 1000
All:   add --layouts to compare all ways to split, and to see the command that starts each

The planner needs neither weights nor a GPU. The sizes of weights, gradients and optimizer state
follow from the shapes of the weights. To measure what a layer keeps for its backward pass, the
planner runs two layers on fake tensors, which have shapes but no data. With these sizes, it then
simulates a training step event by event; the fullest moment of the step must fit. The planner
counts only the bytes of tensors: --gpu-overhead-gib and --fragmentation estimate the rest. The
functions of the newest chapter's script parse the flags, and split matrices, layers, sequences or
experts across ranks; the fullest rank must fit. Formulas for computation and collectives add up the
seconds of the same step: step_time.py lists what they assume.
"""

import argparse
import json
import math
import shlex
import sys
import warnings
from pathlib import Path

import transformers

from framework_config import config_text
from gpus import GPUS, gpu_kind, set_defaults
from layouts import best_layouts, plan_of
from report import GIB, checkpoint_text, cost_text, needs_text, speed_text, text_of, verdict
from setting import UnsupportedModelError, bubble, setting_of
from step_time import KERNELS, SPEEDS
from training_step import at_least, fail, load_config, model_of, parse_training_args

# The planner tries the settings in this order. Most settings gather, copy or recompute more than
# the previous setting, and need less GPU memory.
SETTINGS = {
    "02": {},
    "04 --no-reshard-after-forward": {"reshard_after_forward": False},
    "04": {},
    "05": {},
    "05 --recompute selective": {"recompute": "selective"},
    "05 --recompute full": {"recompute": "full"},
    "05 --cpu-offload": {"cpu_offload": True},
    "05 --cpu-offload --recompute selective": {"cpu_offload": True, "recompute": "selective"},
    "05 --cpu-offload --recompute full": {"cpu_offload": True, "recompute": "full"},
}
# These flags describe a run on a single rank, which holds one copy of the model and splits nothing.
ALONE = "--replicas 1 --tensor-parallel-size 1 --pipeline-parallel-size 1"
ALONE += " --context-parallel-size 1 --expert-parallel-size 1"


# ---- command line ----------------------------------------------------------------------------


def parse_args(argv=None):
    """Return the parsed command line; the newest chapter's script parses the training flags."""
    parser = build_parser()
    set_defaults(parser, argv)
    args, args.training_words = parser.parse_known_args(argv)
    args.ranks = args.nodes * args.gpus_per_node
    words, ranks = args.training_words, args.ranks
    # With --layouts, parse the flags for a single rank, because each layout later sets and checks
    # its own split.
    if args.layouts:
        words, ranks = [*words, *ALONE.split()], 1
    vars(args).update(vars(parse_training_args(words, ranks)))
    if args.conversations:
        args.tokens = math.prod(args.conversations)
    if args.tokens:
        steps = math.ceil(args.tokens / args.global_batch_size / args.seq_length)
        args.training_words += ["--num-steps", str(steps)]
    args.tokens = args.tokens or args.num_steps * args.global_batch_size * args.seq_length
    if args.weights_dtype == "bf16" and args.precision == "fp32":
        problem = "a model with weights in bf16 cannot compute in fp32"
        fail(f"--weights-dtype bf16 --precision fp32: {problem}; use --precision bf16")
    is_peak_of_16_bits = args.gpu_tflops == parser.get_default("gpu_tflops")
    if args.precision == "fp32" and args.device != "cpu" and is_peak_of_16_bits:
        problem = f"--gpu-tflops {args.gpu_tflops:g} is a 16-bit peak, so the speed is too high"
        print(f"--precision fp32: {problem}; pass the fp32 peak of your GPU", file=sys.stderr)
    size, gpus = args.tensor_parallel_size, args.gpus_per_node
    if gpus % size:
        problem = f"not a divisor of --gpus-per-node {gpus}, but a group must fit on a node"
        fail(f"--tensor-parallel-size {size}: {problem}; choose a divisor")
    # Plan with the chapter that introduced the last of the chosen splits, because later chapters
    # keep earlier splits.
    splits = {"tensor": "06", "pipeline": "07", "context": "08", "expert": "09"}
    for name, chapter in splits.items():
        if getattr(args, f"{name}_parallel_size") > 1:
            args.chapter = chapter
    args.kernels = args.kernels or ("compiled" if args.compile else "eager")
    if args.layouts and (args.write_config or args.device == "cpu"):
        fail("--layouts: plans GPUs and writes no file; leave out --write-config and --device cpu")
    if args.lora_rank and (args.layouts or args.write_config or args.chapter != "05"):
        fail("--lora-rank: needs plain FSDP; leave out --layouts, --write-config and other splits")
    if args.muon and (args.layouts or args.write_config or args.chapter != "04"):
        fail("--muon: needs --chapter 04; leave out --layouts and --write-config")
    args.config_text = config_text(args) if args.write_config else None
    return args


def build_parser():
    """Build the parser for the planner's own flags on the plan, the machines and the speeds."""
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog="All flags of the newest chapter's script are accepted, also from @FILE. The exit "
        "status is 0 if the chosen setting fits, or if a layout fits; otherwise it is 1.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = fail
    add = parser.add_argument_group("the plan").add_argument
    chapters = "02 04 05 06 07 08 09".split()
    add("--chapter", choices=chapters, default="05", help="chapter whose script will train")
    add("--layouts", action="store_true", help="compare all ways to split, with their commands")
    add("--tokens", type=at_least(0.0), help="tokens to train on; None: those of --num-steps")
    count_help = "instead of --tokens: number of conversations, and their mean number of tokens"
    add("--conversations", type=at_least(1), nargs=2, metavar=("N", "TOKENS"), help=count_help)
    dollars_help = "price of a GPU for an hour, to see what the run costs"
    add("--dollars-per-gpu-hour", type=at_least(0.0), help=dollars_help)
    pairs_help = "tokens in a folder of pairs, for the reference pass of fine-tuning/preferences"
    add("--pair-tokens", type=at_least(0.0), help=pairs_help)
    add("--json", action="store_true", help="print all numbers, in bytes, as JSON")
    add("--brief", action="store_true", help="print one line about the chosen setting")
    config_help = "if the chosen setting fits, write it as a framework's configuration file"
    add("--write-config", nargs=2, metavar=("deepspeed|accelerate", "FILE"), help=config_help)
    add = parser.add_argument_group("machines").add_argument
    add("--nodes", type=at_least(1), default=1, help="number of nodes")
    add("--gpus-per-node", type=at_least(1), default=8, help="GPUs of a node, with a rank on each")
    gpu_help = f"kind of GPU, which sets memory and speeds that you leave out: {', '.join(GPUS)}"
    add("--gpu", type=gpu_kind, help=gpu_help)
    add("--gpu-memory-gib", type=at_least(0.0), default=80.0, help="GiB of memory of each GPU")
    add("--host-memory-gib", type=at_least(0.0), default=1000.0, help="GiB of CPU memory of a node")
    add("--gpu-overhead-gib", type=at_least(0.0), default=3.0, help="GiB for CUDA, NCCL and cuBLAS")
    add("--host-overhead-gib", type=at_least(0.0), default=4.0, help="GiB for a rank's libraries")
    fragmentation_help = "memory that the allocator wastes, as a share of the tensors"
    add("--fragmentation", type=at_least(0.0), default=0.05, help=fragmentation_help)
    weights_help = "bf16: keep weights, gradients and moments in bf16; no chapter does this"
    add("--weights-dtype", choices=["fp32", "bf16"], default="fp32", help=weights_help)
    lora_help = "plan fine-tuning/lora, with adapters of this rank; 0: train all weights"
    add("--lora-rank", type=at_least(0), default=0, help=lora_help)
    muon_help = "plan related-topics/muon, with one moment for each matrix; needs --chapter 04"
    add("--muon", action="store_true", help=muon_help)
    add = parser.add_argument_group("speeds").add_argument
    efficiency_help = "share of its peak that a GPU reaches in all of its computation; None: the "
    efficiency_help += "share follows from the model, the micro-batch, the kernels and the GPU"
    add("--flops-efficiency", type=at_least(0.001), help=efficiency_help)
    kernels_help = "kind of kernels; None: compiled with --compile, otherwise eager"
    add("--kernels", choices=KERNELS, help=kernels_help)
    for name, (speed, description) in SPEEDS.items():
        add(name, type=at_least(0.001), default=speed, help=description)
    storage_help = "GB/s that all nodes together write to the file system"
    add("--storage-gbs", type=at_least(0.001), default=5.0, help=storage_help)
    return parser


# ---- the plan --------------------------------------------------------------------------------


def make_plan(args):
    """Return a dictionary with the size of the model, and with its plans.

    The plans come from plans_of_settings() or, with --layouts, from plans_of_layouts(). Exit with
    an error if the model cannot be planned.
    """
    config, source = load_config(args)
    try:
        args.model = model_of(config)
        plan = plans_of_layouts(args) if args.layouts else plans_of_settings(args)
    except UnsupportedModelError as error:
        fail(f"chapter {args.chapter}: {error}")
    except Exception as error:
        problem = f"cannot be planned ({error!r:.200})"
        fail(f"--model-name {args.model_name}: {problem}; measure a training run instead")
    weights, layers = args.model.weights, len(args.model.layers)
    return {"model": {"source": source, "weights": weights, "layers": layers}} | plan


def plans_of_layouts(args):
    """Plan the best layout of each way to split the model; return the plans under "layouts"."""
    if args.model.has_other_layers:
        fail("--layouts: the planner knows no speed of layers without attention; plan one layout")
    if not (layouts := best_layouts(args)):
        fail("--layouts: no layout has a plan; leave out --layouts to see the reason")
    return {"layouts": layouts}


def plans_of_settings(args):
    """Return a dictionary with the plans of the chosen setting and of all settings of candidates().

    "asked" is the plan of the chosen setting. "settings" has the plan of each setting of
    candidates() by name, and "first" is the name of the first setting that fits, or None. "refused"
    has the reason for each setting that has no plan.
    """
    asked, plans, refused = plan_of(setting_of(args, args.chapter)), {}, {}
    for name, changes in candidates(args).items():
        try:
            plans[name] = plan_of(setting_of(args, name[:2], changes))
        except UnsupportedModelError as error:
            refused[name] = str(error)
    first = next((name for name, plan in plans.items() if plan["fits"]), None)
    return {"asked": asked, "settings": plans, "refused": refused, "first": first}


def candidates(args):
    """Return a dictionary of the settings to try: by name, the values that each setting changes.

    With chapter 06 or later, leave out the settings of chapters 02 and 04. In most of these
    chapters, several ranks share a sample, so chapters 02 and 04 would split the batch into
    different micro-batches. With LoRA, leave out the same settings, because fine-tuning/lora is
    based on chapter 05.
    """
    if args.chapter < "06" and not args.lora_rank:
        return SETTINGS
    return {args.chapter + name[2:]: SETTINGS[name] for name in SETTINGS if name >= "05"}


# ---- report ----------------------------------------------------------------------------------


def show_machines(args, model):
    """Print the size of the model, the source of its shapes, and the machines."""
    print(f"{args.model_name}: {model['weights']:,} weights in {model['layers']} layers")
    print(f"shape from: {model['source']}")
    gpus = f"{args.nodes} × {args.gpus_per_node} GPUs of {args.gpu_memory_gib:g} GiB"
    print(f"{gpus}, hosts of {args.host_memory_gib:g} GiB")


def show(args, plan):
    """Print the memory and the speed of the chosen setting, and the memory of all settings."""
    asked = plan["asked"]
    show_machines(args, plan["model"])
    print(
        f"{args.precision}; {args.seq_length} tokens a sample, micro-batch size "
        f"{args.micro_batch_size}, micro-batches per step: {args.accumulation}"
    )
    if args.pipeline_parallel_size > 1:
        schedule, ranks = args.pipeline_schedule, args.pipeline_parallel_size
        idle = bubble(schedule, ranks, args.accumulation)
        print(f"a pipeline of {ranks}, {schedule}: idle for {idle:.1%} of a step at least")
    print(f"\nper GPU, at the fullest moment: {asked['gpu_when']}")
    total = {"all tensors": asked["gpu_total"]}
    total["fragmentation"] = asked["gpu_total"] * args.fragmentation
    total["overhead"] = args.gpu_overhead_gib * GIB
    show_rows(asked["gpu"] | total | {"margin": asked["gpu_margin"]})
    print(f"\nper host, at the fullest moment: {asked['host_when']}")
    overhead = args.host_overhead_gib * args.gpus_per_node * GIB
    show_rows(asked["host"] | {"overhead": overhead, "margin": asked["host_margin"]})
    print(f"\n{checkpoint_text(args, asked)}")
    if asked["speed"]:
        print(f"speed: {speed_text(args, asked)}")
        if args.pair_tokens:
            # The reference pass is three times as fast as training, because it has no backward
            # pass. It needs no extra memory, because it runs before step 1.
            tokens_per_second = 3 * asked["speed"]["tokens_per_second"] * args.ranks
            minutes = args.pair_tokens / tokens_per_second / 60
            print(f"reference pass: {minutes:,.1f} minutes, a third of the time of training steps")
    elif args.model.has_other_layers:
        print("speed: unknown, because the formulas are for layers with attention only")
    print(f"\n{'setting':38}{'GPU':>13}{'host':>14}")
    for name in candidates(args):
        if setting := plan["settings"].get(name):
            sizes = f"{text_of(setting['gpu_needs']):>13}{text_of(setting['host_needs']):>14}"
            print(f"{name:38}{sizes}  {verdict(setting)}")
        else:
            print(f"{name:38}   no plan: {plan['refused'][name]}")
    nothing = "none; use more nodes, larger GPUs or a smaller --seq-length"
    print(f"\nthe first that fits: {plan['first'] or nothing}")


def show_layouts(args, plan):
    """Print the machines, the assumed speeds, and the memory of each layout.

    Also print the speed and the command of each layout that fits.
    """
    show_machines(args, plan["model"])
    speeds = [f"{name} {getattr(args, name[2:].replace('-', '_')):g}" for name in SPEEDS]
    share = f"--flops-efficiency {args.flops_efficiency:g}" if args.flops_efficiency else ""
    print("assumed:", share or f"--kernels {args.kernels}", *speeds)
    print(checkpoint_text(args, plan["layouts"][0]))
    for layout in plan["layouts"]:
        print(f"\n{layout['way']}: {needs_text(layout)}")
        if layout["fits"]:
            print(f"{speed_text(args, layout)}\n{layout['command']}")


def show_rows(rows):
    """Print a line for each part of the memory: its name, and its size in GiB or MiB."""
    for name, size in rows.items():
        print(f"  {name:20}{text_of(size):>16}")


def show_line(args, plan):
    """Print one line about the chosen setting: whether it fits, its memory, and the run's cost."""
    plan, machines = plan["asked"], f"{args.nodes} × {args.gpus_per_node} GPUs"
    tensors, all_else = text_of(plan["gpu_total"]), text_of(plan["gpu_needs"])
    parts = [
        f"{args.model_name} on {machines} of {args.gpu_memory_gib:g} GiB: {verdict(plan)}",
        f"a GPU {tensors} of tensors, {all_else} with all else",
        f"a host {text_of(plan['host_needs'])}",
    ]
    if plan["speed"]:
        parts.append(cost_text(args, plan))
    print("; ".join(parts))


def main():
    """Print the plan; exit with 1 if the chosen setting does not fit.

    With --layouts, exit with 1 if no layout fits. If the chosen setting fits, also write the file
    of --write-config.
    """
    args = parse_args()
    # Hide warnings, because readers would overlook an error message of one line among them.
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    plan = make_plan(args)
    fits = any(layout["fits"] for layout in plan.get("layouts", [plan.get("asked")]))
    if args.json:
        print(json.dumps(plan, indent=1, default=lambda _: None))
    elif args.layouts:
        show_layouts(args, plan)
    elif args.brief:
        show_line(args, plan)
    else:
        show(args, plan)
    if args.write_config and fits:
        path = Path(args.write_config[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(args.config_text)
    sys.exit(0 if fits else 1)


if __name__ == "__main__":
    main()
