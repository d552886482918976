"""Check whether a model fits in memory before you rent GPUs, and show what fills the memory.

Here:  python tools/planner/will_it_fit.py --model-name tiny --nodes 1 --gpus-per-node 4
Big:   python tools/planner/will_it_fit.py @05-large-model/configs/llama-3.1-405b.args \
           --nodes 8 --gpus-per-node 8 --gpu-memory-gib 80 --host-memory-gib 1000

The planner needs neither weights nor a GPU. The sizes of weights, gradients and optimizer state
follow from the shapes of the weights. To measure what a layer keeps for its backward pass, the
planner runs two layers on fake tensors, which have shapes but no data. With these sizes, it then
simulates a training step event by event; the fullest moment of the step must fit. The planner
counts only the bytes of tensors: --gpu-overhead-gib and --fragmentation estimate the rest. The
functions of the newest chapter's script parse the flags, and split matrices, layers or sequences
across ranks; the fullest rank must fit.
"""

import argparse
import contextlib
import json
import math
import shlex
import sys
import warnings
from pathlib import Path

import transformers

from framework_config import config_text
from memory import PARTS, fullest_step, host_memory
from training_step import (
    FLAG_DEFAULTS,
    UnsupportedModelError,
    bubble,
    fail,
    load_config,
    model_of,
    parse_training_args,
    setting_of,
)

GIB = 2**30
# The settings in the order to try them. Each setting gathers, copies or recomputes more than the
# settings above it.
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


# ---- command line ----------------------------------------------------------------------------


def parse_args(argv=None):
    """Parse and check the command line."""
    parser = parser_of(__doc__, "The exit status is 0 if the chosen setting fits, otherwise 1.")
    add = parser.add_argument_group("the plan").add_argument
    chapters = "02 04 05 06 07 08".split()
    add("--chapter", choices=chapters, default="05", help="chapter whose script will train")
    add("--json", action="store_true", help="print all numbers, in bytes, as JSON")
    add("--brief", action="store_true", help="print one line about the chosen setting")
    config_help = "if the chosen setting fits, write it as a framework's configuration file"
    add("--write-config", nargs=2, metavar=("deepspeed|accelerate", "FILE"), help=config_help)
    args = parse(parser, argv)
    # Only these chapters split matrices, layers or sequences.
    for name, chapter in {"tensor": "06", "pipeline": "07", "context": "08"}.items():
        if getattr(args, f"{name}_parallel_size") > 1:
            args.chapter = chapter
    args.config_text = config_text(args) if args.write_config else None
    return args


def parser_of(docstring, epilog=""):
    """Return a parser with the flags that describe the machines."""
    parser = argparse.ArgumentParser(
        description=docstring.partition("\n")[0],
        epilog=f"All flags of the newest chapter's script are accepted, also from @FILE. {epilog}",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        fromfile_prefix_chars="@",
        allow_abbrev=False,
    )
    parser.convert_arg_line_to_args = lambda line: shlex.split(line, comments=True)
    parser.error = fail
    add = parser.add_argument_group("machines").add_argument
    add("--nodes", type=at_least(1), default=1, help="number of nodes")
    add("--gpus-per-node", type=at_least(1), default=8, help="GPUs of a node, with a rank on each")
    add("--gpu-memory-gib", type=at_least(0.0), default=80.0, help="memory of each GPU")
    add("--host-memory-gib", type=at_least(0.0), default=1000.0, help="CPU memory of each node")
    add("--gpu-overhead-gib", type=at_least(0.0), default=3.0, help="for CUDA, NCCL and cuBLAS")
    add("--host-overhead-gib", type=at_least(0.0), default=4.0, help="for each rank's libraries")
    fragmentation_help = "memory that the allocator loses, as a share of the tensors"
    add("--fragmentation", type=at_least(0.0), default=0.05, help=fragmentation_help)
    weights_help = "bf16: keep weights, gradients and moments in bf16; no chapter does this"
    add("--weights-dtype", choices=["fp32", "bf16"], default="fp32", help=weights_help)
    return parser


def parse(parser, argv):
    """Parse a command line; the newest chapter's script parses the flags of training."""
    args, training_words = parser.parse_known_args(argv)
    args.ranks = args.nodes * args.gpus_per_node
    vars(args).update(vars(parse_training_args(training_words, args.ranks)))
    if args.weights_dtype == "bf16" and args.precision == "fp32":
        problem = "weights in bf16 cannot compute in fp32"
        fail(f"--weights-dtype bf16 --precision fp32: {problem}; use --precision bf16")
    return args


def at_least(minimum):
    """Return an argument type for finite numbers of at least `minimum`, and of its type."""

    def number(text):
        value = type(minimum)(text)
        if not minimum <= value < math.inf:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, not {text}")
        return value

    # argparse prints this name if the text is not a number.
    number.__name__ = type(minimum).__name__
    return number


# ---- the plan --------------------------------------------------------------------------------


