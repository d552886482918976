"""Say before a long run whether its machines are fit for it: go, or no-go and what to do.

Here:      torchrun --standalone --nproc-per-node 2 diagnosing-errors/preflight.py
For real:  srun --nodes 4 --ntasks-per-node 8 --gpus-per-node 8 \
               python diagnosing-errors/preflight.py --save-dir outputs --checkpoint-gb 40

Start it with the launcher of the run itself, which is under test too. Under srun and mpirun, rank 0
names the ranks that do not come; torchrun starts no rank before all of its nodes are there, and
reports a missing one itself. Exit status: 0 go, also with warnings; 1 no-go; 2 bad arguments.
(torchrun makes 1 of any but 0.)

It takes under a minute, and finds the machine that is out of line. `dcgmi diag -r 3` tests a GPU's
memory and power under load; nccl-tests measures each collective at each size, and checks results.
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

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # pages of C++ frames hide our one line
os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")  # a timeout raises, it does not abort

import torch
import torch.distributed as dist

LAUNCHERS = [  # the variables in which each tells a process its rank, world size and local rank
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],  # torchrun, deepspeed
    [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")],  # mpirun of Open MPI
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],  # mpirun of MPICH
    ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"],  # srun
]
NO_GO, WARNING = "no-go", "warning"
SLOW_DEVICE = {"cuda": 0.85, "cpu": 0.5}  # of the median; other work on a CPU comes and goes
SLOW_LINK = {"cuda": 0.5, "cpu": 0.25}  # of the median bandwidth
ROUNDS = 4  # partners with which a rank measures its link
SHARED = "shared"
NVIDIA_SMI = {  # what a report calls it: what nvidia-smi does
    "GPU": "name",
    "driver": "driver_version",
    "GPU memory in use": "memory.used",  # MiB
    "GPU ECC errors": "ecc.errors.uncorrected.volatile.total",
    "GPU hardware slowdown": "clocks_throttle_reasons.hw_slowdown",
    "GPU thermal slowdown": "clocks_throttle_reasons.sw_thermal_slowdown",
}

Check = namedtuple("Check", "name level is_bad advice unit", defaults=["{}"])  # unit: a format
Finding = namedtuple("Finding", "level check where value usual advice")


# ---- command line and launcher ---------------------------------------------------------------


def parse_args(argv=None):
    """Return the arguments; exit with 2 if they cannot be met."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(formatter_class=formatter, allow_abbrev=False)
    parser.error = fail
    add = parser.add_argument
    add("--save-dir", default="outputs", help="where the run will write its checkpoints")
    add("--checkpoint-gb", type=float, default=0.0, help="size of one, in 10^9 bytes")
    add("--network-gbs", type=float, default=0.0, help="GB/s a rank should get from another host")
    add("--device", choices=["auto", "cpu", "cuda"], default="auto", help="auto: cuda if there")
    add("--timeout", type=int, default=60, help="seconds that a rank waits for the others")
    args = parser.parse_args(argv)
    for name, least in {"checkpoint_gb": 0, "network_gbs": 0, "timeout": 1}.items():
        if not least <= getattr(args, name) < math.inf:  # in this form it refuses NaN too
            fail(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least {least}")
    if args.device == "auto":  # a driver without a GPU that works is a fault, and no CPU machine
        has_gpu = os.path.exists("/dev/nvidiactl") or torch.cuda.is_available()
        args.device = "cuda" if has_gpu else "cpu"
    if args.device == "cuda" and not torch.cuda.is_available():
        fail(f"torch {torch.__version__} finds no GPU that works on {socket.gethostname()}")
    if not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        fail("start this with a launcher; mpirun needs -x MASTER_ADDR=... -x MASTER_PORT=... too")
    return args


def adopt_launcher():
    """Set the variables that torchrun sets to what another launcher tells this process."""
    for names in LAUNCHERS:
        if all(name in os.environ for name in names):
            os.environ |= zip(LAUNCHERS[0], [os.environ[name] for name in names], strict=True)
            break
    if "SLURM_STEP_NODELIST" in os.environ:  # rank 0 is on the first of nodes like gpu[03-07,12]
        nodes = re.sub(r"\[(\d+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"])
        step = 10 * int(os.environ["SLURM_JOB_ID"]) + int(os.environ["SLURM_STEP_ID"])
        os.environ.setdefault("MASTER_ADDR", nodes.split(",")[0])
        os.environ.setdefault("MASTER_PORT", str(10_000 + step % 20_000))  # of this step alone


