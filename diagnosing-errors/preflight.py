"""Check the nodes of a long run before it starts: print go, or no-go and what to repair.

Here:      torchrun --standalone --nproc-per-node 2 diagnosing-errors/preflight.py
For real:  srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 \
               python diagnosing-errors/preflight.py --save-dir outputs --checkpoint-gb 40

Start it with the launcher of the run, because it tests the launcher too. Under srun and mpirun,
rank 0 names the ranks that do not connect. torchrun starts no rank before all of its nodes have
joined, and reports a missing node itself.

The exit status is 0 for go, with or without warnings, 1 for no-go, and 2 for wrong arguments.
torchrun turns every status other than 0 into 1.

The check takes less than a minute, and finds the node that differs from the others. It does not
replace `dcgmi diag -r 3`, which tests a GPU's memory and power under load, or nccl-tests, which
measures each collective at each size and checks the results.
"""

import argparse
import importlib.metadata
import math
import os
import platform
import re
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import time
from collections import Counter, defaultdict, namedtuple
from contextlib import suppress
from datetime import timedelta
from functools import partial
from itertools import zip_longest
from pathlib import Path

# Turn off torch's own error log, because pages of C++ frames would hide this script's message.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")
# Let torch raise an exception when NCCL times out; by default, torch aborts the process.
os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")

import torch
import torch.distributed as dist

# Under each launcher, these variables hold the rank, the world size and the local rank.
LAUNCHERS = [
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun, deepspeed
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")],  # Open MPI
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # MPICH
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],  # srun
]
NO_GO, WARNING = "no-go", "warning"
# A device or link is slow if its rate is less than this fraction of the median rate. CPUs get a
# lower limit, because other programs use part of a CPU's time.
SLOW_DEVICE = {"cuda": 0.85, "cpu": 0.5}
SLOW_LINK = {"cuda": 0.5, "cpu": 0.25}
# Each rank measures its links to at most this number of partners.
MAX_PARTNERS = 4
SHARED = "shared"
# Map each name in the report to the field of nvidia-smi that holds its value.
NVIDIA_SMI = {
    "GPU": "name",
    "driver": "driver_version",
    "GPU memory in use": "memory.used",  # in MiB
    "GPU ECC errors": "ecc.errors.uncorrected.volatile.total",
    "GPU hardware slowdown": "clocks_throttle_reasons.hw_slowdown",
    "GPU thermal slowdown": "clocks_throttle_reasons.sw_thermal_slowdown",
}

Check = namedtuple("Check", "name level is_bad advice value_format", defaults=["{}"])
Finding = namedtuple("Finding", "level check ranks value usual advice")


# ---- command line and launcher ---------------------------------------------------------------


def parse_args(argv=None):
    """Parse and check the command line and the launcher's variables."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter, allow_abbrev=False)
    parser.error = fail
    add = parser.add_argument
    add("--save-dir", default="outputs", help="folder where the run will write its checkpoints")
    add("--checkpoint-gb", type=float, default=0.0, help="size of a checkpoint, in 10^9 bytes")
    add("--network-gbs", type=float, default=0.0, help="expected GB/s between nodes; 0: unknown")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if present")
    add("--timeout", type=int, default=60, help="maximum seconds to wait for other ranks")
    args = parser.parse_args(argv)
    for name, minimum in {"checkpoint_gb": 0, "network_gbs": 0, "timeout": 1}.items():
        value = getattr(args, name)
        # NaN fails every comparison, so this negated form rejects NaN too.
        if not minimum <= value < math.inf:
            fail(f"--{name.replace('_', '-')} {value}: must be at least {minimum}")
    if args.device == "auto":
        # A node with a GPU driver but no working GPU is faulty, so do not treat it as a CPU node.
        has_gpu = os.path.exists("/dev/nvidiactl") or torch.cuda.is_available()
        args.device = "cuda" if has_gpu else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        problem = f"torch {torch.__version__} finds no working GPU on {socket.gethostname()}"
        fail(f"--device cuda: {problem}; repair the driver, or pass --device cpu")
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        fail("start this with a launcher; mpirun also needs -x MASTER_ADDR=... -x MASTER_PORT=...")
    return args


def adopt_launcher():
    """Translate the launcher's variables into the variables that torchrun would set."""
    for names in LAUNCHERS:
        if all(name in os.environ for name in names):
            values = [os.environ[name] for name in names]
            os.environ |= zip(LAUNCHERS[0], values, strict=True)
            break
    if "SLURM_STEP_NODELIST" in os.environ:
        # Rank 0 runs on the first node in the node list: on gpu03 if the list is gpu[03-07,12].
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        # Derive the port from the job id and the step id, so that two steps on the same node use
        # different ports.
        step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_PORT", str(10_000 + step % 20_000))


