"""Check the nodes of a long run before it starts: print go, or print no-go and what to repair.

Here:      torchrun --standalone --nproc-per-node 2 diagnosing-errors/preflight.py
For real:  srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 \
               python diagnosing-errors/preflight.py --save-dir outputs --checkpoint-gb 40

Start this script with the launcher of your run, because the script tests the launcher, too. Under
srun and mpirun, rank 0 names the ranks that do not connect. torchrun starts no rank before all of
its nodes have joined, and reports a missing node itself.

The exit status is 0 for go, with or without warnings, 1 for no-go, and 2 for wrong arguments or
wrong environment variables. torchrun turns every status other than 0 into 1.

The check takes less than a minute, and finds a node that differs from the other nodes. It does not
replace `dcgmi diag -r 3`, which tests a GPU's memory and power under load. Nor does it replace
nccl-tests, which measures each collective at each size and checks the results.
"""

import argparse
import importlib.metadata
import math
import os
import platform
import re
import shutil
import socket
import statistics
import sys
import time
from collections import defaultdict, namedtuple
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from operator import ne
from pathlib import Path

# Turn off torch's own error log, because its pages of C++ frames would hide this script's message.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# Let torch raise an exception when NCCL times out; by default, torch aborts the process.
os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")

import torch
import torch.distributed as dist
from torch.utils.benchmark import Timer

# Each row has a launcher's variables for the rank, the world size and the local rank.
LAUNCHERS = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun, deepspeed
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")],  # Open MPI
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],  # srun
]
NO_GO, WARNING = "no-go", "warning"
# Map each program to the level of the finding if ranks have different versions of the program.
VERSIONS = {"python": WARNING, "torch": NO_GO, "transformers": NO_GO, "datasets": WARNING}
# A device or link is slow if its rate is less than this fraction of the median rate. For CPUs, the
# fraction is smaller, because other programs use part of a CPU's time.
SLOW_DEVICE = {"cuda": 0.85, "cpu": 0.5}
SLOW_LINK = {"cuda": 0.5, "cpu": 0.25}
# A rank measures its links to at most MAX_PARTNERS other ranks in its node, and to at most
# MAX_PARTNERS ranks in other nodes.
MAX_PARTNERS = 4
SHARED = "shared"

Check = namedtuple("Check", "name level is_bad advice value_format", defaults=["{}"])
Finding = namedtuple("Finding", "check ranks value usual")


# ---- command line and launcher ---------------------------------------------------------------