def fail(message):
    """Stop because of what the user gave us: one line on stderr, exit status 2."""
    if os.environ.get("RANK", "0") != "0":
        time.sleep(3)  # rank 0 says it and the launcher ends us, or only we have this fault
    print(f"{Path(__file__).name}: error: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


# ---- meeting the other ranks -----------------------------------------------------------------


def connect(args, rank):
    """Return the store at MASTER_ADDR:MASTER_PORT, in which each rank leaves its host's name."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    # torchrun has opened a store there; under other launchers, rank 0 opens it
    hosting = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    options = {"is_master": hosting, "timeout": timedelta(seconds=args.timeout)}
    try:
        store = dist.TCPStore(address, port, wait_for_workers=False, **options)
        store.set(f"host/{rank}", socket.gethostname())
        return store
    except RuntimeError as error:
        why = reason(error) if hosting else why_unreachable(address, port)
        complain(f"cannot {'open' if hosting else 'reach'} {address}:{port}: {why}")
        leave(1)


def why_unreachable(address, port):
    """Return in words why nothing answers at an address and port."""
    try:
        socket.create_connection((address, port), timeout=5).close()
    except OSError as error:
        why = "no answer" if isinstance(error, TimeoutError) else error.strerror
        return f"{why}: is rank 0 on that host, and the port open to this one?"
    return "something else than rank 0 answers: choose another MASTER_PORT"


def blame(args, rank, world_size, store, error):
    """Say what has failed here, or on rank 0 which ranks it has waited for; exit with 1."""
    if not re.search(r"(?i)time.?out|timed out|closed|reset by|broken pipe|recv", str(error)):
        complain(f"{type(error).__name__}: {reason(error)}")
        leave(1)
    with suppress(RuntimeError):  # only some other rank is gone or late, and the store may be too
        store.set(f"here/{rank}", "")
        if rank == 0:
            print_finding(who_is_missing(args, store, world_size))
        else:
            store.wait(["until rank 0 ends"], timedelta(seconds=2 * args.timeout))
    leave(1)


def who_is_missing(args, store, world_size):
    """Return the finding for ranks that never came, or do not answer, or else cannot connect."""
    came = [rank for rank in range(world_size) if store.check([f"host/{rank}"])]
    hosts = {rank: store.get(f"host/{rank}").decode() for rank in came}
    if len(came) < world_size:
        value = "never came to {MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        value += f" ({len(came)} of {world_size} did, within {args.timeout} s)"
        if unseen := unseen_nodes(hosts.values()):
            value += f"; no rank came from {listed(unseen)}"
        absent = dict.fromkeys(set(range(world_size)) - set(came))
        advice = "see its own error line; is its host up, is this port open?"
        return Finding(NO_GO, "all ranks meet", where(absent), value, "", advice)
    if silent := silent_ranks(args, store, hosts):
        advice = "dead, stopped or cut off: see ps and dmesg there"
        return Finding(NO_GO, "all ranks answer", where(silent), "silent", "", advice)
    value = f"came, but could not exchange data within {args.timeout} s"
    advice = "let hosts through to all ports of each other; or, if a host's own name leads to "
    advice += "127.* (getent hosts NAME), set GLOO_SOCKET_IFNAME"
    return Finding(NO_GO, "all ranks meet", where(hosts), value, "", advice)


def silent_ranks(args, store, hosts):
    """Return those ranks, and their hosts, that do not come to `blame` too in time.

    monitored_barrier names those that are stopped, but for one that is dead it only raises.
    """
    deadline, silent = time.monotonic() + args.timeout, hosts
    while silent and time.monotonic() < deadline:
        time.sleep(0.2)
        silent = {rank: hosts[rank] for rank in hosts if not store.check([f"here/{rank}"])}
    return silent


def unseen_nodes(hosts):
    """Return the nodes of this Slurm step, none without Slurm, that are not among some hosts."""
    seen = {name.split(".")[0] for name in hosts}
    command = ["scontrol", "show", "hostnames", os.environ.get("SLURM_STEP_NODELIST", "")]
    nodes = output_of(command).split() if command[-1] else []
    return [name for name in nodes if name.split(".")[0] not in seen]


def reason(error):
    """Return the last line of an error, where NCCL gives its reason, without torch's file names."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^]]*\] ", "", lines[-1])


def complain(message):
    """Print one line on stderr about this rank."""
    place = f"rank {os.environ['RANK']} on {socket.gethostname()}"
    print(f"{Path(__file__).name}: error: {place}: {message}", file=sys.stderr, flush=True)


def leave(status):
    """End this process, at once: gloo's threads may abort one that ends in the usual way."""
    sys.stdout.flush()
    os._exit(status)


def gather(value):
    """Return the values of all ranks, on all of them."""
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


# ---- facts: what each rank can read ----------------------------------------------------------


def read_facts(args, rank):
    """Return what this rank knows of its software, its limits and its GPU."""
    facts = {"rank": rank, "host": socket.gethostname(), "device": args.device}
    facts |= {"python": platform.python_version(), "torch": torch.__version__}
    for package in ("transformers", "datasets"):
        facts[package] = "not installed"
        with suppress(importlib.metadata.PackageNotFoundError):
            facts[package] = importlib.metadata.version(package)
    facts["open files"] = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if os.path.isdir("/sys/class/infiniband"):  # which alone needs it
        limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
        facts["locked memory"] = "unlimited" if limit == -1 else f"{limit >> 20} MiB"
    with suppress(OSError):
        facts["/dev/shm free"] = shutil.disk_usage("/dev/shm").free / 1e9
    if args.device == "cuda":
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
        facts |= read_gpu(gpu_index())
    return facts


def gpu_index():
    """Return the index of this rank's GPU among those that torch sees; exit with 1 without one."""
    index, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if gpus == 1 and "TORCHELASTIC_RUN_ID" not in os.environ:
        return 0  # srun --gpus-per-task=1 shows each task a GPU of its own, and no other
    if index >= gpus:
        complain(f"local rank {index} has no GPU: torch sees {gpus} there; see nvidia-smi -L")
        leave(1)
    return index


def read_gpu(index):
    """Return what nvidia-smi knows of a GPU that torch sees, without what that GPU lacks."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    name = visible.split(",")[index] if visible else str(index)
    command = ["nvidia-smi", f"--id={name}", f"--query-gpu={','.join(NVIDIA_SMI.values())}"]
    cells = output_of([*command, "--format=csv,noheader,nounits"]).strip().split(", ")
    found = {key: cell for key, cell in zip(NVIDIA_SMI, cells, strict=False) if "N/A" not in cell}
    return {key: int(cell) if cell.isdigit() else cell for key, cell in found.items() if cell}


def output_of(command):
    """Return what a command prints, nothing if it cannot be run or fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=30)
        return done.stdout
    return ""