def fail(message):
    """Report a user error in one line on stderr, and exit with status 2."""
    if os.environ.get("RANK", "0") != "0":
        # Wait, so that rank 0 can report the same error first. The launcher then usually ends this
        # rank before this rank prints the error again.
        time.sleep(3)
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- connecting to the other ranks -----------------------------------------------------------


def connect(args, rank):
    """Connect to the store at MASTER_ADDR:MASTER_PORT, and save this rank's host name in it."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun already runs a store at this address. Under other launchers, rank 0 starts a store.
    is_server = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options = {"is_master": is_server, "timeout": timedelta(seconds=args.timeout)}
    try:
        store = dist.TCPStore(address, port, wait_for_workers=False, **options)
        store.set(f"host/{rank}", socket.gethostname())
        return store
    except RuntimeError as error:
        if is_server:
            report_error(f"cannot open {address}:{port}: {last_line(error)}")
        else:
            report_error(f"cannot reach {address}:{port}: {diagnose_connection(address, port)}")
        exit_now(1)


def diagnose_connection(address, port):
    """Return the reason why rank 0 cannot be reached at this address, with advice for the user."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        problem = "no answer" if isinstance(error, TimeoutError) else error.strerror
        return f"{problem}; check that rank 0 runs there, and that no firewall blocks the port"
    return "a different program answers; choose a different MASTER_PORT"


def report_failure(args, rank, world_size, store, error):
    """Report this rank's own error, or let rank 0 report the missing ranks; exit with status 1."""
    if not re.search(r"(?i)time.?out|timed out|closed|reset by|broken pipe|recv", str(error)):
        report_error(f"{type(error).__name__}: {last_line(error)}")
        exit_now(1)
    # A timeout or a closed connection means that a different rank is late or has ended. If that
    # rank ran the store, the store has ended too.
    with suppress(RuntimeError):
        store.set(f"here/{rank}", "")
        if rank == 0:
            print_finding(find_missing_ranks(args, store, world_size))
        else:
            # No rank sets this key, so this rank waits until the store ends or the timeout expires.
            store.wait(["never-set"], timedelta(seconds=2 * args.timeout))
    exit_now(1)


def find_missing_ranks(args, store, world_size):
    """Return a finding about ranks that did not connect, do not answer, or exchange no data."""
    connected = [rank for rank in range(world_size) if store.check([f"host/{rank}"])]
    hosts = {rank: store.get(f"host/{rank}").decode() for rank in connected}
    if len(connected) < world_size:
        address = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        value = f"did not connect to {address} within {args.timeout} s"
        value += f" ({len(connected)} of {world_size} ranks did)"
        if missing_nodes := nodes_without_ranks(hosts.values()):
            value += f"; no rank connected from {join_names(missing_nodes)}"
        missing = dict.fromkeys(set(range(world_size)) - set(connected))
        advice = "read that rank's own error; check that its node is up and this port is open"
        return Finding(NO_GO, "all ranks connect", describe(missing), value, "", advice)
    if silent := silent_ranks(args, store, hosts):
        value = f"no answer within {args.timeout} s"
        advice = "it is dead, stopped or cut off; run ps and dmesg there"
        return Finding(NO_GO, "all ranks answer", describe(silent), value, "", advice)
    value = f"connected, but could not exchange data within {args.timeout} s"
    advice = "open all ports between the nodes; if a node's own name resolves to 127.*"
    advice += " (getent hosts NAME), set GLOO_SOCKET_IFNAME"
    return Finding(NO_GO, "all ranks connect", describe(hosts), value, "", advice)


def silent_ranks(args, store, hosts):
    """Return the ranks that do not reach report_failure() in time, and their hosts.

    torch's monitored_barrier() is no substitute, because it does not name a dead rank.
    """
    deadline = time.monotonic() + args.timeout
    silent = hosts
    while silent and time.monotonic() < deadline:
        time.sleep(0.2)
        silent = {rank: hosts[rank] for rank in hosts if not store.check([f"here/{rank}"])}
    return silent


