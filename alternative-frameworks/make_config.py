"""Write a framework's file, launch commands or a job script for Slurm, from the guide's own flags.

Here:  python alternative-frameworks/make_config.py deepspeed --stage 2 --ranks 2
       python alternative-frameworks/make_config.py accelerate --strategy fsdp2 --ranks 2
       python alternative-frameworks/make_config.py launch --nodes 2 -- 04-fsdp/train_llm.py
       python alternative-frameworks/make_config.py slurm --nodes 4 -- 04-fsdp/train_llm.py

It prints the text, or writes it to the file after --output. It needs nothing but Python, so it runs
on a login node.
"""

import argparse
import json
import os
import re
import shlex
import sys
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).absolute().parents[1]
SLURM = ROOT / "03-job-launchers/slurm/train.sbatch"


def parse_args(words=None):
    """Parse and check the arguments of the subcommand."""
    formatter = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    shared = argparse.ArgumentParser(add_help=False)
    shared.add_argument("-o", "--output", help="file to write; without it, print the text")

    # The chapters have these flags, too. DeepSpeed reads their values from a file.
    training = argparse.ArgumentParser(add_help=False, parents=[shared])
    add = training.add_argument
    add("--ranks", type=int, default=1, help="number of ranks")
    add("--global-batch-size", type=int, default=32, help="samples per optimizer step")
    add("-b", "--batch-size", type=int, default=8, help="maximum samples per forward pass")
    add("--max-grad-norm", type=float, default=1.0, help="maximum gradient norm; 0: no limit")
    add("--precision", choices=["bf16", "fp32"], default="bf16", help="precision in forward passes")

    machines = argparse.ArgumentParser(add_help=False, parents=[shared])
    add = machines.add_argument
    add("--nodes", type=int, default=1, help="number of nodes")
    add("--gpus-per-node", type=int, default=8, help="GPUs per node, with one rank per GPU")
    add("--cpus-per-node", type=int, default=0, help="CPU cores for a node's ranks; 0: not set")
    add("--time-limit", help="time limit of the job, as [days-]hours:minutes:seconds")
    add("--save-seconds", type=int, default=100, help="seconds of the limit for the final save")
    add("run", nargs="+", metavar="SCRIPT", help="after --: the script and its arguments")

    parser = argparse.ArgumentParser(**formatter)
    parser.error = fail
    commands = parser.add_subparsers(dest="write", required=True)
    parents = {deepspeed: training, accelerate: shared, launch: machines, slurm: machines}
    for write, parent in parents.items():
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
    """Report a user error in one line on stderr, and exit with status 2."""
    print(f"{Path(__file__).name}: error: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


def split_batch(args):
    """Return the samples per forward pass and the passes per step, as the chapters derive them."""
    samples, rest = divmod(args.global_batch_size, args.ranks)
    if rest:
        fail(f"--global-batch-size {args.global_batch_size} does not divide by {args.ranks} ranks")
    micro_batch_size = max(n for n in range(1, args.batch_size + 1) if samples % n == 0)
    return micro_batch_size, samples // micro_batch_size


# ---- frameworks ------------------------------------------------------------------------------
def flags_of_deepspeed(add):
    """Declare the flags that only DeepSpeed has."""
    add("--stage", type=int, choices=range(4), default=2, help="ZeRO stage; 3 shards the weights")
    add("--weights", choices=["fp32", "bf16"], default="fp32", help="precision of the weights")
    add("--offload-optimizer", choices=["none", "cpu"], default="none", help="cpu: run AdamW there")
    add("--offload-params", choices=["none", "cpu"], default="none", help="cpu: only with stage 3")
    add("--recompute", choices=["none", "full"], default="none", help="recompute activations")


def deepspeed(args):
    """Write a configuration file for DeepSpeed, in JSON."""
    if args.stage == 0:
        fail("--stage 0: that is DDP, where DeepSpeed has no gradient norm; take 1, or 02-ddp")
    if args.offload_params == "cpu" and args.stage != 3:
        fail(f"--offload-params cpu: stage {args.stage} leaves all weights on each GPU; take 3")
    if args.weights == "bf16" and args.precision != "bf16":
        fail("--weights bf16: the forward pass would be in bf16 too; add --precision bf16")
    micro_batch_size, accumulation = split_batch(args)
    config = {
        "train_batch_size": args.global_batch_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": args.max_grad_norm,
        "zero_optimization": {"stage": args.stage},
    }
    if args.weights == "bf16":
        # In addition, DeepSpeed's optimizer keeps fp32 weights.
        config["bf16"] = {"enabled": True}
        # Sum gradients in fp32, but not in stage 1, which would then write checkpoints that
        # zero_to_fp32 cannot read.
        if args.stage > 1:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    elif args.precision == "bf16":
        # With DeepSpeed's default list of modules, gradients of linear layers would be summed in
        # bf16, so pass an empty list.
        autocast = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        config["torch_autocast"] = autocast
    if args.offload_optimizer == "cpu":
        config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        # Allow torch's AdamW, because DeepSpeed would have to compile its own Adam for CPUs.
        config["zero_force_ds_cpu_optimizer"] = False
    if args.offload_params == "cpu":
        config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    if args.recompute == "full":
        config["activation_checkpointing"] = {"partition_activations": False}
    return json.dumps(config, indent=2) + "\n"


def flags_of_accelerate(add):
    """Declare the flags for Accelerate's file; all other settings stay flags of the script."""
    add("--strategy", choices=["ddp", "fsdp2"], default="fsdp2", help="fsdp2 shards the model")
    add("--ranks", type=int, default=1, help="number of ranks on all nodes together")
    add("--nodes", type=int, default=1, help="number of nodes")
    add("--precision", choices=["bf16", "fp32"], default="bf16", help="precision in forward passes")
    reshard = {"action": argparse.BooleanOptionalAction, "default": True}
    add("--reshard-after-forward", **reshard, help="free gathered weights early")
    add("--offload-params", choices=["none", "cpu"], default="none", help="cpu: run AdamW there")
    add("--recompute", choices=["none", "full"], default="none", help="recompute activations")


def accelerate(args):
    """Write a configuration file for Accelerate, in YAML."""
    if args.ranks % args.nodes:
        fail(f"--ranks {args.ranks} do not divide by {args.nodes} nodes")
    config = {"compute_environment": "LOCAL_MACHINE"}
    # Use MULTI_GPU on CPUs, too, because MULTI_CPU would start only one process.
    config["distributed_type"] = "FSDP" if args.strategy == "fsdp2" else "MULTI_GPU"
    config["mixed_precision"] = "bf16" if args.precision == "bf16" else "no"
    config |= {"num_machines": args.nodes, "num_processes": args.ranks, "rdzv_backend": "c10d"}
    lines = [f"{name}: {json.dumps(value)}" for name, value in config.items()]
    if args.strategy == "fsdp2":
        settings = {
            "version": 2,
            "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
            "reshard_after_forward": args.reshard_after_forward,
            "offload_params": args.offload_params == "cpu",
            "activation_checkpointing": args.recompute == "full",
            "state_dict_type": "SHARDED_STATE_DICT",
            "cpu_ram_efficient_loading": False,
        }
        lines += ["fsdp_config:"]
        lines += [f"  fsdp_{name}: {json.dumps(value)}" for name, value in settings.items()]
    elif (
        args.offload_params != "none" or args.recompute != "none" or not args.reshard_after_forward
    ):
        fail("--offload-params, --recompute and --no-reshard-after-forward are for fsdp2 alone")
    return "\n".join(lines) + "\n"


# ---- launchers -------------------------------------------------------------------------------
def seconds_of(args):
    """Return --time-limit in seconds; refuse 48:00, which Slurm would read as 48 minutes."""
    found = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", args.time_limit)
    if not found:
        fail(f"--time-limit {args.time_limit}: write hours:minutes:seconds, such as 48:00:00")
    days, hours, minutes, seconds = (int(number or 0) for number in found.groups())
    limit = ((days * 24 + hours) * 60 + minutes) * 60 + seconds
    if limit <= args.save_seconds + 20:
        fail(f"--time-limit {args.time_limit}: --save-seconds {args.save_seconds} leaves no time")
    return limit


def checked(args):
    """Return the command that each rank runs, quoted for bash; fail if there is no such script."""
    if not Path(args.run[0]).is_file():
        fail(f"{args.run[0]}: there is no such script; write -- SCRIPT ARGUMENTS at the end")
    return shlex.join(args.run)


def flags_of_launch(add):
    """Declare the flags that only launch commands need."""
    add("--hosts", nargs="+", metavar="NAME", help="names of the nodes; the first has rank 0")
    add("--port", type=int, default=29400, help="port of rank 0's node, where all nodes meet")
    launchers = ["torchrun", "deepspeed", "accelerate"]
    add("--launcher", choices=launchers, default="torchrun", help="program that starts the ranks")


def launch(args):
    """Write the commands that start a script on one or more nodes."""
    run, gpus = checked(args), args.gpus_per_node
    names = [f"node{number + 1}" for number in range(args.nodes)]
    hosts = args.hosts or (names if args.nodes > 1 else ["localhost"])
    if args.nodes not in (1, len(hosts)):
        fail(f"--nodes {args.nodes}, but --hosts has {len(hosts)}")
    before = []
    if args.cpus_per_node:
        before += [f"OMP_NUM_THREADS={max(1, args.cpus_per_node // gpus)}"]
    if args.launcher == "deepspeed":
        if args.time_limit:
            fail("--time-limit: DeepSpeed's launcher kills ranks whose save takes over 30 s")
        slots = shlex.join(f"{host} slots={gpus}" for host in hosts)
        script = os.path.relpath(ROOT / "03-job-launchers/deepspeed/launch.sh")
        command = " ".join([*before, f"MASTER_PORT={args.port}", script, "slots.txt", run])
        return f"# on {hosts[0]}\nprintf '%s\\n' {slots} >slots.txt\n{command}\n"
    # Give the ranks a store of their own. If they share torchrun's store, a restart may fail.
    before += ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]
    # Both launchers pass SIGTERM on to the ranks, which then save and stop.
    if args.time_limit:
        before += [f"TORCH_ELASTIC_SHUTDOWN_TIMEOUT={args.save_seconds}"]
        before += [f"timeout --signal=TERM {seconds_of(args) - args.save_seconds - 20}"]
    if args.launcher == "torchrun":
        meet = f"--nnodes {len(hosts)} --rdzv-backend c10d --rdzv-endpoint {hosts[0]}:{args.port}"
        command = ["torchrun", meet if len(hosts) > 1 else "--standalone"]
        command += [f"--nproc-per-node {gpus} --max-restarts 3", run]
        return f"# on {', '.join(hosts)}\n{' '.join([*before, *command])}\n"
    text, ranks = "", len(hosts) * gpus
    if ranks == 1:
        fail("--launcher accelerate: it would tell a single rank nothing; take torchrun")
    # Accelerate passes a precision to the ranks in any case, so give it the script's precision.
    precision = "no" if ("--precision", "fp32") in pairwise(args.run) else "bf16"
    for number, host in enumerate(hosts):
        command = [f"accelerate launch --multi_gpu --num_processes {ranks}"]
        command += [f"--mixed_precision {precision}"]
        if len(hosts) > 1:
            command += [f"--num_machines {len(hosts)} --machine_rank {number}"]
            command += [f"--main_process_ip {hosts[0]} --main_process_port {args.port}"]
        text += f"# on {host}\n{' '.join([*before, *command, run])}\n"
    return text


