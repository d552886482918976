#!/usr/bin/env python3
"""Diagnose a run that hangs, has died or is slow: name the fault, the rank, the host and the line.

Here:     python diagnosing-errors/whats_wrong.py outputs/02-ddp
By ssh:   python diagnosing-errors/whats_wrong.py outputs/my-run --hosts hosts.txt
Slurm:    python diagnosing-errors/whats_wrong.py outputs/my-run --slurm-job 123

facts.py, in the same folder, collects facts from the run's folder and its hosts. This script judges
these facts. Its exit status is 0 if there is no fault, 1 if there is a fault, 2 if the arguments
are wrong, and 3 if it cannot find the cause.
"""

import argparse
import json
import math
import os
import re
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, median_low

from facts import gather, location_of, ranks_of, reach_of

# This page has a section for each kind of finding that is a fault, and for `unknown`.
FAULTS_PAGE = "diagnosing-errors/faults.md"
NO_FAULT = ("healthy", "slow-but-healthy", "finished", "interrupted")

# The other ranks spend at least this share of their time waiting for a straggler.
MIN_LATE_SHARE = 0.2
# Host memory counts as leaking if it grows steadily over the latest values (at most six), by more
# than this amount and by more than 50%.
MIN_LEAK_GIB = 0.3
# A disk with fewer free bytes than this counts as full.
FULL_DISK_BYTES = 2**24
# These phases may take minutes in a healthy run.
LONG_PHASES = ("start", "compile", "evaluation", "checkpoint", "export")

# The first pattern that an error matches decides the kind of the fault.
CLUES = {
    "not-finite": r"not finite",
    # In a run on CPUs, the CPU is the device, so an error of its allocator belongs to this kind.
    "device-out-of-memory": r"CUDA out of memory|OutOfMemoryError|_ALLOC_FAILED"
    r"|CUDA error: out of memory|Cuda failure \S+ 'out of memory'|cudaErrorMemoryAllocation"
    r"|DefaultCPUAllocator: can't allocate",
    "too-many-open-files": r"[Tt]oo many open files|EMFILE",
    "disk-full": r"No space left on device|[Dd]isk quota exceeded|ENOSPC",
    "host-memory-leak": r"Cannot allocate memory|\bMemoryError|bad_alloc",
    "mismatched-collective": r"Detected mismatch between collectives|op\.preamble\.length",
    "rendezvous": r"Unable to find address for|RendezvousTimeout|[Nn]o socket interface"
    r"|client socket has (failed|timed out)|C10d store has failed",
    "corrupt-checkpoint": r"no checkpoint in \S+ can be read|PytorchStreamReader failed"
    r"|step-\d+ cannot be read",
    "interrupted": r"KeyboardInterrupt",
}
# An error that matches this pattern, but no pattern in CLUES, is only a consequence of a fault
# elsewhere.
VICTIM = (
    r"[Cc]onnection (closed|reset|refused)|Socket Timeout|[Tt]imed out|[Tt]imeout|Broken pipe"
    r"|NCCL|DistBackendError|ChildFailedError|Read error|another rank has failed|SIGTERM"
    r"|pair closure|watchdog"
)