def try_save_dir(args, rank):
    """Return if this host can write to --save-dir and sees rank 0's file there, and the GB free."""
    folder, first = Path(args.save_dir).resolve(), os.environ["LOCAL_RANK"] == "0"  # of its host
    probes = [folder / f".preflight-{each}" for each in gather(time.time_ns())]
    states = gather(write(probes[rank]) if first else None)
    state = states[rank]
    deadline = time.monotonic() + 10  # network file systems show new files late
    while state == states[0] == SHARED and not probes[0].exists():
        time.sleep(0.1)
        if time.monotonic() > deadline:
            state = "not shared: the file that rank 0 wrote is not there"
    dist.barrier()
    if states[rank] == SHARED:
        probes[rank].unlink()
    free = shutil.disk_usage(folder).free / 1e9 if first and folder.exists() else None
    return {"--save-dir": state, "disk free": free}


def write(path):
    """Write a file; return in words how that went."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x" * 4096)
        return SHARED
    except OSError as error:
        return f"cannot write: {error.strerror}"


# ---- measurements ----------------------------------------------------------------------------


def measure(args, rank, hosts):
    """Return the rates of this rank's device, of an all-reduce, and of links to other ranks."""
    device, group = torch.device(args.device), None
    if args.device == "cuda":
        device = torch.device("cuda", gpu_index())
        torch.cuda.set_device(device)
        group = dist.new_group(backend="nccl", timeout=timedelta(seconds=args.timeout))
    rates = {"matmul": matmul_rate(device)}
    if len(hosts) > 1:
        rates["all-reduce"] = all_reduce_rate(len(hosts), device, group)
    for name, all_rings in rings(hosts).items():
        rates[name] = link_rate(rank, all_rings, device, group)
    return rates