def parse_args():
    """Return the arguments; exit with status 2 if an argument or environment variable is wrong."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter, allow_abbrev=False)
    parser.error = partial(fail, status=2)
    add = parser.add_argument
    add("--save-dir", default="outputs", help="folder where the run will write its checkpoints")
    add("--checkpoint-gb", type=float, default=0.0, help="size of a checkpoint, in 10^9 bytes")
    add("--network-gbs", type=float, default=0.0, help="expected GB/s between nodes; 0: unknown")
    # A node with a GPU driver but no working GPU is faulty, so do not treat it as a CPU node. But
    # its GPUs may also be hidden on purpose: Slurm sets CUDA_VISIBLE_DEVICES to NoDevFiles for a
    # job that has not requested GPUs.
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles")
    has_gpu = torch.cuda.is_available() or (os.path.exists("/dev/nvidiactl") and not hidden)
    device = "cuda" if has_gpu else "cpu"
    add("--device", choices=["cpu", "cuda"], default=device, help="kind of device to test")
    add("--timeout", type=int, default=60, help="maximum seconds to wait for other ranks")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no working GPU found; repair the driver, or pass --device cpu")
    check_variables()
    return args


def check_variables():
    """Exit with status 2 if a launcher's variable is missing, left over, or wrong on this node.

    Also check the variables that choose a network interface, and WANDB_PROJECT.
    """
    names = [*LAUNCHERS[0], "MASTER_ADDR", "MASTER_PORT"]
    values = {name: os.environ.get(name, "") for name in names}
    if missing := [name for name in names if not values[name]]:
        advice = "start preflight.py with a launcher, such as torchrun, srun or mpirun"
        if not set(missing) & set(LAUNCHERS[0]):
            advice = "pass MASTER_ADDR and MASTER_PORT with -x (Open MPI) or -genv (MPICH)"
        fail(f"{', '.join(missing)}: not set; {advice}", status=2)
    address = values.pop("MASTER_ADDR")
    for name, value in values.items():
        if not value.isdecimal():
            fail(f"{name} {value}: not a number; unset it, or set it to a number", status=2)
    try:
        socket.getaddrinfo(address, None)
    except OSError as error:
        problem = f"MASTER_ADDR {address}: {error.strerror}"
        fail(f"{problem}; set it to the name or the address of the node of rank 0", status=2)

    # Check that the world size is large enough, because a shell may pass the variables of an
    # earlier launcher on to every rank. Every rank would then act as the same rank of a smaller
    # run. Skip this check under torchrun, because torchrun always sets the variables itself.
    sizes = [os.environ[size] for _, size, _ in LAUNCHERS if size in os.environ]
    num_ranks = max(int(values["RANK"]) + 1, *map(int, sizes))
    if num_ranks > int(values["WORLD_SIZE"]) and "TORCHELASTIC_RUN_ID" not in os.environ:
        problem = f"WORLD_SIZE {values['WORLD_SIZE']}: there are at least {num_ranks} ranks"
        fail(f"{problem}; unset the variables {', '.join(LAUNCHERS[0])} of your shell", status=2)

    interfaces = [name for _, name in socket.if_nameindex()]
    for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        value = os.environ.get(variable, "")
        # The value `eth` selects all interfaces whose names begin with eth. For NCCL, `=eth0`
        # selects only eth0, and `^eth` selects all interfaces except those that begin with eth.
        prefixes = tuple(value.removeprefix("=").split(","))
        if value and value[0] != "^" and not any(name.startswith(prefixes) for name in interfaces):
            problem = f"{variable} {value}: this node has only {', '.join(interfaces)}"
            fail(f"{problem}; choose the interface that leads to the other nodes", status=2)
    if "/" in (project := os.environ.get("WANDB_PROJECT", "")):
        fail(f"WANDB_PROJECT {project}: has a slash; set WANDB_ENTITY to its first part", status=2)


def adopt_launcher():
    """Translate the launcher's variables into the variables that torchrun would set."""
    for names in LAUNCHERS:
        if all(os.environ.get(name) for name in names):
            values = [os.environ[name] for name in names]
            os.environ |= zip(LAUNCHERS[0], values, strict=True)
            break
    if "SLURM_STEP_NODELIST" in os.environ:
        # Rank 0 runs on the first node in Slurm's list: on gpu03 if the list is gpu[03-07,12].
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        # Derive the port from the job id and the step id, so that two steps on the same node rarely
        # use the same port.
        step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(10_000 + step % 20_000))


def fail(message, status=1):
    """Print an error of this rank in one line on stderr, and exit with `status`."""
    rank = os.environ.get("RANK") or "0"
    if rank != "0":
        # Let rank 0 report its error first. If the launcher then ends this rank, the same error is
        # not printed again.
        time.sleep(3)
    sender = f"rank {rank} on {socket.gethostname()}"
    print(f"{Path(__file__).name}: error: {sender}: {message}", file=sys.stderr, flush=True)
    exit_now(status)


def exit_now(status):
    """Exit with `status`, but skip clean-up, because Gloo's threads may abort during clean-up."""
    sys.stdout.flush()
    os._exit(status)


# ---- connecting to the other ranks -----------------------------------------------------------


def connect(args, rank):
    """Connect to the store at MASTER_ADDR:MASTER_PORT, and return the store.

    Save this rank's host name in the store. If the connection fails, print the reason, and exit.
    """
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun already runs a store at MASTER_ADDR. Under other launchers, rank 0 starts a store.
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options = {"is_master": is_server, "timeout": timedelta(seconds=args.timeout)}
    try:
        store = dist.TCPStore(address, port, wait_for_workers=False, **options)
        store.set(f"host/{rank}", socket.gethostname())
        return store
    except RuntimeError as error:
        reason = last_line(error)
        # Connect again with a plain socket, because the socket's error names the reason, while
        # torch reports only a timeout.
        try:
            socket.create_connection((address, port), timeout=5).close()
        except OSError as socket_error:
            reason = socket_error
        advice = "set MASTER_ADDR to the node of rank 0, and MASTER_PORT to a free, open port"
        fail(f"cannot connect to {address}:{port}: {reason}; {advice}")


