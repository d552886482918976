"""Write what DeepSpeed, launchers and Slurm want to read, from the guide's own flags.

Here:  python alternative-frameworks/make_config.py deepspeed --stage 2 --ranks 2
       python alternative-frameworks/make_config.py launch --nodes 2 -- 04-fsdp/train_llm.py
       python alternative-frameworks/make_config.py slurm --nodes 4 -- 04-fsdp/train_llm.py

It prints a file, or writes it with --output. It needs nothing but Python: a login node will do.
"""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SLURM = ROOT / "03-job-launchers/slurm/train.sbatch"


def parse_args(words=None):
    """Return the arguments of the subcommand, checked."""
    formatter = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("-o", "--output", help="the file to write; without it, print it")

    # the guide's flags that a framework reads from a file
    training = argparse.ArgumentParser(add_help=False, parents=[shared])
    add = training.add_argument
    add("--ranks", type=int, default=1, help="how many will train")
    add("--global-batch-size", type=int, default=32, help="samples per optimizer step")
    add("-b", "--batch-size", type=int, default=8, help="most samples per forward pass")
    add("--max-grad-norm", type=float, default=1.0, help="gradients are clipped to it; 0: never")
    add("--precision", choices=["bf16", "fp32"], default="bf16", help="of the forward pass")

    machines = argparse.ArgumentParser(add_help=False, parents=[shared])
    add = machines.add_argument
    add("--nodes", type=int, default=1, help="how many machines")
    add("--gpus-per-node", type=int, default=8, help="and ranks on each")
    add("--cpus-per-node", type=int, default=0, help="cores for them; 0: do not say")
    add("--time-limit", default="24:00:00", help="days-hours:minutes:seconds")
    add("--save-seconds", type=int, default=100, help="what a save may take at the end")
    add("command", nargs="+", metavar="-- SCRIPT [ARGUMENTS]", help="what each rank runs")

    parser = argparse.ArgumentParser(**formatter)
    parser.error = fail
    commands = parser.add_subparsers(dest="write", required=True)
    for write, parent in {deepspeed: training, launch: machines, slurm: machines}.items():
        told = write.__doc__.partition("\n")[0]
        command = commands.add_parser(
            write.__name__, parents=[parent], help=told, description=told, **formatter
        )
        command.error = fail
        command.set_defaults(write=write)
        add_flags = globals().get(f"flags_of_{write.__name__}")
        if add_flags:
            add_flags(command.add_argument)
    args = parser.parse_args(words)
    for name, value in vars(args).items():
        least = 0 if name in ("max_grad_norm", "stage", "cpus_per_node") else 1
        if type(value) in (int, float) and not value >= least:
            fail(f"--{name.replace('_', '-')} {value}: must be at least {least}")
    return args


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def split_batch(args):
    """Return samples per forward pass and passes per step, as the chapters derive them."""
    samples, rest = divmod(args.global_batch_size, args.ranks)
    if rest:
        fail(f"--global-batch-size {args.global_batch_size} does not divide by {args.ranks} ranks")
    micro_batch_size = max(n for n in range(1, args.batch_size + 1) if samples % n == 0)
    return micro_batch_size, samples // micro_batch_size


# ---- frameworks ------------------------------------------------------------------------------
def flags_of_deepspeed(add):
    """Declare what only DeepSpeed has."""
    add("--stage", type=int, choices=range(4), default=2, help="of ZeRO: what is split")
    add("--offload-optimizer", choices=["none", "cpu"], default="none", help="states and step")
    add("--offload-params", choices=["none", "cpu"], default="none", help="weights; stage 3 only")
    add("--recompute", choices=["none", "full"], default="none", help="activations")


def deepspeed(args):
    """Return DeepSpeed's JSON."""
    if args.offload_optimizer != "none" and args.stage == 0:
        fail("--offload-optimizer: stage 0 splits nothing, so it offloads nothing; take 1, 2 or 3")
    if args.offload_params != "none" and args.stage != 3:
        fail(f"--offload-params: stage {args.stage} keeps all weights on each GPU; take 3")
    micro_batch_size, accumulation = split_batch(args)
    zero = {"stage": args.stage}
    if args.offload_optimizer != "none":
        zero["offload_optimizer"] = {"device": args.offload_optimizer}
    if args.offload_params != "none":
        zero["offload_param"] = {"device": args.offload_params}
    config = {
        "train_batch_size": args.global_batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": args.max_grad_norm,
        "bf16": {"enabled": args.precision == "bf16"},
        "zero_optimization": zero,
    }
    return json.dumps(config, indent=2) + "\n"


# ---- launchers -------------------------------------------------------------------------------
def launch(args):
    """Return the commands that start a script on each node, by torchrun."""
    raise NotImplementedError


def slurm(args):
    """Return a job script for sbatch."""
    raise NotImplementedError


def main():
    """Write what the subcommand makes."""
    args = parse_args()
    text = args.write(args)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