def timed(device, work, repeats=1):
    """Return the seconds that some work takes on this rank, begun with all others."""
    wait = torch.cuda.synchronize if device.type == "cuda" else bool
    wait()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait()
    return time.perf_counter() - start


def matmul_rate(device):
    """Return TFLOP/s of products of n × n matrices, which take 2 n³ operations each."""
    cuda = device.type == "cuda"  # in float16, which older GPUs multiply fast too, unlike bfloat16
    n, repeats, dtype = (8192, 20, torch.float16) if cuda else (768, 10, torch.float32)
    left, right = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    times = [timed(device, lambda: left @ right, repeats) for _ in range(31)][1:]
    # a GPU's best is from before it got hot; a CPU's is the one that others disturbed least
    seconds = statistics.median(times) if cuda else min(times)
    return repeats * 2 * n**3 / seconds / 1e12


def all_reduce_rate(world_size, device, group):
    """Return the bus bandwidth of an all-reduce in GB/s: bytes / seconds × 2 (n - 1) / n.

    https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md
    """
    data = torch.zeros(2**26 if device.type == "cuda" else 2**20, device=device)
    seconds = min(timed(device, partial(dist.all_reduce, data, group=group)) for _ in range(5))
    return data.nbytes / seconds * 2 * (world_size - 1) / world_size / 1e9


def rings(hosts):
    """Return the rings of ranks that exchange data: inside each host, and between hosts.

    Those between join the same places of all hosts, which share a network card in the same way.
    """
    inside = [
        [rank for rank, its in enumerate(hosts) if its == host] for host in dict.fromkeys(hosts)
    ]
    between = [[rank for rank in ring if rank is not None] for ring in zip_longest(*inside)]
    return {"link inside a host": inside, "link between hosts": between}


def link_rate(rank, all_rings, device, group):
    """Return the GB/s at which this rank exchanges data with its best partner; None without one.

    In each round, those whose places in their ring add up to `total` are partners. A partner with
    a slow link does not count against this rank.
    """
    [ring] = [each for each in all_rings if rank in each]
    here, longest, times = ring.index(rank), max(map(len, all_rings)), []
    data = torch.zeros(2, 2**24 if device.type == "cuda" else 2**19, device=device)
    for total in range(1, longest + 1, math.ceil(longest / ROUNDS)):
        partner = ring[(total - here) % len(ring)]
        alone = partner == rank  # but takes part in the barriers
        work = bool if alone else partial(exchange, data, partner, group)
        seconds = min(timed(device, work) for _ in range(6))
        times += [] if alone else [seconds]
    return data[0].nbytes / min(times) / 1e9 if times else None