def nodes_without_ranks(hosts):
    """Return the nodes of this Slurm step that are not in `hosts`, or [] without Slurm."""
    node_list = os.environ.get("SLURM_STEP_NODELIST")
    if not node_list:
        return []
    nodes = output_of(["scontrol", "show", "hostnames", node_list]).split()
    connected = {host.split(".")[0] for host in hosts}
    return [node for node in nodes if node.split(".")[0] not in connected]


def last_line(error):
    """Return the last line of an error, and drop the file name in brackets at its start.

    In an error of NCCL, the last line gives the reason.
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^]]*\] ", "", lines[-1])


def report_error(message):
    """Print an error of this rank in one line on stderr."""
    sender = f"rank {os.environ['RANK']} on {socket.gethostname()}"
    print(f"{Path(__file__).name}: error: {sender}: {message}", file=sys.stderr, flush=True)


def exit_now(status):
    """Exit without clean-up, because Gloo's threads may abort a process that cleans up."""
    sys.stdout.flush()
    os._exit(status)


def gather(value):
    """Collect one value from each rank, and return the list of all values on every rank."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- facts: what each rank can read ----------------------------------------------------------


def read_facts(args, rank):
    """Return the host, the software versions, the system limits and the GPU values of this rank."""
    facts = {"rank": rank, "host": socket.gethostname(), "device": args.device}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "datasets"):
        facts[package] = "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    facts["open files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    # Only InfiniBand needs a high limit on locked memory.
    if os.path.isdir("/sys/class/infiniband"):
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        facts["locked memory"] = "unlimited" if limit == -1 else f"{limit >> 20} MiB"
    with suppress(OSError):
        facts["/dev/shm free"] = shutil.disk_usage("/dev/shm").free / 1e9
    if args.device == "cuda":
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts |= read_gpu(gpu_index())
    return facts


def gpu_index():
    """Return the index of this rank's GPU among the GPUs that torch sees."""
    local_rank, num_gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    # Under srun --gpus-per-task=1, each task sees only its own GPU, which has index 0.
    if num_gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0
    if local_rank >= num_gpus:
        problem = f"local rank {local_rank} has no GPU: torch sees {num_gpus} here"
        report_error(f"{problem}; run nvidia-smi -L, or start fewer ranks per node")
        exit_now(1)
    return local_rank


def read_gpu(index):
    """Return the values that nvidia-smi reports for this GPU, without the fields that are N/A."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpu_id = visible.split(",")[index] if visible else str(index)
    command = ["nvidia-smi", f"--id={gpu_id}", f"--query-gpu={','.join(NVIDIA_SMI.values())}"]
    cells = output_of([*command, "--format=csv,noheader,nounits"]).strip().split(", ")
    values = {}
    # If nvidia-smi failed, `cells` holds a single empty string.
    for name, cell in zip(NVIDIA_SMI, cells, strict=False):
        if cell and "N/A" not in cell:
            values[name] = int(cell) if cell.isdigit() else cell
    return values


def output_of(command):
    """Return the output of a command, or an empty string if it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        result = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return result.stdout
    return ""


def check_save_dir(args, rank):
    """Return whether --save-dir is shared and writable, and its free space in GB.

    Only the first rank of each node checks the folder; the other ranks return None for both values.
    """
    folder = Path(args.save_dir).resolve()
    is_first_on_node = os.environ["LOCAL_RANK"] == "0"
    probe_files = [folder / f".preflight-{number}" for number in gather(time.time_ns())]
    states = gather(write_probe(probe_files[rank]) if is_first_on_node else None)
    state = states[rank]
    # A network file system may take seconds to show a new file.
    deadline = time.monotonic() + 10
    while state == states[0] == SHARED and not probe_files[0].exists():
        time.sleep(0.1)
        if time.monotonic() > deadline:
            state = "not shared: the file that rank 0 wrote is not there"
    dist.barrier()
    if states[rank] == SHARED:
        probe_files[rank].unlink()
    free = None
    if is_first_on_node and folder.exists():
        free = shutil.disk_usage(folder).free / 1e9
    return {"--save-dir": state, "disk free": free}