def report_failure(args, rank, world_size, store, error):
    """Report why this rank cannot work with the other ranks, and exit.

    If rank 0 has timed out, it names the ranks that did not connect in time.
    """
    problem = f"{type(error).__name__}: {last_line(error)}"
    if rank == 0 and re.search("(?i)time.?out|timed out", str(error)):
        missing = [number for number in range(world_size) if not store.check([f"host/{number}"])]
        if missing:
            address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
            problem = f"these ranks did not connect to {address} within {args.timeout} s: "
            problem += f"{join_names(missing)}; read their errors, and check their nodes"
    fail(problem)


def last_line(error):
    """Return the last line of an error's message, where NCCL gives the reason for the error.

    Drop a prefix in brackets, such as `[device.cc:84]`, from this line. If the message is empty,
    return the name of the error's class.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^]]*\] ", "", lines[-1])


def gather(value):
    """Collect one value from each rank, and return the list of all values on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- facts that each rank can read -----------------------------------------------------------


def read_facts(args, rank):
    """Return a dictionary with this rank's number, host, kind of device and software versions.

    If the device is a GPU, select it, and add its model and the GiB of its memory that are in use.
    """
    facts = {"rank": rank, "host": socket.gethostname(), "device": args.device}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "datasets"):
        facts[package] = "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    if args.device == "cuda":
        torch.cuda.set_device(choose_gpu())
        free, total = torch.cuda.mem_get_info()
        facts["GPU"] = torch.cuda.get_device_name()
        facts["GPU memory in use"] = (total - free) / 2**30
    return facts


def choose_gpu():
    """Return the index of this rank's GPU among the GPUs that torch sees; exit if it has no GPU."""
    num_gpus = torch.cuda.device_count()
    # If this task sees only one GPU, as under srun --gpus-per-task=1, the index of the GPU is 0.
    index = int(os.environ["LOCAL_RANK"]) if num_gpus > 1 else 0
    if index >= num_gpus:
        fail(f"local rank {index} has no GPU (torch sees {num_gpus}); start fewer ranks per node")
    return index


def check_save_dir(args, rank):
    """Check that all ranks share --save-dir and can write to it.

    Return this rank's result and the free space in GB, by the name of the check. The free space is
    None if this rank cannot write.
    """
    folder = Path(args.save_dir).resolve()
    probes = [folder / f".preflight-{number}" for number in gather(f"{rank}-{time.time_ns()}")]
    state, free = SHARED, None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probes[rank].write_text("x" * 4096)
        free = shutil.disk_usage(folder).free / 1e9
    except OSError as error:
        state = f"cannot write: {error.strerror}"
    dist.barrier()
    # Wait for the file that rank 0 has written, because a network file system may show a new file
    # only after several seconds.
    deadline = time.monotonic() + 10
    while state == SHARED and not probes[0].exists():
        time.sleep(0.1)
        if time.monotonic() > deadline:
            state = "not shared: the file that rank 0 wrote is not there"
    dist.barrier()
    with suppress(OSError):
        probes[rank].unlink()
    return {"--save-dir": state, "disk free": free}


# ---- measurements ----------------------------------------------------------------------------


def measure(args, rank, hosts):
    """Measure the TFLOP/s of this rank's device, and the GB/s of its links to other ranks.

    `hosts` holds the name of each rank's host. Return a dictionary from the name of each check to
    the rate that it judges. A link's rate is None if this rank has no such link.
    """
    device, group = torch.device(args.device), None
    if args.device == "cuda":
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=args.timeout))
    # First run a collective on all ranks. If an exchange were the first call in a group of NCCL,
    # all ranks of the group would have to take part in it, but the exchanges below have only two
    # ranks.
    dist.all_reduce(torch.zeros(1, device=device), group=group)
    rates = {"matmul": matmul_rate(device)}
    for name, rings in rings_of(hosts).items():
        rates[name] = link_rate(rank, rings, device, group)
    return rates


def matmul_rate(device):
    """Return the TFLOP/s of multiplying n × n matrices; each product needs 2 n³ operations."""
    is_gpu = device.type == "cuda"
    # Use float16 on a GPU, because older GPUs are slow in bfloat16.
    n, dtype = (8192, torch.float16) if is_gpu else (512, torch.float32)
    matrices = {name: torch.randn(n, n, device=device).to(dtype) for name in ("left", "right")}
    timer = Timer("left @ right", globals=matrices, num_threads=torch.get_num_threads())
    dist.barrier()
    times = [timer.timeit(20).mean for _ in range(30)]
    # For a GPU, use the median time, because a GPU is fastest before it gets hot. For a CPU, use
    # the shortest time, because other programs disturb the shortest measurement least.
    seconds = statistics.median(times) if is_gpu else min(times)
    return 2 * n**3 / seconds / 1e12