def make_plan(args):
    """Return the plans of the chosen setting and of all settings, and the first that fits."""
    config, source = load_config(args)
    try:
        model = model_of(config)
        settings = {}
        for name, changes in candidates(args.chapter).items():
            with contextlib.suppress(UnsupportedModelError):
                settings[name] = plan_of(args, model, name[:2], changes)
        chosen_flags = {name: getattr(args, name) for name in FLAG_DEFAULTS}
        chosen_plan = plan_of(args, model, args.chapter, chosen_flags)
    except UnsupportedModelError as error:
        fail(f"chapter {args.chapter}: {error}")
    except Exception as error:
        # Some models compute with values, and fake tensors have only shapes.
        problem = f"cannot run on fake tensors ({error!r:.200})"
        fail(f"--model-name {args.model_name}: {problem}; measure a training run instead")
    return {
        "model": {"source": source, "weights": model.weights, "layers": len(model.layers)},
        "asked": chosen_plan,
        "settings": settings,
        "first": next((name for name, plan in settings.items() if plan["fits"]), None),
    }


def candidates(chapter):
    """Return the settings to try, and their changes of the flags.

    From chapter 06 on, several ranks share a sample. Chapters 02 and 04 would split the batch into
    different micro-batches, so their settings are left out.
    """
    if chapter < "06":
        return SETTINGS
    return {chapter + name[2:]: SETTINGS[name] for name in SETTINGS if name >= "05"}


def plan_of(args, model, chapter, changes):
    """Return the plan of one setting as a dictionary, with all sizes in bytes."""
    setting = setting_of(args, chapter, changes)
    step = fullest_step(model, setting)
    host, when = host_memory(model, step.model, setting, args.gpus_per_node)
    gpu_total = step.most.total()
    gpu_room, host_room = args.gpu_memory_gib * GIB, args.host_memory_gib * GIB
    gpu_needs = gpu_total * (1 + args.fragmentation) + args.gpu_overhead_gib * GIB
    host_needs = sum(host.values()) + args.gpus_per_node * args.host_overhead_gib * GIB
    if not setting.cuda:
        gpu_room = host_room / args.gpus_per_node
        gpu_needs = gpu_total + args.host_overhead_gib * GIB
        host_needs = gpu_needs * args.gpus_per_node
    return {
        "gpu": {name: step.most[name] for name in PARTS},
        "gpu_when": step.when,
        "gpu_total": gpu_total,
        "gpu_needs": gpu_needs,
        "gpu_margin": gpu_room - gpu_needs,
        "state": step.state,
        "host": host,
        "host_when": when,
        "host_needs": host_needs,
        "host_margin": host_room - host_needs,
        "fits": gpu_room >= gpu_needs and host_room >= host_needs,
        # A checkpoint has the weights and two moments of all ranks, and a step counter per tensor.
        "checkpoint": 3 * setting.weight_bytes * model.weights + 4 * len(model.shapes),
    }


# ---- report ----------------------------------------------------------------------------------


def show(args, plan):
    """Print the plan: the machines, the memory of the chosen setting, and all settings."""
    model, asked = plan["model"], plan["asked"]
    print(f"{args.model_name}: {model['weights']:,} weights in {model['layers']} layers")
    print(f"shape from: {model['source']}")
    gpus = f"{args.nodes} × {args.gpus_per_node} GPUs of {args.gpu_memory_gib:g} GiB"
    print(f"{gpus}, hosts of {args.host_memory_gib:g} GiB")
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
    print(f"\na checkpoint: {asked['checkpoint'] / 1e9:,.4g} GB")
    print(f"\n{'setting':38}{'GPU':>13}{'host':>14}")
    for name, setting in plan["settings"].items():
        sizes = f"{text_of(setting['gpu_needs']):>13}{text_of(setting['host_needs']):>14}"
        print(f"{name:38}{sizes}  {verdict(setting)}")
    nothing = "none; use more nodes, larger GPUs or a smaller --seq-length"
    print(f"\nthe first that fits: {plan['first'] or nothing}")


def show_rows(rows):
    """Print a line for each name and its number of bytes."""
    for name, size in rows.items():
        print(f"  {name:20}{text_of(size):>16}")


def show_line(args, plan):
    """Print in one line whether the chosen setting fits."""
    plan, machines = plan["asked"], f"{args.nodes} × {args.gpus_per_node} GPUs"
    print(
        f"{args.model_name} on {machines} of {args.gpu_memory_gib:g} GiB: {verdict(plan)}; "
        f"a GPU {text_of(plan['gpu_total'])} of tensors, {text_of(plan['gpu_needs'])} with all "
        f"else; a host {text_of(plan['host_needs'])}"
    )


def text_of(size):
    """Return a number of bytes as text: in GiB, or in MiB if it is below 0.1 GiB."""
    if not size:
        return "0"
    if abs(size) < GIB / 10:
        return f"{size / 2**20:,.2f} MiB"
    return f"{size / GIB:,.2f} GiB"


def verdict(plan):
    """Return "fits", or "no" and the names of the memories that are too small."""
    too_small = [name for name in ("gpu", "host") if plan[f"{name}_margin"] < 0]
    return f"no: {', '.join(too_small).replace('gpu', 'GPU')}" if too_small else "fits"


def main():
    """Print the plan; exit with 0 if the chosen setting fits, and with 1 if it does not."""
    args = parse_args()
    # Warnings would hide the error message, which is a single line.
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    plan = make_plan(args)
    if args.json:
        print(json.dumps(plan, indent=1))
    elif args.brief:
        show_line(args, plan)
    else:
        show(args, plan)
    if args.write_config and plan["asked"]["fits"]:
        path = Path(args.write_config[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(args.config_text)
    sys.exit(0 if plan["asked"]["fits"] else 1)


if __name__ == "__main__":
    main()
