#!/usr/bin/env python3
"""Diagnose a run that hangs, has died or is slow: name the fault, the rank, the host and the line.

Here:     python diagnosing-errors/whats_wrong.py outputs/02-ddp
By ssh:   python diagnosing-errors/whats_wrong.py outputs/my-run --hosts hosts.txt
Slurm:    scontrol show hostnames "$SLURM_JOB_NODELIST" > hosts.txt, then the same

facts.py, in the same folder, collects facts from the run's folder and its hosts. This script judges
these facts. Its exit status is 0 if there is no fault, 1 if there is a fault, 2 if the arguments
are wrong, and 3 if it cannot find the cause.
"""

import argparse
import json
import math
import re
import sys
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from statistics import mean, median, median_low

from facts import gather, location_of, ranks_of, reach_of

# This page has a section for each kind of finding that is a fault, and for `unknown`.
FAULTS_PAGE = "diagnosing-errors/faults.md"
NO_FAULT = ("healthy", "finished", "interrupted")

# A rank counts as a straggler only if the other ranks spend at least this share of their time
# waiting for it.
MIN_LATE_SHARE = 0.2
# Host memory counts as leaking if it grows steadily over the latest values (at most six), by more
# than this amount and by more than 50%.
MIN_LEAK_GIB = 0.3
# A disk counts as full if it has fewer free bytes than this number.
FULL_DISK_BYTES = 2**24
# These phases may take minutes in a healthy run.
LONG_PHASES = ("start", "compile", "evaluation", "checkpoint", "export")

# Map each kind of error to a pattern. An error has the first kind whose pattern matches its text.
# The kind None means that the error is only a consequence of a fault elsewhere.
CLUES = {
    "not-finite": r"not finite",
    # In a run on CPUs, the device is the CPU, so an error of PyTorch's CPU allocator also means
    # that the device is out of memory.
    "device-out-of-memory": r"out of memory|OutOfMemoryError|_ALLOC_FAILED|MemoryAllocation"
    r"|DefaultCPUAllocator: can't allocate",
    "too-many-open-files": r"[Tt]oo many open files|EMFILE",
    # If the disk is full, torch.save() reports only an unexpected position in the file.
    "disk-full": r"No space left on device|[Dd]isk quota exceeded|ENOSPC|unexpected pos \d+ vs \d+",
    "host-memory-leak": r"Cannot allocate memory|\bMemoryError|bad_alloc",
    "mismatched-collective": r"Detected mismatch between collectives|op\.preamble\.length",
    "rendezvous": r"Unable to find address for|RendezvousTimeout|[Nn]o socket interface"
    r"|client socket has (failed|timed out)|C10d store has failed",
    "corrupt-checkpoint": r"step-\d+:? cannot (be read|read it)|cannot read its checkpoints"
    r"|PytorchStreamReader",
    "interrupted": r"KeyboardInterrupt",
    None: r"(?i)connection (closed|reset|refused)|timed out|timeout|broken pipe|read error|NCCL"
    r"|pair closure|DistBackendError|ChildFailedError|another rank has failed|SIGTERM|watchdog",
    "crash": "",
}