def rings_of(hosts):
    """Divide the ranks into rings that exchange data: a ring in each node, and rings between nodes.

    Return the two lists of rings by the name of their check. A ring between nodes joins the ranks
    that have the same position in their nodes. If all nodes are identical, each rank of such a ring
    shares its network card with the same number of other ranks, so the rates in the ring are
    comparable.
    """
    ranks_by_host = defaultdict(list)
    for rank, host in enumerate(hosts):
        ranks_by_host[host].append(rank)
    within = list(ranks_by_host.values())
    # A node with fewer ranks than other nodes has no rank in the last rings, so drop the None that
    # zip_longest() puts there instead.
    between = [[rank for rank in ring if rank is not None] for ring in zip_longest(*within)]
    return {"link within a node": within, "link between nodes": between}


def link_rate(rank, rings, device, group):
    """Return the rate in GB/s of this rank's fastest exchange with a partner.

    The exchanges run in rounds. In each round, two ranks are partners if their positions in the
    ring add up to the round's `total`, modulo the length of the ring. Only the fastest exchange
    counts, so a partner with a slow link does not make this rank look slow. Return None for a rank
    that never has a partner.
    """
    [ring] = [ring for ring in rings if rank in ring]
    position = ring.index(rank)
    longest = max(len(ring) for ring in rings)
    data = torch.zeros(2, 2**24 if device.type == "cuda" else 2**19, device=device)
    times = []
    for total in range(1, longest + 1, math.ceil(longest / MAX_PARTNERS)):
        partner = ring[(total - position) % len(ring)]
        dist.barrier()
        if partner != rank:
            times.append(exchange_seconds(data, partner, group))
    return data[0].nbytes / min(times) / 1e9 if times else None


def exchange_seconds(data, partner, group):
    """Return the mean seconds that an exchange of data with a partner takes.

    This rank sends row 0 of `data`, and receives the partner's row 0 into its own row 1.
    """

    def exchange():
        send = dist.P2POp(dist.isend, data[0], partner, group)
        receive = dist.P2POp(dist.irecv, data[1], partner, group)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()

    return Timer("exchange()", globals={"exchange": exchange}).timeit(6).mean


# ---- comparison: pure functions of the reports of all ranks ----------------------------------


def below(fraction, minimum=0):
    """Return a function that tests whether a value is too low, compared with the usual value.

    A value is too low if it is below `fraction` times the larger of the usual value and `minimum`.
    """
    return lambda value, usual: value < fraction * max(usual, minimum)


def checks(args):
    """Return a list of all checks.

    Some checks compare a rank's value with the usual value of all ranks; the other checks need only
    the rank's value.
    """
    checkpoints_gb = 3 * args.checkpoint_gb
    slow_device, slow_link = SLOW_DEVICE[args.device], SLOW_LINK[args.device]
    versions = "install the same version on all nodes, or let them share an environment"
    slow = "the device may be hot, throttled or shared; run top and nvidia-smi on its node, "
    slow += "then dcgmi diag -r 3"
    link = "check speed and errors with ethtool, ip -s link and ibstat; then run nccl-tests"
    return [
        *(Check(name, level, ne, versions) for name, level in VERSIONS.items()),
        Check("device", NO_GO, ne, "run nvidia-smi on the nodes without a GPU"),
        Check("GPU", NO_GO, ne, "use nodes with the same model of GPU"),
        # Allow 2 GiB, because this process itself uses about half a GiB for its CUDA context.
        Check("GPU memory in use", NO_GO, lambda value, _: value > 2,
              "find the process with nvidia-smi or fuser -v /dev/nvidia*, end it", "{:.1f} GiB"),
        Check("clock", WARNING, lambda value, _: abs(value) > 1,
              "start chronyd or ntpd on this node, and check with timedatectl", "{:+.1f} s"),
        Check("--save-dir", NO_GO, lambda value, _: value != SHARED,
              "choose a folder that all nodes share and can write to"),
        Check("disk free", NO_GO, lambda value, _: value < checkpoints_gb,
              f"needs {checkpoints_gb:g} GB for three checkpoints at a time", "{:.1f} GB"),
        Check("matmul", NO_GO, below(slow_device), slow, "{:.3g} TFLOP/s"),
        Check("link within a node", NO_GO, below(slow_link), link, "{:.3g} GB/s"),
        Check("link between nodes", NO_GO, below(slow_link, args.network_gbs),
              link, "{:.3g} GB/s"),
    ]  # fmt: skip