def parse_args():
    """Parse and check the command line, and find out how to reach each host."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, as passed to watched.py --into")
    add("--hosts", type=Path, help="a file with one host per line; check these hosts over ssh")
    add("--slurm-job", help="the id of a Slurm job; check its hosts with srun --overlap")
    add("--json", action="store_true", help="print the verdict as JSON")
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"run {args.run}: not a folder; pass a run's folder, such as outputs/02-ddp")
    if args.hosts and not args.hosts.is_file():
        parser.error(f"--hosts {args.hosts}: no such file; pass a file with one host per line")
    args.reach = reach_of(args.hosts, args.slurm_job)
    if not args.reach and args.hosts:
        parser.error(f"--hosts {args.hosts}: names no host; write one host per line")
    if not args.reach:
        problem = "Slurm lists no host for this job; check its id and state with squeue"
        parser.error(f"--slurm-job {args.slurm_job}: {problem}")
    return args


# ---- from ranks to findings --------------------------------------------------------------------
@dataclass
class Finding:
    """One result of the diagnosis, such as a crash or a healthy run.

    `ranks` holds the numbers of the ranks that the report names. `sure` is "certain", "likely" or
    "a guess".
    """

    kind: str
    ranks: list
    reason: str
    sure: str = "likely"
    hosts: list = field(default_factory=list)


def diagnose(facts, ranks):
    """Return the findings, at most one of each kind; the first finding becomes the verdict."""
    failure = find_failure(facts, ranks)
    hang = None if failure else find_hang(ranks)
    candidates = [
        failure,
        hang,
        find_unreachable_hosts(facts, ranks),
        find_nonfinite(ranks),
        find_differing_replicas(ranks),
        find_shared_data(ranks),
        find_loss_spike(ranks),
        find_corrupt_checkpoint(ranks),
        find_memory_leak(ranks),
        find_open_files(ranks),
        find_full_disk(facts),
    ]
    if not failure and not hang:
        candidates.append(find_straggler(ranks))
    findings = {}
    for finding in candidates:
        if finding:
            findings.setdefault(finding.kind, finding)
    return list(findings.values()) or [describe_state(facts, ranks)]


def calls_by_group(ranks):
    """Return the collectives of each process group: rank -> sequence number -> call."""
    groups = []
    for name in sorted({name for rank in ranks for name in rank.calls}):
        groups.append({rank: rank.calls[name] for rank in ranks if name in rank.calls})
    return groups


def numbers_of(ranks):
    """Return the numbers of these ranks."""
    return [rank.rank for rank in ranks]


def format_numbers(numbers):
    """Return rank numbers as a short string, such as 0-3,5."""
    spans = []
    for number in sorted(numbers):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ",".join(f"{first}" if first == last else f"{first}-{last}" for first, last in spans)


def name_ranks(numbers):
    """Return rank numbers as a phrase, such as "rank 5" or "ranks 0-3,5"."""
    noun = "rank" if len(numbers) == 1 else "ranks"
    return f"{noun} {format_numbers(numbers)}"


# ---- a run that has ended ----------------------------------------------------------------------
def cause_of(error):
    """Return the kind of an error, and its text without the traceback.

    The kind is None if the error is only a consequence of a fault elsewhere. NCCL reports the
    reason at the end of a long text, and the report shows only the start of the text, so this
    function moves the reason to the start.
    """
    error_names = r"^[\w.]*(Error|Exception|Exit|Interrupt|OutOfMemory)\b"
    starts = [match.start() for match in re.finditer(error_names, error, re.M)]
    message = " ".join(error[max(starts, default=0) :].split())
    text, _, nccl_reason = message.partition("Last error: ")
    if nccl_reason:
        text = f"{text.split(':')[0]}: {nccl_reason} ({text.strip()})"
    for kind, clue in CLUES.items():
        if re.search(clue, text):
            return kind, text
    kind = None if re.search(VICTIM, text) else "crash"
    return kind, text


def location_of_error(text):
    """Return the innermost line of training code in a traceback or in faulthandler's output."""
    # faulthandler lists the innermost frame first, so reverse the stack of the crashed thread.
    if "most recent call first" in text:
        threads = [part for part in text.split("\n\n") if "most recent call first" in part]
        current = [part for part in threads if "Current thread" in part] or threads
        text = "\n".join(reversed(current[-1].splitlines()))
    return location_of(re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', text))


def find_failure(facts, ranks):
    """Explain why ranks failed or vanished; return None if no cause is found."""
    failed = [rank for rank in ranks if rank.error and cause_of(rank.error)[0]]
    gone = [rank for rank in ranks if rank.state == "gone"]
    # Treat aborted ranks separately, because a rank often aborts after a fault on a different rank.
    aborted = [rank for rank in gone if "Aborted" in rank.crash]
    vanished = [rank for rank in gone if rank not in aborted and not rank.asked_to_end]
    if not failed and (aborted or not vanished):
        return explain_victims(ranks, aborted or [rank for rank in ranks if rank.error])
    # A failed rank writes its last heartbeat when it fails, but a vanished rank may have ended up
    # to two seconds after its last heartbeat. To make up for this difference, add three seconds to
    # the age of each rank that reported an error or a crash.
    age = {}
    for rank in failed + vanished:
        has_report = rank.error or rank.crash.strip()
        age[rank] = rank.age + (3 if has_report else 0)
    first = max(age, key=age.get)
    if first.error:
        return explain_error(facts, ranks, first, failed)
    return explain_vanished(facts, ranks, [rank for rank in vanished if age[first] - age[rank] < 4])


def explain_error(facts, ranks, first, failed):
    """Explain the error of `first`; the culprits are all ranks with an error of the same kind.

    Errors of the kind `crash` must also have the same text.
    """
    kind, text = cause_of(first.error)
    # If a gradient is not finite, all ranks stop, but their checks show which rank caused the stop.
    if kind == "not-finite" and (nonfinite := find_nonfinite(ranks)):
        return nonfinite
    culprits = [rank for rank in failed if cause_of(rank.error)[0] == kind]
    if kind == "crash":
        culprits = [rank for rank in culprits if cause_of(rank.error)[1] == text]
        if facts["free"] < FULL_DISK_BYTES:
            kind = "disk-full"
    reason = f"{text[:300]} (in step {first.step}, at {location_of_error(first.error)})"
    return Finding(kind, numbers_of(culprits), reason, "certain")


def explain_victims(ranks, victims):
    """Explain a run whose failed ranks are only victims of a fault elsewhere.

    An aborted rank may be a victim, too: NCCL's watchdog aborts innocent ranks, and Gloo aborts a
    rank that receives a tensor of the wrong size.
    """
    recorded = [rank for rank in ranks if victims and rank.calls]
    hang = explain_hang(recorded)
    if hang and hang.kind != "network":
        return hang
    for group in calls_by_group(recorded):
        if mismatch := find_unexpected_call(group):
            return mismatch
    crash = victims[0].crash if victims else ""
    if "Aborted" in crash and not re.search("torch/distributed|torch/autograd", crash):
        reason = f"{crash.splitlines()[0]}, at {location_of_error(crash)}"
        return Finding("crash", numbers_of(victims), reason)
    # Report nothing yet if a rank still runs, because it may report the cause soon, or if a rank is
    # silent, because it may be the cause.
    if not victims or any(rank.lives or rank.state == "silent" for rank in ranks):
        return None
    _, text = cause_of(victims[0].error or "aborted in a collective")
    reason = f"each failed rank only reports that it lost the other ranks: {text[:200]}"
    return Finding("network", numbers_of(victims), reason, "a guess")


def explain_vanished(facts, ranks, vanished):
    """Explain why ranks ended without reporting an error."""
    heartbeat = f"last heartbeat in step {vanished[0].step}"
    if vanished[0].phase != "other":
        heartbeat += f", phase {vanished[0].phase}"
    if crashed := [rank for rank in vanished if rank.crash.strip()]:
        crash = crashed[0].crash.strip()
        reason = f"{crash.splitlines()[0]}, at {location_of_error(crash)} ({heartbeat})"
        return Finding("segfault", numbers_of(crashed), reason, "certain")
    # A rank cannot write its error if it has no file descriptors left, or if the disk is full.
    open_files = find_open_files(ranks)
    if open_files and set(open_files.ranks) & set(numbers_of(vanished)):
        return open_files
    if full_disk := find_full_disk(facts):
        return full_disk
    reason = f"the process is gone and left no error, as after SIGKILL ({heartbeat}); read the "
    reason += f"kernel log of {vanished[0].host}: dmesg -T | grep -i -E "
    reason += "'out of memory|killed process'"
    return Finding("killed", numbers_of(vanished), reason)


def find_unreachable_hosts(facts, ranks):
    """Report ranks whose heartbeat is old and whose process cannot be seen."""
    silent = [rank for rank in ranks if rank.state == "silent"]
    if not silent:
        return None
    seconds = max(rank.age for rank in silent)
    down = unreachable_hosts(facts)
    if down:
        hosts = "; ".join(f"{host} does not answer" for host in down[:4])
    else:
        hosts = "their hosts were not checked, so pass --hosts or --slurm-job"
    reason = f"no heartbeat for {seconds:.0f} s; {hosts}"
    return Finding("host-unreachable", numbers_of(silent), reason, "certain" if down else "a guess")


def unreachable_hosts(facts):
    """Return the names of the hosts that do not answer."""
    return [host for host, answer in facts["hosts"].items() if "error" in answer]


# ---- a run that stands still -------------------------------------------------------------------
def stall_limit(ranks):
    """Return the time in seconds that a rank may stay in a phase before it counts as hung."""
    step_seconds = [rank.step_seconds for rank in ranks if rank.step_seconds]
    return max(10, 5 * median(step_seconds)) if step_seconds else 45


def find_hang(ranks):
    """Explain why the run makes no progress; return None if no hang is found."""
    if stopped := [rank for rank in ranks if rank.state == "stopped"]:
        first = stopped[0]
        reason = "SIGSTOP or a debugger has stopped the process; to continue it, run "
        reason += f"kill -CONT {first.pid}. Its last heartbeat was {first.age:.0f} s ago, at "
        reason += location_of(first.frames)
        return Finding("stopped-process", numbers_of(stopped), reason, "certain")
    living = [rank for rank in ranks if rank.lives]
    if missing := find_missing_ranks(living):
        return missing
    if not living or len(living) < len(ranks) or is_long_phase(living):
        return None
    limit = stall_limit(living)
    if any(rank.quiet <= limit or rank.phase == "compile" for rank in living):
        return None
    return explain_hang(living)


def is_long_phase(living):
    """Return whether all ranks are in the same long phase, and at least one rank seems active."""
    uses_cpu = any((rank.cpu or 0) > 0.05 for rank in living)
    is_recent = min(rank.quiet for rank in living) < 60
    phases = {rank.phase for rank in living}
    return (uses_cpu or is_recent) and len(phases) == 1 and living[0].phase in LONG_PHASES


def find_missing_ranks(living):
    """Report ranks that never started, while other ranks are waiting for them to connect."""
    joining = []
    for rank in living:
        if any(function == "init_process_group" for _, _, function in rank.frames):
            joining.append(rank)
    if not joining or min(rank.quiet for rank in joining) < 20:
        return None
    world_size = joining[0].world_size
    missing = sorted(set(range(world_size)) - set(numbers_of(living)))
    reason = f"{len(missing)} of {world_size} ranks never started, and the other ranks wait for "
    reason += "them in init_process_group; run preflight.py to test the links between the hosts"
    return Finding("rendezvous", missing, reason)


def explain_hang(ranks):
    """Explain what the ranks wait for; return None if there is no evidence."""
    for group in calls_by_group(ranks):
        if mismatch := find_mismatch(group):
            return mismatch
    late = late_ranks(ranks)
    loading = [rank for rank in late or ranks if is_loading(rank)]
    culprits = numbers_of(loading or late)
    names = name_ranks(culprits)
    positions = describe_positions(loading or late, ranks)
    if loading:
        reason = f"the next batch of {names} does not arrive. {positions}"
        sure = "certain" if late else "likely"
        return Finding("hang-in-data", culprits, reason, sure)
    if late and is_waiting(late[0]):
        reason = f"the other ranks wait in a collective that {names} left out. {positions}"
        return Finding("skipped-collective", culprits, reason)
    if late:
        kind = "unknown" if late[0].phase == "checkpoint" else "straggler"
        reason = f"the other ranks wait in a collective that {names} did not reach. {positions}"
        return Finding(kind, culprits, reason)
    if ranks and all(is_waiting(rank) for rank in ranks):
        sure = "likely" if any(rank.calls for rank in ranks) else "a guess"
        reason = f"all ranks are in the same collective, and it does not end. {positions}"
        return Finding("network", [], reason, sure)
    return None


def late_ranks(ranks):
    """Return the ranks that have not entered the collective that other ranks wait in."""
    for group in calls_by_group(ranks):
        latest = {rank: max(calls) for rank, calls in group.items()}
        front = max(latest.values())
        is_pending = any(calls[front]["pending"] for calls in group.values() if front in calls)
        if is_pending and min(latest.values()) < front:
            return [rank for rank in group if latest[rank] < front]
    # If the recorded collectives show no late rank, use the stacks: if some ranks wait in a
    # collective, the late ranks are the ranks that do not wait.
    if any(is_waiting(rank) for rank in ranks):
        return [rank for rank in ranks if rank.frames and not is_waiting(rank)]
    return []


def is_loading(rank):
    """Return whether a rank waits for its next batch."""
    return rank.phase == "data" or any("/utils/data/" in file for file, _, _ in rank.frames)


def is_waiting(rank):
    """Return whether a rank waits in a collective, according to its calls or its stack."""
    has_pending_call = any(calls[max(calls)]["pending"] for calls in rank.calls.values())
    files = [os.path.basename(file) for file, _, _ in rank.frames[-4:]]
    names = {"distributed_c10d.py", "_functional_collectives.py", "rendezvous.py"}
    return has_pending_call or not names.isdisjoint(files)


def describe_positions(culprits, ranks):
    """Describe where the culprits are, and where the other ranks wait."""
    waiting = [rank for rank in ranks if rank not in culprits and is_waiting(rank)]
    return ". ".join(describe_position(group) for group in (culprits, waiting) if group)


def describe_position(ranks):
    """Describe where a group of ranks is; the first rank's position stands for the group."""
    first = ranks[0]
    subject = name_ranks(numbers_of(ranks)).capitalize()
    verb = "has" if len(ranks) == 1 else "have"
    step = f"step {first.step}"
    if first.phase != "other":
        step = f"the {first.phase} phase of {step}"
    return (
        f"{subject} {verb} been in {step} for {first.quiet:.0f} s, at {location_of(first.frames)}"
    )


# ---- collectives that differ -------------------------------------------------------------------
def find_mismatch(group):
    """Report ranks that called a different collective than the rest of their group.

    In the record of a collective, "call" is a text: the operation with its sizes and types, then "
    at " and the line of code.
    """
    history = []
    # Start at the first collective that is still on record for all ranks.
    first_number = max(min(calls) for calls in group.values())
    last_number = max(max(calls) for calls in group.values())
    for number in range(first_number, last_number + 1):
        entries = {rank.rank: calls[number] for rank, calls in group.items() if number in calls}
        called = {rank: entry["call"] for rank, entry in entries.items()}
        is_pending = any(entry["pending"] for entry in entries.values())
        operations = {call.partition(" at ")[0] for call in called.values()}
        # Ranks may run the same operation from different lines of code. Different lines are a
        # mismatch only if the collective does not end.
        if len(operations) > 1 or (is_pending and len(set(called.values())) > 1):
            usual, count = Counter(called.values()).most_common(1)[0]
            if 2 * count > len(called):
                return explain_mismatch(number, called, usual, history, "certain")
            return explain_mismatch(number, called, predict_call(history), history, "likely")
        history += list(called.values())[:1]
    return None


def find_unexpected_call(group):
    """Report a rank whose last call breaks the pattern of its earlier calls."""
    for rank, calls in group.items():
        *history, last = [call["call"] for _, call in sorted(calls.items())]
        usual = predict_call(history)
        if usual not in (None, last):
            called = {rank.rank: last, None: usual}
            return explain_mismatch(max(calls), called, usual, history, "likely")
    return None


def explain_mismatch(number, called, usual, history, sure):
    """Report the ranks that did not make the expected call, or all ranks if none made it."""
    if usual not in called.values():
        usual = None
        sure = "a guess"
    culprits = [rank for rank, call in called.items() if call != usual]
    wrong_call = called[culprits[0]]
    other_call = usual or next(call for call in called.values() if call != wrong_call)
    names = name_ranks([rank for rank in culprits if called[rank] == wrong_call])
    reason = f"collective {number} is {wrong_call} on {names}, but {other_call} on other ranks"
    # A rank that left out a collective makes the next call instead.
    if wrong_call == predict_call([*history, usual]):
        reason = f"{names} left out a collective: {reason}"
        return Finding("skipped-collective", culprits, reason, sure)
    return Finding("mismatched-collective", culprits, reason, sure)


def predict_call(history):
    """Find where the latest calls last occurred before, and return the call that followed.

    Try the latest 64 calls first, then fewer calls; return None if even the last call is new.
    """
    for context in (64, 32, 16, 8, 4, 2, 1):
        latest = history[-context:]
        for end in range(len(history) - 1, context - 1, -1):
            if latest and history[end - context : end] == latest:
                return history[end]
    return None


# ---- a run that moves --------------------------------------------------------------------------
def find_straggler(ranks):
    """Report a rank that made other ranks wait in both halves of the last 200 collectives."""
    living = [rank for rank in ranks if rank.lives]
    older, newer = late_shares(living)
    slowest = max(newer, key=newer.get, default=None)
    for shares in (older, newer):
        others = [share for rank, share in shares.items() if rank is not slowest]
        limit = max(MIN_LATE_SHARE, 3 * max(others, default=0))
        if shares.get(slowest, 0) < limit:
            return None

    def excess(table, name):
        """Return the slowest rank's time share for `name` minus the other ranks' median share."""
        usual = median(rank.beat[table].get(name, 0) for rank in living if rank is not slowest)
        return slowest.beat[table].get(name, 0) - usual

    line = max(slowest.lines, key=lambda line: excess("lines", line))
    is_loading_slowly = excess("phases", "data") > newer[slowest] / 2
    task = "loads its data slowly" if is_loading_slowly else "is slow in its own work"
    reason = f"the other ranks wait {newer[slowest]:.0%} of the time for rank {slowest.rank}, "
    reason += f"because it {task}. "
    reason += "Compared with them, it spends more of its time at "
    reason += f"{line.rpartition('/')[2]} ({excess('lines', line):+.0%})"
    return Finding("straggler", [slowest.rank], reason, "certain")


def late_shares(living):
    """Return two dictionaries: rank -> the wait that it caused, as a share of the total time.

    The first dictionary covers the older half of the last 200 collectives, and the second
    dictionary covers the newer half. If there are several process groups, both dictionaries
    describe the group with the largest share in the newer half.
    """
    largest = {}, {}
    for group in calls_by_group(living):
        numbers = sorted(set.intersection(*map(set, group.values())))[-200:]
        if len(group) < 2 or len(numbers) < 20:
            continue
        middle = len(numbers) // 2
        older = shares_of(group, numbers[:middle])
        newer = shares_of(group, numbers[middle:])
        if max(newer.values(), default=0) > max(largest[1].values(), default=0):
            largest = older, newer
    return largest


def shares_of(group, numbers):
    """Return the wait that each rank of a group caused, as a share of the total time.

    The last rank to call a collective makes the other ranks wait. The wait starts when the first
    rank calls the collective or when the previous collective ends, whichever is later.
    """
    offsets = clock_offsets(group)
    waits = {rank: [] for rank in group}
    begin = None
    end = 0.0
    for number in numbers:
        called = {}
        for rank, calls in group.items():
            called[rank] = calls[number]["called"] + offsets[rank.host]
        first_time = min(called.values())
        last = max(called, key=called.get)
        waits[last].append(max(0, called[last] - max(end, first_time)))
        end = max(end, called[last])
        if begin is None:
            begin = first_time
    # Ignore the two longest times that other ranks waited for a rank, because that rank may have
    # been saving a checkpoint.
    late = {rank: sum(sorted(seconds)[:-2]) for rank, seconds in waits.items()}

    # NCCL also records how long each collective takes on the device; prefer these durations if all
    # of them are known. A duration includes the wait for the last rank, so a rank that often
    # arrives last has a small total.
    durations = {}
    for rank, calls in group.items():
        durations[rank] = [calls[number]["milliseconds"] for number in numbers]
    if all(None not in milliseconds for milliseconds in durations.values()):
        total = {rank: sum(milliseconds) for rank, milliseconds in durations.items()}
        longest = max(total.values())
        late = {rank: (longest - total[rank]) / 1000 for rank in total}

    span = end - begin
    return {rank: seconds / span for rank, seconds in late.items()} if span > 1 else {}


def clock_offsets(ranks):
    """Return the seconds to add to each host's times, so that all times refer to a common clock.

    The common clock is the clock of the file system that holds the run's folder. If all ranks are
    on one host, the clock of that host is the common clock.
    """
    offsets = defaultdict(list)
    for rank in ranks:
        offsets[rank.host].append(rank.beat["written"] - rank.beat["time"])
    if len(offsets) == 1:
        return dict.fromkeys(offsets, 0.0)
    return {host: median(seconds) for host, seconds in offsets.items()}


# ---- wrong numbers -----------------------------------------------------------------------------
def find_nonfinite(ranks):
    """Report the ranks whose own loss or gradient was not finite in the first affected step."""
    affected = [rank for rank in ranks if rank.bad]
    if not affected:
        return None
    step = min(rank.bad["step"] for rank in affected)
    first = [rank for rank in affected if rank.bad["step"] == step]
    with_loss = [rank for rank in first if not math.isfinite(rank.bad["loss"])]
    quantity = "loss" if with_loss else "gradient"
    culprits = numbers_of(with_loss or first)
    reason = (
        f"in step {step}, the {quantity} of {name_ranks(culprits)} was not finite, even before "
    )
    reason += "the average over all ranks"
    return Finding("not-finite", culprits, reason, "certain")


def checks_by_step(ranks):
    """Return the checks in the order of their steps: step -> rank -> check."""
    checks = defaultdict(dict)
    for rank in ranks:
        for check in rank.checks:
            checks[check["step"]][rank] = check
    return dict(sorted(checks.items()))


def find_differing_replicas(ranks):
    """Report replicas that differ; replicas are ranks that hold the same part of the model."""
    for step, checks in checks_by_step(ranks).items():
        for shard in {rank.shard for rank in checks}:
            checksums = {}
            for rank, check in checks.items():
                if rank.shard == shard:
                    checksums[rank] = check["weights"]
            usual, count = Counter(checksums.values()).most_common(1)[0]
            wrong = [rank for rank, checksum in checksums.items() if checksum != usual]
            if not wrong:
                continue
            if count > len(wrong):
                culprits = numbers_of(wrong)
                reason = f"in step {step}, the weights of {name_ranks(culprits)} differ from those "
                reason += "of most replicas"
                return Finding("replicas-differ", culprits, reason, "certain")
            # Without a majority, report nothing until all living replicas have checked this step,
            # because a missing check may decide the vote.
            replicas = [rank for rank in ranks if rank.lives and rank.shard == shard]
            if all(rank in checksums for rank in replicas):
                culprits = numbers_of(checksums)
                reason = f"in step {step}, the weights of {name_ranks(culprits)} differ, although "
                reason += "these ranks are replicas, and no majority shows which weights are right"
                return Finding("replicas-differ", culprits, reason, "certain")
    return None


def find_shared_data(ranks):
    """Report ranks that had the same input in the last two checks."""
    complete = [check for check in checks_by_step(ranks).values() if len(check) == len(ranks)]
    if len(complete) < 2:
        return None
    ranks_by_input = defaultdict(list)
    for rank in ranks:
        hashes = tuple(check[rank]["data"] for check in complete[-2:])
        ranks_by_input[hashes].append(rank)
    for hashes, same in ranks_by_input.items():
        # A hash of 0 means that the rank hashed no input.
        if len(same) > 1 and all(hashes):
            culprits = numbers_of(same)
            reason = f"{name_ranks(culprits)} train on the same tokens"
            return Finding("same-data", culprits, reason, "certain")
    return None


def find_loss_spike(ranks):
    """Report ranks whose loss was far above the loss of most ranks in the last two checks."""
    spikes = Counter()
    for checks in list(checks_by_step(ranks).values())[-2:]:
        losses = {rank: mean(check["losses"]) for rank, check in checks.items()}
        usual = median_low(losses.values())
        limit = usual + max(0.5, 0.25 * usual)
        spikes.update(rank for rank, loss in losses.items() if loss > limit)
    affected = [rank for rank in ranks if spikes[rank] == 2]
    if not affected or 2 * len(affected) >= len(ranks):
        return None
    culprits = numbers_of(affected)
    reason = f"the loss of {name_ranks(culprits)} was far above the loss of most ranks, in two "
    reason += "checks in a row"
    return Finding("loss-spike", culprits, reason, "likely")


def find_corrupt_checkpoint(ranks):
    """Report a checkpoint that a rank could not read since the run last started."""
    for rank in ranks:
        for line in rank.printed:
            if re.search(CLUES["corrupt-checkpoint"], line):
                return Finding("corrupt-checkpoint", [], line[:300], "certain")
    return None


# ---- exhausted resources -----------------------------------------------------------------------
def find_memory_leak(ranks):
    """Report ranks whose host memory grows steadily."""
    leaking = []
    for rank in ranks:
        memory = rank.memory[-6:]
        rises = [after > before + 0.02 for before, after in pairwise(memory)]
        growth = memory[-1] - memory[0]
        is_steady = len(rises) > 2 and sum(rises) >= len(rises) - 1
        if is_steady and growth > max(MIN_LEAK_GIB, 0.5 * memory[0]):
            leaking.append(rank)
    if not leaking:
        return None
    first = leaking[0]
    reason = f"the host memory of rank {first.rank} keeps growing; its latest values are "
    reason += f"{first.memory[-6:]} GiB"
    return Finding("host-memory-leak", numbers_of(leaking), reason, "likely")


def find_open_files(ranks):
    """Report ranks that have far more open files than other ranks, or are near their limit."""
    fewest = min((rank.open_files or 0 for rank in ranks), default=0)
    affected = []
    for rank in ranks:
        limit = min(0.8 * rank.files_limit, fewest + 400)
        if (rank.open_files or 0) > limit:
            affected.append(rank)
    if not affected:
        return None
    first = affected[0]
    reason = f"rank {first.rank} has {first.open_files} open files, and its limit is "
    reason += f"{first.files_limit}"
    return Finding("too-many-open-files", numbers_of(affected), reason, "likely")


def find_full_disk(facts):
    """Report that the disk of the run's folder is almost full."""
    if facts["free"] >= FULL_DISK_BYTES:
        return None
    reason = f"the disk of {facts['run']} has only {facts['free'] / 2**20:.0f} MiB free"
    return Finding("disk-full", [], reason, "certain")


# ---- no fault ----------------------------------------------------------------------------------
def describe_state(facts, ranks):
    """Describe a run without a known fault; the kind is `unknown` if a fault may exist."""
    if not ranks:
        reason = f"no rank has written to {facts['run']}/ranks; run the script under watched.py, "
        reason += "or test with preflight.py whether its ranks can connect"
        return Finding("unknown", [], reason)
    if all(rank.end == "finished" for rank in ranks):
        if any(rank.asked_to_end for rank in ranks):
            reason = f"the run stopped on request in step {ranks[0].step}; the same command "
            reason += "continues it"
            return Finding("interrupted", numbers_of(ranks), reason, "certain")
        return Finding("finished", numbers_of(ranks), "the run has finished", "certain")

    ended = [rank for rank in ranks if not rank.lives]
    if ended:
        culprits = numbers_of(ended)
        reason = f"{name_ranks(culprits)} ended, and no rank has reported why yet; ask again in a "
        reason += "few seconds"
        return Finding("unknown", culprits, reason)

    seconds = max(rank.quiet for rank in ranks)
    if seconds > 20 and is_long_phase(ranks):
        reason = f"all ranks have been in the {ranks[0].phase} phase for {seconds:.0f} s, and they "
        reason += "still work"
        return Finding("slow-but-healthy", [], reason)
    is_compiling = any(rank.phase == "compile" for rank in ranks)
    if seconds > stall_limit(ranks) and not is_compiling:
        reason = f"some ranks have made no progress for {seconds:.0f} s, and no cause was found"
        return Finding("unknown", [], reason)

    reason = f"the run is in step {max(rank.step for rank in ranks)}"
    step_seconds = [rank.step_seconds for rank in ranks if rank.step_seconds]
    if step_seconds:
        reason += f", and each step takes {median(step_seconds):.3g} s"
    return Finding("healthy", [], reason, "certain" if step_seconds else "likely")


# ---- report ------------------------------------------------------------------------------------
def judge(facts):
    """Judge collected facts; return the verdict as a dictionary, and the ranks by number."""
    ranks = ranks_of(facts)
    findings = diagnose(facts, list(ranks.values()))
    for finding in findings:
        if finding.kind == "network":
            finding.hosts = unreachable_hosts(facts)
        else:
            hosts = {ranks[number].host for number in finding.ranks if number in ranks}
            finding.hosts = sorted(hosts)
    first, *others = findings
    return vars(first) | {"also": [vars(finding) for finding in others]}, ranks


def status_of(verdict):
    """Return the exit status that belongs to a verdict."""
    if verdict["kind"] == "unknown":
        return 3
    return 0 if verdict["kind"] in NO_FAULT else 1


def show(facts, verdict, ranks):
    """Print the state of the ranks, in groups, and the verdict last."""
    groups = defaultdict(list)
    for rank in ranks.values():
        detail = cause_of(rank.error)[1][:200] if rank.error else f"at {location_of(rank.frames)}"
        state = f"{rank.state:8} {rank.phase:10} step {rank.step:<6} {detail}"
        groups[state].append(rank)
    print(f"{facts['run']}: {len(ranks)} ranks")
    # The smallest groups come first, because the culprit is seldom in a large group.
    for state, members in sorted(groups.items(), key=lambda item: len(item[1]))[:12]:
        print(f"  {format_numbers(numbers_of(members)):8} {state}")
    for rank in ranks.values():
        if rank.fault:
            error = rank.fault.splitlines()[-1]
            print(f"note: rank {rank.rank}: watched.py stopped its checks after an error: {error}")
    for host in unreachable_hosts(facts):
        print(f"note: {host} does not answer: {facts['hosts'][host]['error']}")
    for other in verdict["also"]:
        print(f"also: {other['kind']}{who(other)}: {other['reason']}")
    print(f"\n{verdict['kind'].upper()}{who(verdict)} ({verdict['sure']})")
    print(f"  {verdict['reason']}")
    if verdict["kind"] not in NO_FAULT:
        print(f"  read {FAULTS_PAGE}#{verdict['kind']}")


def who(finding):
    """Return the ranks and the hosts of a finding as text, such as " rank 3 on node7"."""
    ranks = finding["ranks"]
    hosts = finding["hosts"]
    text = ""
    if ranks:
        text += f" {name_ranks(ranks)}"
    if hosts:
        text += f" on {', '.join(hosts[:8])}"
    if len(hosts) > 8:
        text += f" and {len(hosts) - 8} more"
    return text


def main():
    """Print the verdict on a run, and exit with the status of the verdict."""
    args = parse_args()
    facts = gather(args.run, args.reach)
    verdict, ranks = judge(facts)
    if args.json:
        print(json.dumps(verdict, indent=1))
    else:
        show(facts, verdict, ranks)
    sys.exit(status_of(verdict))


if __name__ == "__main__":
    main()