def exchange(data, partner, group):
    """Send a row of data to another rank while its own comes into the second row."""
    send = dist.P2POp(dist.isend, data[0], partner, group)
    receive = dist.P2POp(dist.irecv, data[1], partner, group)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()


# ---- comparison: pure functions of what all ranks report -------------------------------------


def differs(value, usual):
    return value != usual


def is_not(good):
    return lambda value, _: value != good


def below(part, least=0):
    """Return a test for values that are less than a part of the usual one, or of the least."""
    return lambda value, usual: value < part * max(usual, least)


def checks(args, world_size):
    """Return what is compared: a value is bad by itself, or next to the usual one of all ranks."""
    files = 512 + 4 * world_size  # gloo and nccl keep sockets to many other ranks
    same = "install the same on all hosts, or let all use one environment"
    faulty = "drain this host: dmesg | grep -i xid, dcgmi diag -r 3"
    heat = "cooling or power: nvidia-smi -q -d PERFORMANCE,TEMPERATURE,POWER"
    busy = "hot, throttled or shared: top and nvidia-smi there, then dcgmi diag -r 3"
    link = "its speed and errors: ethtool, ip -s link, ibstat; then nccl-tests"
    return [
        Check("python", WARNING, differs, same),
        Check("torch", NO_GO, differs, same),
        Check("transformers", NO_GO, differs, same),
        Check("datasets", WARNING, differs, same),
        Check("nccl", NO_GO, differs, same),
        Check("driver", WARNING, differs, same),
        Check("device", NO_GO, differs, "see nvidia-smi where there is no GPU"),
        Check("GPU", NO_GO, differs, "use hosts with one kind of GPU"),
        Check("GPU memory in use", NO_GO, lambda value, _: value > 1024,
              "end what holds it: nvidia-smi, fuser -v /dev/nvidia*", "{} MiB"),
        Check("GPU ECC errors", NO_GO, is_not(0), faulty),
        Check("GPU hardware slowdown", NO_GO, is_not("Not Active"), heat),
        Check("GPU thermal slowdown", NO_GO, is_not("Not Active"), heat),
        Check("open files", NO_GO, lambda value, _: 0 <= value < files,
              f"needs {files}: ulimit -n 65536 where the launcher starts it"),
        Check("locked memory", WARNING, is_not("unlimited"), "InfiniBand needs it: ulimit -l"),
        Check("/dev/shm free", WARNING, lambda value, _: value < 1,
              "DataLoader workers and nccl need it: docker run --ipc=host", "{:.1f} GB"),
        Check("clock", WARNING, lambda value, _: abs(value) > 1,
              "start chronyd or ntpd there; see timedatectl", "{:+.1f} s"),
        Check("--save-dir", NO_GO, is_not(SHARED), "take one that all hosts share and can write"),
        Check("disk free", NO_GO, lambda value, _: value < 3 * args.checkpoint_gb,
              f"needs {3 * args.checkpoint_gb:g} GB: three checkpoints for a moment", "{:.1f} GB"),
        Check("matmul", NO_GO, below(SLOW_DEVICE[args.device]), busy, "{:.3g} TFLOP/s"),
        Check("all-reduce", NO_GO, lambda *_: False, "", "{:.3g} GB/s"),  # one number for all
        Check("link inside a host", NO_GO, below(SLOW_LINK[args.device]), link, "{:.3g} GB/s"),
        Check("link between hosts", NO_GO, below(SLOW_LINK[args.device], args.network_gbs),
              link, "{:.3g} GB/s"),
    ]  # fmt: skip