def compare(args, reports):
    """Return a dictionary from each check's name to its usual value, and a list of findings.

    For a value that is not measured, the ranks with the same bad value share a finding. But two
    measured values are hardly ever equal, so for a measured value, the ranks that have a bad value
    and are on the same node share a finding.
    """
    usual_values, findings = {}, []
    for check in checks(args):
        name, as_text = check.name, check.value_format.format
        known = [report for report in reports if report.get(name) is not None]
        if not known:
            continue
        values = [report[name] for report in known]
        is_measured = isinstance(values[0], float)
        usual = statistics.median_high(values) if is_measured else statistics.mode(values)
        usual_values[name] = as_text(usual)
        groups = defaultdict(list)
        for report in known:
            if check.is_bad(report[name], usual):
                groups[report["host" if is_measured else name]].append(report)
        for group in groups.values():
            value = as_text(min(report[name] for report in group))
            findings.append(Finding(check, describe(group), value, as_text(usual)))
    return usual_values, findings


def describe(reports):
    """Return the ranks and the hosts of `reports` as a phrase, such as "ranks 0, 1 on h1"."""
    hosts = dict.fromkeys(report["host"] for report in reports)
    ranks = join_names([report["rank"] for report in reports])
    return f"rank{'s' * (len(reports) > 1)} {ranks} on {join_names(list(hosts))}"


def join_names(names, limit=8):
    """Join up to `limit` names with commas, and append the number of names that are left out."""
    text = ", ".join(map(str, names[:limit]))
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


# ---- report and main -------------------------------------------------------------------------


def print_finding(finding):
    """Print a finding's problem and affected ranks on one line, and the advice on the next line."""
    check = finding.check
    usual = f" (usual: {finding.usual})" if finding.usual != finding.value else ""
    print(f"{check.level:8} {check.name}: {finding.ranks}: {finding.value}{usual}")
    print(f"{'':8} {check.advice}")


def print_report(reports, usual_values, findings, verdict):
    """Print the usual value of each check, up to 20 findings, and the verdict."""
    width = max(map(len, usual_values))
    for name, usual in usual_values.items():
        print(f"{name:{width}}  {usual}")
    # Sort the findings, so that the no-go findings come before the warnings.
    findings = sorted(findings, key=lambda finding: finding.check.level != NO_GO)
    for finding in findings[:20]:
        print_finding(finding)
    num_nodes = len({report["host"] for report in reports})
    size = f"world size {len(reports)} on {num_nodes} node{'s' * (num_nodes > 1)}"
    failed_checks = dict.fromkeys(finding.check.name for finding in findings)
    print(f"{verdict}: {size}", *failed_checks, sep="; ")


def examine(args, rank, facts):
    """Test this rank, and return a list with the facts and the measurements of each rank."""
    all_facts = gather(facts)
    report = facts | check_save_dir(args, rank)
    dist.barrier()
    clock = time.time()
    report["clock"] = clock - statistics.median_low(gather(clock))
    # Measure speeds only if all ranks have the same kind of device, because NCCL would wait for
    # ranks without a GPU until the timeout.
    if len({rank_facts["device"] for rank_facts in all_facts}) == 1:
        report |= measure(args, rank, [rank_facts["host"] for rank_facts in all_facts])
    return gather(report)


def main():
    """Connect all ranks, examine them, and compare the results; rank 0 prints the report."""
    adopt_launcher()
    args = parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Read the facts first, because the measurements in examine() allocate GPU memory, which would
    # then count as GPU memory in use.
    facts = read_facts(args, rank)
    store = connect(args, rank)
    group = {"store": dist.PrefixStore("preflight", store), "rank": rank, "world_size": world_size}
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout), **group)
        reports = examine(args, rank, facts)
        usual_values, findings = compare(args, reports)
        is_bad = any(finding.check.level == NO_GO for finding in findings)
        if rank == 0:
            print_report(reports, usual_values, findings, NO_GO if is_bad else "go")
        # Wait until all ranks are done, because rank 0 may run the store that they all use.
        dist.barrier()
    except (RuntimeError, OSError) as error:
        report_failure(args, rank, world_size, store, error)
    exit_now(1 if is_bad else 0)


if __name__ == "__main__":
    main()