def write_probe(path):
    """Write a small file; return SHARED, or the reason why it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 4096)
        return SHARED
    except OSError as error:
        return f"cannot write: {error.strerror}"


# ---- measurements ----------------------------------------------------------------------------


def measure(args, rank, hosts):
    """Measure the speed of this rank's device, of an all-reduce, and of this rank's links."""
    device, group = torch.device(args.device), None
    if args.device == "cuda":
        device = torch.device("cuda", gpu_index())
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=args.timeout))
    rates = {"matmul": matmul_rate(device)}
    if len(hosts) > 1:
        rates["all-reduce"] = all_reduce_rate(len(hosts), device, group)
    for name, rings in rings_of(hosts).items():
        rates[name] = link_rate(rank, rings, device, group)
    return rates


def seconds_of(device, work, repeats=1):
    """Return the seconds that `repeats` runs of `work` take; all ranks start together."""
    synchronize(device)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return time.perf_counter() - start


def synchronize(device):
    """Wait until the GPU has finished; a CPU needs no wait, because its calls block."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def do_nothing():
    """Replace the exchange on a rank without a partner; it only takes part in the barriers."""


def matmul_rate(device):
    """Measure the TFLOP/s of multiplying n × n matrices; each product needs 2 n³ operations."""
    is_gpu = device.type == "cuda"
    # Use float16 on a GPU, because older GPUs are slow in bfloat16.
    n, repeats, dtype = (8192, 20, torch.float16) if is_gpu else (768, 10, torch.float32)
    left = torch.randn(n, n, device=device).to(dtype)
    right = torch.randn(n, n, device=device).to(dtype)
    # The first measurement is a warm-up.
    times = [seconds_of(device, lambda: left @ right, repeats) for _ in range(31)][1:]
    # Use a GPU's median time, because a GPU is fastest before it gets hot. Use a CPU's shortest
    # time, because other programs disturb the shortest measurement least.
    seconds = statistics.median(times) if is_gpu else min(times)
    return repeats * 2 * n**3 / seconds / 1e12