def compare(args, reports):
    """Return what is usual, as pairs of a check's name and a text, and the findings."""
    rows, findings = [], []
    for check in checks(args, len(reports)):
        values = {each["rank"]: each.get(check.name) for each in reports}
        values = {rank: value for rank, value in values.items() if value is not None}
        if values:
            usual, found = judge(check, values, [each["host"] for each in reports])
            rows.append((check.name, usual))
            findings += found
        elif args.device == "cuda" and check.name.startswith("GPU"):
            rows.append((check.name, "not known: see nvidia-smi -q"))
    return rows, findings


def judge(check, values, hosts):
    """Return the usual value as text, and findings: of what ranks have, or a slow host measures."""
    usual, bad = Counter(values.values()).most_common(1)[0][0], defaultdict(dict)
    measured = isinstance(usual, float)  # no two are the same
    if measured:
        usual = statistics.median_high(values.values())
    for rank, value in values.items():
        if check.is_bad(value, usual):
            bad[hosts[rank] if measured else value][rank] = value
    text = check.unit.format
    return text(usual), [
        Finding(check.level, check.name, where({rank: hosts[rank] for rank in group}),
                text(min(group.values())), text(usual), check.advice)
        for group in bad.values()
    ]  # fmt: skip


def where(places):
    """Return a dictionary from ranks to hosts in words, such as: ranks 0, 1 on h1."""
    hosts = dict.fromkeys(host for host in places.values() if host)
    ranks = f"rank{'s' * (len(places) > 1)} {listed(sorted(places))}"
    return f"{ranks} on {listed(hosts)}" if hosts else ranks


def listed(names, most=8):
    """Return the first of some names in words, and how many more there are."""
    text = ", ".join(map(str, list(names)[:most]))
    return f"{text} and {len(names) - most} more" if len(names) > most else text


# ---- report and main -------------------------------------------------------------------------


def print_finding(finding):
    """Print what is wrong and where, and on a second line what to do."""
    level, check, place, value, usual, advice = finding
    usual = f" (most: {usual})" if usual and usual != value else ""
    print(f"{level:8} {check}: {place}: {value}{usual}\n{'':8} {advice}")


def print_report(reports, rows, findings):
    """Print what is usual, the findings and the verdict."""
    width = max(len(name) for name, _ in rows)
    for name, usual in rows:
        print(f"{name:{width}}  {usual}")
    for finding in sorted(findings, key=lambda each: each.level != NO_GO)[:20]:
        print_finding(finding)
    verdict = NO_GO if any(each.level == NO_GO for each in findings) else "go"
    hosts = len({each["host"] for each in reports})
    place = f"world size {len(reports)} on {hosts} host{'s' * (hosts > 1)}"
    print(f"{verdict}: {place}", *dict.fromkeys(each.check for each in findings), sep="; ")


def examine(args, rank, facts):
    """Return the reports of all ranks: what they read, what they measured."""
    everyone = gather(facts)
    report = facts | try_save_dir(args, rank)
    dist.barrier()
    clock = time.time()
    report["clock"] = clock - statistics.median_low(gather(clock))
    if len({each["device"] for each in everyone}) == 1:  # otherwise NCCL would only wait
        report |= measure(args, rank, [each["host"] for each in everyone])
    return gather(report)


def main():
    """Meet, read, measure, compare: all ranks alike, and rank 0 speaks."""
    adopt_launcher()
    args = parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    facts = read_facts(args, rank)  # first: a process group's own memory on a GPU would count
    store = connect(args, rank)
    group = {"store": dist.PrefixStore("preflight", store), "rank": rank, "world_size": world_size}
    try:
        dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout), **group)
        reports = examine(args, rank, facts)
        rows, findings = compare(args, reports)
        if rank == 0:
            print_report(reports, rows, findings)
        dist.barrier()  # rank 0 keeps the store of all, so it ends with them
    except (RuntimeError, OSError) as error:
        blame(args, rank, world_size, store, error)
    leave(1 if any(each.level == NO_GO for each in findings) else 0)


if __name__ == "__main__":
    main()