def flags_of_slurm(add):
    """Declare the flags that only Slurm needs."""
    add("--account", help="account that pays for the job")
    add("--partition", help="partition that has the nodes")
    add("--qos", help="quality of service, which sets the limits")


def slurm(args):
    """Write a job script that sets the options of sbatch and runs train.sbatch."""
    args.time_limit = args.time_limit or "24:00:00"
    seconds_of(args)
    run, job = checked(args), os.path.relpath(SLURM)
    options = {"nodes": args.nodes, "gpus-per-node": args.gpus_per_node}
    options |= {"cpus-per-task": args.cpus_per_node, "time": args.time_limit}
    options |= {name: getattr(args, name) for name in ("account", "partition", "qos")}
    lines = [f"#SBATCH --{name}={value}" for name, value in options.items() if value]
    # sbatch reads only the options in the job script, so copy the options of train.sbatch to it.
    lines += re.findall(r"^#SBATCH .*", SLURM.read_text(), re.M)
    lines = [
        re.sub(r"(--signal=\S+@)\d+", rf"\g<1>{args.save_seconds + 20}", line) for line in lines
    ]
    return f"""\
#!/usr/bin/env bash
# Submit it with sbatch from the folder in which make_config.py was called.
{chr(10).join(lines)}
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT={args.save_seconds}
exec bash {job} \\
    {run}
"""


def main():
    """Print the text of the subcommand, or write it to a file."""
    args = parse_args()
    text = args.write(args)
    if args.output:
        Path(args.output).parent.mkdir(parents=True, exist_ok=True)
        Path(args.output).write_text(text)
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