def all_reduce_rate(world_size, device, group):
    """Return the bus bandwidth of an all-reduce in GB/s.

    On n ranks, the bus bandwidth is bytes / seconds × 2 (n - 1) / n, as in nccl-tests:
    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    data = torch.zeros(2**26 if device.type == "cuda" else 2**20, device=device)
    work = partial(dist.all_reduce, data, group=group)
    seconds = min(seconds_of(device, work) for _ in range(5))
    return data.nbytes / seconds * 2 * (world_size - 1) / world_size / 1e9


def rings_of(hosts):
    """Return the rings of ranks that exchange data: one in each node, and rings between the nodes.

    A ring between nodes joins the ranks that have the same position in their nodes. On identical
    nodes, each of these ranks shares its network card with the same number of ranks, so their rates
    are comparable.
    """
    ranks_by_host = defaultdict(list)
    for rank, host in enumerate(hosts):
        ranks_by_host[host].append(rank)
    within = list(ranks_by_host.values())
    # A node with fewer ranks than other nodes is missing from the last rings.
    between = [[rank for rank in ring if rank is not None] for ring in zip_longest(*within)]
    return {"link within a node": within, "link between nodes": between}


def link_rate(rank, rings, device, group):
    """Return the rate in GB/s of this rank's fastest exchange with a partner.

    In each round, two ranks are partners if their positions in the ring add up to `total`, modulo
    the length of the ring. Only the fastest exchange counts, so a partner with a slow link does not
    make this rank look slow. Return None for a rank that never has a partner.
    """
    [ring] = [ring for ring in rings if rank in ring]
    position = ring.index(rank)
    longest = max(len(ring) for ring in rings)
    data = torch.zeros(2, 2**24 if device.type == "cuda" else 2**19, device=device)
    times = []
    for total in range(1, longest + 1, math.ceil(longest / MAX_PARTNERS)):
        partner = ring[(total - position) % len(ring)]
        has_partner = partner != rank
        work = partial(exchange, data, partner, group) if has_partner else do_nothing
        seconds = min(seconds_of(device, work) for _ in range(6))
        if has_partner:
            times.append(seconds)
    return data[0].nbytes / min(times) / 1e9 if times else None


def exchange(data, partner, group):
    """Send row 0 of `data` to a partner, and receive the partner's row into row 1."""
    send = dist.P2POp(dist.isend, data[0], partner, group)
    receive = dist.P2POp(dist.irecv, data[1], partner, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


# ---- comparison: pure functions of what all ranks report -------------------------------------


def differs(value, usual):
    return value != usual


def is_not(good_value):
    return lambda value, _: value != good_value


def below(fraction, minimum=0):
    """Return a test for values below `fraction` times the larger of `usual` and `minimum`."""
    return lambda value, usual: value < fraction * max(usual, minimum)


def never_bad(value, usual):
    return False


def checks(args, world_size):
    """Return all checks; a check may compare a rank's value with the usual value of all ranks."""
    # Gloo and NCCL keep sockets open to many other ranks, and each socket is an open file.
    num_files = 512 + 4 * world_size
    checkpoints_gb = 3 * args.checkpoint_gb
    slow_device, slow_link = SLOW_DEVICE[args.device], SLOW_LINK[args.device]
    versions = "install the same version on all nodes, or let them share an environment"
    faulty = "drain this node, then run dmesg | grep -i xid, and dcgmi diag -r 3"
    heat = "check cooling and power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
    slow = "it is hot, throttled or shared: run top and nvidia-smi there, then dcgmi diag -r 3"
    link = "check speed and errors with ethtool, ip -s link and ibstat; then run nccl-tests"
    return [
        Check("python", WARNING, differs, versions),
        Check("torch", NO_GO, differs, versions),
        Check("transformers", NO_GO, differs, versions),
        Check("datasets", WARNING, differs, versions),
        Check("nccl", NO_GO, differs, versions),
        Check("driver", WARNING, differs, versions),
        Check("device", NO_GO, differs, "run nvidia-smi on the nodes without a GPU"),
        Check("GPU", NO_GO, differs, "use nodes with the same model of GPU"),
        Check("GPU memory in use", NO_GO, lambda value, _: value > 1024,
              "end the process that holds it: nvidia-smi, fuser -v /dev/nvidia*", "{} MiB"),
        Check("GPU ECC errors", NO_GO, is_not(0), faulty),
        Check("GPU hardware slowdown", NO_GO, is_not("Not Active"), heat),
        Check("GPU thermal slowdown", NO_GO, is_not("Not Active"), heat),
        Check("open files", NO_GO, lambda value, _: 0 <= value < num_files,
              f"needs {num_files}; run ulimit -n 65536 before the launcher"),
        Check("locked memory", WARNING, is_not("unlimited"),
              "InfiniBand needs it; run ulimit -l unlimited before the launcher"),
        Check("/dev/shm free", WARNING, lambda value, _: value < 1,
              "DataLoader workers and NCCL need 1 GB; run docker with --ipc=host", "{:.1f} GB"),
        Check("clock", WARNING, lambda value, _: abs(value) > 1,
              "start chronyd or ntpd there, and check with timedatectl", "{:+.1f} s"),
        Check("--save-dir", NO_GO, is_not(SHARED),
              "choose a folder that all nodes share and can write to"),
        Check("disk free", NO_GO, lambda value, _: value < checkpoints_gb,
              f"needs {checkpoints_gb:g} GB for three checkpoints at a time", "{:.1f} GB"),
        Check("matmul", NO_GO, below(slow_device), slow, "{:.3g} TFLOP/s"),
        Check("all-reduce", NO_GO, never_bad, "", "{:.3g} GB/s"),
        Check("link within a node", NO_GO, below(slow_link), link, "{:.3g} GB/s"),
        Check("link between nodes", NO_GO, below(slow_link, args.network_gbs),
              link, "{:.3g} GB/s"),
    ]  # fmt: skip


def compare(args, reports):
    """Return two lists: the name and the usual value of each check, and all findings."""
    hosts = [report["host"] for report in reports]
    rows, findings = [], []
    for check in checks(args, len(reports)):
        values = {report["rank"]: report.get(check.name) for report in reports}
        values = {rank: value for rank, value in values.items() if value is not None}
        if values:
            usual, problems = judge(check, values, hosts)
            rows.append((check.name, usual))
            findings += problems
        elif args.device == "cuda" and check.name.startswith("GPU"):
            rows.append((check.name, "not known: see nvidia-smi -q"))
    return rows, findings


def judge(check, values, hosts):
    """Return the usual value as text, and a finding for each group of ranks with bad values.

    Ranks with the same bad value form a group. Measured values are hardly ever equal, so the ranks
    with bad measured values form one group per node instead.
    """
    is_measured = isinstance(next(iter(values.values())), float)
    if is_measured:
        usual = statistics.median_high(values.values())
    else:
        usual, _ = Counter(values.values()).most_common(1)[0]
    groups = defaultdict(dict)
    for rank, value in values.items():
        if check.is_bad(value, usual):
            groups[hosts[rank] if is_measured else value][rank] = value
    usual = check.value_format.format(usual)
    findings = []
    for group in groups.values():
        ranks = describe({rank: hosts[rank] for rank in group})
        value = check.value_format.format(min(group.values()))
        findings.append(Finding(check.level, check.name, ranks, value, usual, check.advice))
    return usual, findings


def describe(hosts_by_rank):
    """Describe ranks and their hosts in words, for example: ranks 0, 1 on h1."""
    plural = "s" if len(hosts_by_rank) > 1 else ""
    ranks = f"rank{plural} {join_names(sorted(hosts_by_rank))}"
    hosts = dict.fromkeys(host for host in hosts_by_rank.values() if host)
    return f"{ranks} on {join_names(hosts)}" if hosts else ranks


def join_names(names, limit=8):
    """Join up to `limit` names with commas, and append the number of names that are left out."""
    text = ", ".join(map(str, list(names)[:limit]))
    return f"{text} and {len(names) - limit} more" if len(names) > limit else text


# ---- report and main -------------------------------------------------------------------------


def print_finding(finding):
    """Print the problem and its ranks on one line, and the advice on the next line."""
    has_usual = finding.usual and finding.usual != finding.value
    usual = f" (usual: {finding.usual})" if has_usual else ""
    print(f"{finding.level:8} {finding.check}: {finding.ranks}: {finding.value}{usual}")
    print(f"{'':8} {finding.advice}")


def print_report(reports, rows, findings):
    """Print the usual values, the findings and the verdict."""
    width = max(len(name) for name, _ in rows)
    for name, usual in rows:
        print(f"{name:{width}}  {usual}")
    # Print no-go findings before warnings.
    findings = sorted(findings, key=lambda finding: finding.level != NO_GO)
    for finding in findings[:20]:
        print_finding(finding)
    verdict = NO_GO if has_no_go(findings) else "go"
    num_nodes = len({report["host"] for report in reports})
    size = f"world size {len(reports)} on {num_nodes} node{'s' * (num_nodes > 1)}"
    failed_checks = dict.fromkeys(finding.check for finding in findings)
    print(f"{verdict}: {size}", *failed_checks, sep="; ")


def has_no_go(findings):
    return any(finding.level == NO_GO for finding in findings)


def examine(args, rank, facts):
    """Measure this rank, and return the facts and measurements of all ranks."""
    all_facts = gather(facts)
    report = facts | check_save_dir(args, rank)
    dist.barrier()
    clock = time.time()
    report["clock"] = clock - statistics.median_low(gather(clock))
    # Measure only if all ranks have the same kind of device, because NCCL would wait for ranks
    # without a GPU until the timeout.
    if len({rank_facts["device"] for rank_facts in all_facts}) == 1:
        report |= measure(args, rank, [rank_facts["host"] for rank_facts in all_facts])
    return gather(report)


def main():
    """Connect all ranks, examine them, and compare the results; rank 0 prints the report."""
    adopt_launcher()
    args = parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Read the facts before a process group allocates GPU memory, because that memory would count as
    # GPU memory in use.
    facts = read_facts(args, rank)
    store = connect(args, rank)
    group = {"store": dist.PrefixStore("preflight", store), "rank": rank, "world_size": world_size}
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout), **group)
        reports = examine(args, rank, facts)
        rows, findings = compare(args, reports)
        if rank == 0:
            print_report(reports, rows, findings)
        # Rank 0 may run the store that all ranks use, so wait until all ranks are done.
        dist.barrier()
    except (RuntimeError, OSError) as error:
        report_failure(args, rank, world_size, store, error)
    exit_now(1 if has_no_go(findings) else 0)


if __name__ == "__main__":
    main()