def parse_args():
    """Parse and check the command line; return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, as passed to watched.py --into")
    add("--hosts", type=Path, help="a file with one host per line; check these hosts over ssh")
    add("--json", action="store_true", help="print the verdict as JSON")
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"run {args.run}: not a folder; pass a run's folder, such as outputs/02-ddp")
    if args.hosts and not args.hosts.is_file():
        parser.error(f"--hosts {args.hosts}: no such file; pass a file with one host per line")
    return args


# ---- from ranks to findings --------------------------------------------------------------------
def finding(kind, ranks, reason, sure="likely"):
    """Return a result of the diagnosis, such as a crash or a healthy run, as a dictionary.

    `ranks` are the ranks that the report names. `sure` is "certain", "likely" or "a guess".
    """
    return {
        "kind": kind,
        "ranks": [rank.rank for rank in ranks],
        "reason": reason,
        "sure": sure,
        "hosts": sorted({rank.host for rank in ranks}),
    }


def diagnose(facts, ranks):
    """Return the verdict: the first finding, with a list of the findings of other kinds as "also".

    Each function that looks for a fault returns a finding, or None if it does not find the fault.
    """
    if not ranks:
        reason = f"no rank has written to {facts['run']}/ranks; run the script under watched.py, "
        reason += "or test with preflight.py whether its ranks can connect"
        return finding("unknown", [], reason) | {"also": []}
    standstill = find_failure(ranks) or find_hang(ranks)
    candidates = [
        # Put a full disk first, because a rank that fails on a full disk may be unable to record
        # its error.
        find_full_disk(facts),
        standstill,
        find_unreachable_hosts(facts, ranks),
        find_nonfinite(ranks),
        find_differing_replicas(ranks),
        find_shared_data(ranks),
        find_loss_spike(ranks),
        find_corrupt_checkpoint(ranks),
        find_memory_leak(ranks),
        None if standstill else find_straggler(ranks),
    ]
    found = [candidate for candidate in candidates if candidate] or [describe_state(ranks)]
    verdict = found[0]
    if verdict["kind"] == "network":
        verdict["hosts"] = list(unreachable_hosts(facts))
    return verdict | {"also": [other for other in found if other["kind"] != verdict["kind"]]}


def shorten(items):
    """Join the first eight items with commas; if there are more items, append their number."""
    more = f" and {len(items) - 8} more" if len(items) > 8 else ""
    return ", ".join(map(str, items[:8])) + more


def name_ranks(numbers):
    """Return the numbers of ranks as a short phrase, such as "rank 5" or "ranks 0, 1, 3"."""
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {shorten(numbers)}"


def names_of(ranks):
    """Return the numbers of `ranks` as a short phrase, such as "rank 5" or "ranks 0, 1, 3"."""
    return name_ranks([rank.rank for rank in ranks])


def calls_by_group(ranks):
    """Return a list with a dictionary for each process group: rank -> sequence number -> call."""
    groups = defaultdict(dict)
    for rank in ranks:
        for name, calls in rank.calls.items():
            groups[name][rank] = calls
    return [groups[name] for name in sorted(groups)]


# ---- a run that has ended ----------------------------------------------------------------------
def cause_of(error):
    """Return the kind of an error, and the error's text without the traceback.

    The kind is None if the error is only a consequence of a fault elsewhere. NCCL writes the reason
    at the end of a long text, and this script prints only the start of an error's text. So move
    NCCL's reason to the start.
    """
    error_names = r"^[\w.]*(Error|Exception|Exit|Interrupt|OutOfMemory)\b"
    starts = [match.start() for match in re.finditer(error_names, error, re.M)]
    message = " ".join(error[max(starts, default=0) :].split())
    text, _, nccl_reason = message.partition("Last error: ")
    if nccl_reason:
        text = f"{text.split(':')[0]}: {nccl_reason} ({text.strip()})"
    return next(kind for kind, clue in CLUES.items() if re.search(clue, text)), text


def location_of_error(text):
    """Return the innermost line of training code in a traceback or in faulthandler's output."""
    # faulthandler lists the innermost frame first, so reverse the stack of the crashed thread.
    if "Current thread" in text:
        stack = text.partition("Current thread")[2].partition("\n\n")[0]
        text = "\n".join(reversed(stack.splitlines()))
    return location_of(re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', text))


def find_failure(ranks):
    """Return a finding about why ranks have failed or vanished.

    Return None if no rank has failed or vanished, or if no cause is known yet.
    """
    failed = [rank for rank in ranks if rank.error and cause_of(rank.error)[0]]
    # A rank that aborts in a collective is often a victim: NCCL's watchdog aborts innocent ranks,
    # and Gloo aborts a rank that receives a tensor of the wrong size.
    in_collective = re.compile("Aborted.*torch/(distributed|autograd)", re.DOTALL)
    gone = [rank for rank in ranks if rank.state == "gone" and not rank.asked_to_end]
    aborted = [rank for rank in gone if in_collective.search(rank.crash)]
    vanished = [rank for rank in gone if rank not in aborted]
    if not failed and (aborted or not vanished):
        return explain_victims(ranks, aborted or [rank for rank in ranks if rank.error])
    # A failed rank writes its last heartbeat when it fails, but a vanished rank may have ended up
    # to two seconds after its last heartbeat. So add three seconds to the age of each rank with an
    # error. Add them for a rank with a crash, too, because this rank has left a reason.
    age = {rank: rank.age + 3 * bool(rank.error or rank.crash) for rank in failed + vanished}
    first = max(age, key=age.get)
    if first.error:
        return explain_error(ranks, first, failed)
    return explain_vanished([rank for rank in vanished if age[first] - age[rank] < 4])


def explain_error(ranks, first, failed):
    """Report the error of the rank `first`, and the ranks in `failed` with an error of this kind.

    For the kind `crash`, report only the ranks whose errors also have the same text. For the kind
    `not-finite`, return the finding of find_nonfinite(), if there is one.
    """
    kind, text = cause_of(first.error)
    # If a gradient is not finite, all ranks stop, but their checks show which rank caused the stop.
    if kind == "not-finite" and (nonfinite := find_nonfinite(ranks)):
        return nonfinite
    culprits = [rank for rank in failed if cause_of(rank.error)[0] == kind]
    if kind == "crash":
        culprits = [rank for rank in culprits if cause_of(rank.error)[1] == text]
    reason = f"{text[:300]} (in step {first.step}, at {location_of_error(first.error)})"
    return finding(kind, culprits, reason, "certain")


def explain_victims(ranks, victims):
    """Report the fault that made the ranks in `victims` fail, although their errors do not show it.

    Return None if `victims` is empty. Also return None if the recorded collectives show no fault,
    and a rank may still report the cause.
    """
    recorded = [rank for rank in ranks if rank.calls and victims]
    hang = explain_hang(recorded)
    if hang and hang["kind"] != "network":
        return hang
    for group in calls_by_group(recorded):
        if mismatch := find_unexpected_call(group, victims):
            return mismatch
    # Report nothing yet if a rank still runs, because it may report the cause soon, or if a rank is
    # silent, because it may be the cause.
    if victims and not any(rank.lives or rank.state == "silent" for rank in ranks):
        reason = "each failed rank only reports that it lost the other ranks"
        return finding("network", victims, reason, "a guess")


def explain_vanished(vanished):
    """Report why ranks ended without a Python error: they crashed in C code, or were killed."""
    heartbeat = f"last heartbeat in {vanished[0].position}"
    if crashed := [rank for rank in vanished if rank.crash]:
        error, _, stacks = crashed[0].crash.partition("\n")
        reason = f"{error}, at {location_of_error(stacks)} ({heartbeat})"
        return finding("segfault", crashed, reason, "certain")
    reason = f"the process is gone and left no error, as after SIGKILL ({heartbeat})"
    return finding("killed", vanished, reason)


def find_unreachable_hosts(facts, ranks):
    """Report ranks whose heartbeat is old, and whose process this script could not look up."""
    if silent := [rank for rank in ranks if rank.state == "silent"]:
        errors = unreachable_hosts(facts)
        answers = shorten([f"{host} does not answer: {error}" for host, error in errors.items()])
        reason = f"no heartbeat for {max(rank.age for rank in silent):.0f} s; "
        reason += answers or "their hosts were not checked, so pass --hosts"
        return finding("host-unreachable", silent, reason, "certain" if errors else "a guess")


def unreachable_hosts(facts):
    """Map each host that does not answer to its error."""
    hosts = facts["hosts"].items()
    return {host: answer["error"] for host, answer in hosts if "error" in answer}


# ---- a run that stands still -------------------------------------------------------------------
def stall_limit(ranks):
    """Return the seconds that a rank may spend in one phase of a step before it is stalled."""
    return max(10, 5 * (ranks[0].step_seconds or 9))


def may_take_minutes(ranks):
    """Return whether a run that makes no progress for minutes may be healthy.

    The run may be healthy if a rank compiles. Otherwise, all ranks must be in the same phase of
    LONG_PHASES, and at least one rank must use its CPU or have entered the phase in the last
    minute.
    """
    phases = {rank.phase for rank in ranks}
    is_active = any(rank.cpu > 0.05 or rank.quiet < 60 for rank in ranks)
    is_long_phase = len(phases) == 1 and ranks[0].phase in LONG_PHASES
    return "compile" in phases or (is_long_phase and is_active)


def find_hang(ranks):
    """Report why the run is stalled; return None if it is not stalled, or if no reason shows."""
    if stopped := [rank for rank in ranks if rank.state == "stopped"]:
        first = stopped[0]
        reason = "SIGSTOP or a debugger has stopped the process; to continue it, run "
        reason += f"kill -CONT {first.pid}. It is at {location_of(first.frames)}"
        return finding("stopped-process", stopped, reason, "certain")
    world_size = ranks[0].world_size
    missing = sorted(set(range(world_size)) - {rank.rank for rank in ranks})
    if missing and all(rank.phase == "start" and rank.quiet > 20 for rank in ranks):
        reason = f"{len(missing)} of {world_size} ranks never started, and the other ranks wait"
        return finding("rendezvous", [], reason) | {"ranks": missing}
    limit = stall_limit(ranks)
    is_still = all(rank.lives and rank.quiet > limit for rank in ranks)
    return explain_hang(ranks) if is_still and not may_take_minutes(ranks) else None


def explain_hang(ranks):
    """Report why the ranks of a stalled run wait; return None if no reason shows."""
    for group in calls_by_group(ranks):
        if mismatch := find_mismatch(group):
            return mismatch
    late = late_ranks(ranks)
    if loading := [rank for rank in late or ranks if rank.phase == "data"]:
        reason = f"the next batch does not arrive ({stay_of(loading[0])})"
        return finding("hang-in-data", loading, reason, "certain" if late else "likely")
    if late:
        kind = "skipped-collective" if is_waiting(late[0]) else "straggler"
        reason = "the other ranks wait in a collective that these ranks have not called "
        return finding(kind, late, f"{reason}({stay_of(late[0])})")
    if ranks and all(is_waiting(rank) for rank in ranks):
        reason = f"all ranks wait in the same collective ({stay_of(ranks[0])})"
        return finding("network", [], reason)


def late_ranks(ranks):
    """Return the ranks that have not entered the collective that other ranks wait in."""
    for group in calls_by_group(ranks):
        latest = {rank: max(calls) for rank, calls in group.items()}
        front = max(latest.values())
        is_pending = any(calls[front]["pending"] for calls in group.values() if front in calls)
        if is_pending and min(latest.values()) < front:
            return [rank for rank in group if latest[rank] < front]
    # The recorded collectives show no late rank. So a rank counts as late if it does not wait in a
    # collective, while other ranks do.
    active = [rank for rank in ranks if not is_waiting(rank)]
    return active if len(active) < len(ranks) else []


def is_waiting(rank):
    """Return whether a rank waits in a collective, according to its phase or its calls."""
    has_pending_call = any(calls[max(calls)]["pending"] for calls in rank.calls.values())
    return has_pending_call or rank.phase == "collective"


def stay_of(rank):
    """Describe how long a rank has been in its phase, and which line of code it runs."""
    return f"{rank.quiet:.0f} s in {rank.position}, at {location_of(rank.frames)}"


# ---- collectives that differ -------------------------------------------------------------------
def find_mismatch(group):
    """Report ranks that called a different collective than the other ranks of their group.

    In the record of a collective, "call" is a text such as "all_reduce [[5]] Float at train.py:3
    main". It has the operation, usually the sizes and types of the inputs, and the line of code.
    """
    history = []
    # Start at the first collective that is still on record for all ranks.
    first_number = max(min(calls) for calls in group.values())
    last_number = max(max(calls) for calls in group.values())
    for number in range(first_number, last_number + 1):
        entries = {rank: calls[number] for rank, calls in group.items() if number in calls}
        ranks_by_call = defaultdict(list)
        for rank, entry in entries.items():
            ranks_by_call[entry["call"]].append(rank)
        is_pending = any(entry["pending"] for entry in entries.values())
        operations = {call.partition(" at ")[0] for call in ranks_by_call}
        # Ranks may run the same operation from different lines of code. Different lines are a
        # mismatch only if the collective has not ended.
        if len(operations) > 1 or (is_pending and len(ranks_by_call) > 1):
            return explain_mismatch(number, ranks_by_call, history)
        history += list(ranks_by_call)[:1]


def find_unexpected_call(group, victims):
    """Report a rank whose last call differs from the call that its earlier calls predict.

    Assume that the ranks in `victims` made the predicted call, because a rank that aborts leaves no
    record of its last calls.
    """
    for rank, calls in group.items():
        *history, last = [call["call"] for _, call in sorted(calls.items())]
        expected = predict_call(history)
        if expected not in (None, last):
            return explain_mismatch(max(calls), {last: [rank], expected: victims}, history)


def explain_mismatch(number, ranks_by_call, history):
    """Report the ranks that did not make the expected call, or all ranks if no rank made it.

    The expected call is the call of more than half of the ranks. If there is no such call, it is
    the call that `history` predicts.
    """
    # Put the smallest groups of ranks first, because the culprit is seldom in a large group.
    groups = sorted(ranks_by_call.items(), key=lambda item: len(item[1]))
    expected, majority = groups[-1]
    sure = "certain"
    if 2 * len(majority) <= sum(map(len, ranks_by_call.values())):
        expected = predict_call(history)
        sure = "likely" if expected in ranks_by_call else "a guess"
    wrong = {call: ranks for call, ranks in groups if call != expected}
    calls = [f"{call} on {names_of(ranks)}" for call, ranks in groups[:3]]
    reason = f"collective {number} is {', but '.join(calls)}"
    # A rank that skipped the expected collective has made the call that should follow it.
    is_next_call = predict_call([*history, expected]) in wrong
    kind = "skipped-collective" if is_next_call else "mismatched-collective"
    culprits = [rank for ranks in wrong.values() for rank in ranks]
    return finding(kind, culprits, reason, sure)


def predict_call(history):
    """Return the call that came next the last time that the latest calls in `history` occurred.

    Search `history` for the latest 64 calls first, then for fewer calls. Return None if even the
    last call has not occurred before.
    """
    for context in (64, 32, 16, 8, 4, 2, 1):
        latest = history[-context:]
        for end in range(len(history) - 1, context - 1, -1):
            if latest and history[end - context : end] == latest:
                return history[end]
    return None


# ---- a run that moves --------------------------------------------------------------------------
def find_straggler(ranks):
    """Report a rank that the other ranks of its group spend much time waiting for.

    Both halves of the latest collectives, which are at most 200, must show this.
    """
    for group in calls_by_group([rank for rank in ranks if rank.lives]):
        numbers = sorted(set.intersection(*map(set, group.values())))[-200:]
        if len(group) < 2 or len(numbers) < 20:
            continue
        middle = len(numbers) // 2
        older = late_shares(group, numbers[:middle])
        newer = late_shares(group, numbers[middle:])
        slowest = max(newer, key=newer.get)
        if stands_out(slowest, older) and stands_out(slowest, newer):
            others = [rank for rank in group if rank is not slowest]
            reason = f"the other ranks wait {newer[slowest]:.0%} of the time for this rank, which "
            reason += f"spends more of its time at {describe_excess(slowest, others)}"
            return finding("straggler", [slowest], reason, "certain")


def stands_out(rank, shares):
    """Return whether a rank's share is at least MIN_LATE_SHARE, and three times every other share.

    `shares` maps each rank to the share of the time that other ranks have waited for it.
    """
    others = [share for other, share in shares.items() if other is not rank]
    return shares[rank] >= max(MIN_LATE_SHARE, 3 * max(others))


def describe_excess(slowest, others):
    """Return, as text, the line where `slowest` spends the most extra time, and the extra share.

    The extra share of a line is the share of time that `slowest` spends there, minus the median of
    the shares that the ranks in `others` spend there.
    """
    excess = {}
    for line, share in slowest.lines.items():
        excess[line] = share - median(rank.lines.get(line, 0) for rank in others)
    line = max(excess, key=excess.get)
    return f"{line} ({excess[line]:+.0%})"


def late_shares(group, numbers):
    """Return, for each rank of a group, the share of the time that other ranks waited for it.

    Count only the collectives whose sequence numbers are in `numbers`.
    """
    durations = {}
    for rank, calls in group.items():
        durations[rank] = [calls[number]["milliseconds"] for number in numbers]
    if all(None not in times for times in durations.values()):
        # NCCL records how long each collective takes on the device. This duration includes the wait
        # for the last rank, so a rank that often arrives last has a small sum of durations.
        longest = max(map(sum, durations.values()))
        late = {rank: (longest - sum(times)) / 1000 for rank, times in durations.items()}
    else:
        late = waits_by_cause(group, numbers)
    times = [calls[number]["called"] for calls in group.values() for number in numbers]
    # Divide by at least a second, because waits in a shorter time do not show that a rank is slow.
    return {rank: seconds / max(1.0, max(times) - min(times)) for rank, seconds in late.items()}


def waits_by_cause(group, numbers):
    """Return, for each rank, the number of seconds that other ranks of the group waited for it.

    The last rank to call a collective makes the other ranks wait. The wait starts when the first
    rank calls the collective, but not before all ranks have called the previous collective.
    """
    # Report no waits if the ranks run on several hosts, because the hosts' clocks differ.
    if len({rank.host for rank in group}) > 1:
        return dict.fromkeys(group, 0.0)
    waits = {rank: [] for rank in group}
    end = 0.0
    for number in numbers:
        called = {rank: calls[number]["called"] for rank, calls in group.items()}
        last = max(called, key=called.get)
        start = max(end, min(called.values()))
        waits[last].append(max(0, called[last] - start))
        end = max(start, called[last])
    # Ignore the two longest times that other ranks waited for a rank, because that rank may have
    # been saving a checkpoint.
    return {rank: sum(sorted(seconds)[:-2]) for rank, seconds in waits.items()}


# ---- wrong numbers -----------------------------------------------------------------------------
def find_nonfinite(ranks):
    """Report the ranks that were the first to have a loss or a gradient that was not finite.

    Each rank has checked its own loss and gradients, before any average over ranks.
    """
    if affected := [rank for rank in ranks if rank.bad]:
        step = min(rank.bad["step"] for rank in affected)
        first = [rank for rank in affected if rank.bad["step"] == step]
        value = "gradient" if math.isfinite(first[0].bad["loss"]) else "loss"
        reason = f"in step {step}, the {value} was not finite, even before the average over ranks"
        return finding("not-finite", first, reason, "certain")


def common_checks(ranks):
    """Return the checks of the steps that all ranks have checked: step -> rank -> check."""
    checks = defaultdict(dict)
    for rank in ranks:
        for check in rank.checks:
            checks[check["step"]][rank] = check
    return {step: checks[step] for step in sorted(checks) if len(checks[step]) == len(ranks)}


def find_differing_replicas(ranks):
    """Report replicas whose weights differ; replicas are ranks that should hold equal weights."""
    replicas_of = defaultdict(list)
    for rank in ranks:
        replicas_of[rank.shard].append(rank)
    for step, checks in common_checks(ranks).items():
        for replicas in replicas_of.values():
            checksums = Counter(checks[rank]["weights"] for rank in replicas)
            usual, count = checksums.most_common(1)[0]
            differing = [rank for rank in replicas if checks[rank]["weights"] != usual]
            if differing:
                # If no majority of the replicas has equal weights, nothing shows which weights are
                # right, so report all replicas.
                has_majority = count > len(differing)
                reason = f"in step {step}, the weights differ from those of other replicas"
                culprits = differing if has_majority else replicas
                return finding("replicas-differ", culprits, reason, "certain")


def find_shared_data(ranks):
    """Report two or more ranks whose inputs were equal in each of the last two checks."""
    last_checks = list(common_checks(ranks).values())[-2:]
    ranks_by_input = defaultdict(list)
    for rank in ranks:
        hashes = tuple(checks[rank]["data"] for checks in last_checks)
        ranks_by_input[hashes].append(rank)
    for hashes, same in ranks_by_input.items():
        # A hash of 0 means that the rank hashed no input.
        if len(same) > 1 and len(hashes) == 2 and all(hashes):
            return finding("same-data", same, "these ranks train on the same tokens", "certain")


def find_loss_spike(ranks):
    """Report ranks whose loss was far above the median loss in each of the last two checks."""
    spikes = Counter()
    for checks in list(common_checks(ranks).values())[-2:]:
        losses = {rank: mean(check["losses"]) for rank, check in checks.items()}
        usual = median_low(losses.values())
        limit = usual + max(0.5, 0.25 * usual)
        spikes.update(rank for rank, loss in losses.items() if loss > limit)
    affected = [rank for rank in ranks if spikes[rank] == 2]
    if affected and 2 * len(affected) < len(ranks):
        reason = "the loss was far above the loss of most ranks, in two checks in a row"
        return finding("loss-spike", affected, reason)


def find_corrupt_checkpoint(ranks):
    """Report a checkpoint that a rank could not read since the run last started."""
    for line in [line for rank in ranks for line in rank.printed]:
        if re.search(CLUES["corrupt-checkpoint"], line):
            return finding("corrupt-checkpoint", [], line[:300], "certain")


# ---- exhausted resources -----------------------------------------------------------------------
def find_memory_leak(ranks):
    """Report ranks whose host memory grows steadily."""
    leaking = [rank for rank in ranks if is_growing(rank.memory[-6:])]
    if leaking:
        reason = f"the latest values of the host memory are {leaking[0].memory[-6:]} GiB"
        return finding("host-memory-leak", leaking, reason)


def is_growing(memory):
    """Return whether a rank's host memory grows steadily and enough to be a leak.

    `memory` has the rank's latest values in GiB, the oldest first.
    """
    rises = [after > before + 0.02 for before, after in pairwise(memory)]
    is_steady = len(rises) > 2 and sum(rises) >= len(rises) - 1
    return is_steady and memory[-1] - memory[0] > max(MIN_LEAK_GIB, 0.5 * memory[0])


def find_full_disk(facts):
    """Report that the disk of the run's folder is almost full."""
    if facts["free"] < FULL_DISK_BYTES:
        reason = f"the disk of {facts['run']} has only {facts['free'] / 2**20:.0f} MiB free"
        return finding("disk-full", [], reason, "certain")


# ---- no fault ----------------------------------------------------------------------------------
def describe_state(ranks):
    """Return a finding about a run without a known fault.

    The kind of the finding is `unknown` if the run may have a fault.
    """
    if all(rank.end == "finished" for rank in ranks):
        reason = f"all ranks have ended without an error, after step {ranks[0].step}"
        return finding("finished", ranks, reason, "certain")
    limit = math.inf if may_take_minutes(ranks) else stall_limit(ranks)
    if still := [rank for rank in ranks if not rank.lives or rank.quiet > limit]:
        reason = "these ranks have ended or make no progress, and no rank has reported why yet; "
        return finding("unknown", still, reason + "ask again in a few seconds")
    reason = f"the run is in step {max(rank.step for rank in ranks)}"
    if step_seconds := ranks[0].step_seconds:
        reason += f", and each step takes {step_seconds:.3g} s"
    return finding("healthy", [], reason, "certain" if step_seconds else "likely")


# ---- report ------------------------------------------------------------------------------------
def show(facts, verdict, ranks):
    """Print the state of each group of ranks, then the findings in "also", and then the verdict.

    The ranks of a group have the same state. Print at most 12 groups.
    """
    groups = defaultdict(list)
    for rank in ranks:
        detail = cause_of(rank.error)[1][:200] if rank.error else f"at {location_of(rank.frames)}"
        groups[f"{rank.state}, in {rank.position}, {detail}"].append(rank)
    print(f"{facts['run']}: {len(ranks)} ranks")
    # Put the smallest groups of ranks first, because the culprit is seldom in a large group.
    for state, members in sorted(groups.items(), key=lambda item: len(item[1]))[:12]:
        print(f"  {names_of(members)}: {state}")
    for other in verdict["also"]:
        print(f"also: {other['kind']}{who(other)}: {other['reason']}")
    print(f"\n{verdict['kind'].upper()}{who(verdict)} ({verdict['sure']})")
    print(f"  {verdict['reason']}")
    if verdict["kind"] not in NO_FAULT:
        print(f"  read {FAULTS_PAGE}#{verdict['kind']}")


def who(found):
    """Return the ranks and the hosts of a finding as text, such as " rank 3 on node7"."""
    ranks = f" {name_ranks(found['ranks'])}" if found["ranks"] else ""
    hosts = f" on {shorten(found['hosts'])}" if found["hosts"] else ""
    return ranks + hosts


def main():
    """Print the verdict on a run, and exit with the status of the verdict."""
    args = parse_args()
    facts = gather(args.run, reach_of(args.hosts))
    ranks = ranks_of(facts)
    verdict = diagnose(facts, ranks)
    if args.json:
        print(json.dumps(verdict, indent=1))
    else:
        show(facts, verdict, ranks)
    statuses = dict.fromkeys(NO_FAULT, 0) | {"unknown": 3}
    sys.exit(statuses.get(verdict["kind"], 1))


if __name__ == "__main__":
    main()
