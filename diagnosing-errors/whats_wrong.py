#!/usr/bin/env python3
"""Say what is wrong with a run that hangs, has died or is slow: what, which rank, which host.

Here:     python diagnosing-errors/whats_wrong.py outputs/02-ddp
By ssh:   python diagnosing-errors/whats_wrong.py outputs/my-run --hosts hosts.txt
Slurm:    python diagnosing-errors/whats_wrong.py outputs/my-run --slurm-job 123

It judges what facts.py, which must lie beside it, collects from the run's folder and its hosts.
Exit status: 0 nothing found, 1 a fault was found, 2 wrong arguments, 3 cannot tell.
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

from facts import gather, place, ranks_of, reach_of

CATALOGUE = "diagnosing-errors/faults.md"  # has a section for each kind of finding
NO_FAULT = ("healthy", "slow-but-healthy", "finished", "interrupted")
LATE = 0.2  # the share of its time that the others wait for a rank which is called slow
LEAK = 0.3  # GiB of host memory that a leak must have grown by, and half of what was there
FULL = 2**24  # bytes; a disk with fewer free is full
REST = ("start", "compile", "evaluation", "checkpoint", "export")  # which may take minutes
CLUES = {  # what errors say, in the order in which to look
    "not-finite": r"not finite",
    "device-out-of-memory": r"CUDA out of memory|OutOfMemoryError|_ALLOC_FAILED"
    r"|CUDA error: out of memory|Cuda failure \S+ 'out of memory'|cudaErrorMemoryAllocation"
    r"|DefaultCPUAllocator: can't allocate",  # for training on a CPU, that is the device
    "too-many-open-files": r"[Tt]oo many open files|EMFILE",
    "disk-full": r"No space left on device|[Dd]isk quota exceeded|ENOSPC",
    "host-memory-leak": r"Cannot allocate memory|\bMemoryError|bad_alloc",
    "mismatched-collective": r"Detected mismatch between collectives|op\.preamble\.length",
    "rendezvous": r"Unable to find address for|RendezvousTimeout|[Nn]o socket interface"
    r"|client socket has (failed|timed out)|C10d store has failed",
    "corrupt-checkpoint": r"no checkpoint in \S+ can be read|PytorchStreamReader failed"
    r"|cannot be read, so the one before",
    "interrupted": r"KeyboardInterrupt",
}
VICTIM = (  # who says this suffers from what happened elsewhere
    r"[Cc]onnection (closed|reset|refused)|Socket Timeout|[Tt]imed out|[Tt]imeout|Broken pipe"
    r"|NCCL|DistBackendError|ChildFailedError|Read error|another rank has failed|SIGTERM"
    r"|pair closure|watchdog"
)


def parse_args():
    """Return the arguments, checked."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    add = parser.add_argument
    add("run", type=Path, help="the run's folder, which watched.py was told with --into")
    add("--hosts", type=Path, help="a file that names a host per line, each reached over ssh")
    add("--slurm-job", help="look on the hosts of this job, by srun --overlap")
    add("--json", action="store_true", help="print the verdict as JSON")
    args = parser.parse_args()
    if not args.run.is_dir():
        parser.error(f"{args.run} is no folder; give that of a run, such as outputs/02-ddp")
    if args.hosts and not args.hosts.is_file():
        parser.error(f"there is no file {args.hosts}")
    args.reach = reach_of(args)
    if not args.reach:
        parser.error("no host is named there, or Slurm knows none of this job any more")
    return args


# ---- from ranks to findings --------------------------------------------------------------------
@dataclass
class Finding:
    """One thing that is wrong, or that nothing is; `sure`: certain, likely or a guess."""

    kind: str
    ranks: list
    reason: str
    sure: str = "likely"
    hosts: list = field(default_factory=list)


def found_in(kind, some, reason, sure="certain"):
    """Return the finding of these ranks, or nothing if there are none."""
    return Finding(kind, numbers(some), reason, sure) if some else None


def find(facts, everyone):
    """Return the findings, one of a kind; the first explains the others."""
    ended = died(facts, everyone)
    stuck = None if ended else hung(everyone)
    found = [ended, stuck, unreachable(facts, everyone)]
    found += [not_finite(everyone), replicas(everyone), same_data(everyone), spike(everyone)]
    found += [unread(everyone), leak(everyone), many_files(everyone), full_disk(facts)]
    found += [None if ended or stuck else slowed(everyone)]
    kinds = {}
    for each in filter(None, found):
        kinds.setdefault(each.kind, each)
    return list(kinds.values()) or [at_rest(facts, everyone)]


def groups_of(some):
    """Return who has called what, for each process group: rank -> number -> call."""
    names = sorted({name for one in some for name in one.calls})
    return [{one: one.calls[name] for one in some if name in one.calls} for name in names]


def numbers(some):
    """Return the numbers of ranks."""
    return [one.rank for one in some]


def spans(ranks):
    """Return numbers of ranks as a short list: 0-3,5."""
    parts = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][1] + 1:
            parts[-1][1] = rank
        else:
            parts.append([rank, rank])
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in parts)


# ---- a run that has ended ----------------------------------------------------------------------
def cause_of(error):
    """Return the kind of fault that an error tells of, None if of one elsewhere, and its text.

    That is without the stack of a traceback; NCCL's reason, which it gives last, comes first.
    """
    starts = r"^[\w.]*(Error|Exception|Exit|Interrupt|OutOfMemory)\b"
    begin = max((found.start() for found in re.finditer(starts, error, re.M)), default=0)
    start, _, reason = " ".join(error[begin:].split()).partition("Last error: ")
    said = f"{start.split(':')[0]}: {reason} ({start.strip()})" if reason else start
    for kind, clue in CLUES.items():
        if re.search(clue, said):
            return kind, said
    return None if re.search(VICTIM, said) else "crash", said


def place_of_error(text):
    """Return the innermost line of training code in the text of a traceback or of faulthandler."""
    if "most recent call first" in text:  # the thread that crashed, turned round
        threads = [part for part in text.split("\n\n") if "most recent call first" in part]
        current = [part for part in threads if "Current thread" in part] or threads
        text = "\n".join(reversed(current[-1].splitlines()))
    return place(re.findall(r'File "([^"]+)", line (\d+),? in (\S+)', text))


def died(facts, everyone):
    """Return what ended the run: the first error that is a rank's own, or the first to vanish."""
    own = [one for one in everyone if one.error and cause_of(one.error)[0]]
    gone = [one for one in everyone if one.state == "gone"]
    aborted = [one for one in gone if "Aborted" in one.crash]  # often because of another rank
    vanished = [one for one in gone if one not in aborted and not one.asked_to_end]
    if not own and (aborted or not vanished):
        return of_victims(everyone, aborted or [one for one in everyone if one.error])
    # Who failed has said so at once; who vanished was last heard from up to two seconds before.
    ago = {one: one.age + (3 if one.error or one.crash.strip() else 0) for one in own + vanished}
    first = max(ago, key=ago.get)
    if first.error:
        return of_error(facts, everyone, first, own)
    return of_vanished(facts, everyone, [one for one in vanished if ago[first] - ago[one] < 4])


def of_error(facts, everyone, first, own):
    """Return the finding of an error that is a rank's own."""
    kind, said = cause_of(first.error)
    if kind == "not-finite" and (bad := not_finite(everyone)):
        return bad  # all stop for it, and some may have had no time to say so
    same = [one for one in own if cause_of(one.error)[0] == kind]
    if kind == "crash":
        same = [one for one in same if cause_of(one.error)[1] == said]
        kind = "disk-full" if facts["free"] < FULL else kind
    reason = f"{said[:300]} (in step {first.step}, at {place_of_error(first.error)})"
    return Finding(kind, numbers(same), reason, "certain")


def of_victims(everyone, some):
    """Return why ranks ended none of which has an error of its own.

    NCCL's watchdog and gloo, which was sent another size than it waits for, abort innocent ranks.
    """
    called = [one for one in everyone if some and one.calls]
    hang = blocked(called)
    if hang and hang.kind != "network":
        return hang
    for members in groups_of(called):
        if odd := unusual(members):
            return odd
    crash = "".join(one.crash for one in some[:1])
    if "Aborted" in crash and not re.search("torch/distributed|torch/autograd", crash):
        reason = f"{crash.splitlines()[0]}, at {place_of_error(crash)}"
        return Finding("crash", numbers(some), reason)
    if not some or any(one.lives or one.state == "silent" for one in everyone):
        return None  # the others may be about to say why, or be the reason
    said = cause_of(some[0].error or "aborted in a collective")[1][:200]
    reason = f"no rank has an error of its own; all that failed lost the others: {said}"
    return Finding("network", numbers(some), reason, "a guess")


def of_vanished(facts, everyone, gone):
    """Return the finding of ranks that ended without a word."""
    last = f"last heard from in step {gone[0].step}"
    last += "" if gone[0].phase == "other" else f", {gone[0].phase}"
    if crashed := [one for one in gone if one.crash.strip()]:
        text = crashed[0].crash.strip()
        reason = f"{text.splitlines()[0]}, at {place_of_error(text)} ({last})"
        return Finding("segfault", numbers(crashed), reason, "certain")
    files = many_files(everyone)
    if files and set(files.ranks) & set(numbers(gone)):
        return files  # no file was left for a last word
    if full := full_disk(facts):
        return full  # nor room for one
    reason = f"killed by signal 9 (SIGKILL): the process is gone and left no error ({last}); ask "
    reason += f"the kernel on {gone[0].host}: dmesg -T | grep -i -E 'out of memory|killed process'"
    return Finding("killed", numbers(gone), reason)


def unreachable(facts, everyone):
    """Return the finding of ranks of which nothing is heard any more, nor of their processes."""
    lost = [one for one in everyone if one.state == "silent"]
    down = [f"{x} does not answer" for x, fact in facts["hosts"].items() if "error" in fact]
    told = "; ".join(down[:4]) or "their hosts were not looked at: give --hosts or --slurm-job"
    reason = f"silent for {max((one.age for one in lost), default=0):.0f} s; {told}"
    return found_in("host-unreachable", lost, reason, "certain" if down else "a guess")


# ---- a run that stands still -------------------------------------------------------------------
def limit_of(everyone):
    """Return how many seconds a phase may last before a run counts as standing still."""
    steps = [one.step_seconds for one in everyone if one.step_seconds]
    return max(10, 5 * median(steps)) if steps else 45


def hung(everyone):
    """Return why the run stands still; nothing if it moves."""
    if stopped := [one for one in everyone if one.state == "stopped"]:
        reason = f"the process is stopped, by SIGSTOP or a debugger, at {place(stopped[0].frames)};"
        reason += f" kill -CONT {stopped[0].pid} lets it go on"
        return Finding("stopped-process", numbers(stopped), reason, "certain")
    living = [one for one in everyone if one.lives]
    if apart := not_met(living):
        return apart
    if len(living) < len(everyone) or not living or takes_long(living):
        return None
    limit = limit_of(living)
    moves = any(one.quiet <= limit or one.phase == "compile" for one in living)
    return None if moves else blocked(living)


def takes_long(living):
    """Return whether all ranks are in something that is no step, and some rank works in it."""
    works = any((one.cpu or 0) > 0.05 for one in living) or min(x.quiet for x in living) < 60
    return works and len({one.phase for one in living}) == 1 and living[0].phase in REST


def not_met(living):
    """Return the finding of ranks that others wait for at the start, and which never came."""
    joining = [one for one in living if any(f[2] == "init_process_group" for f in one.frames)]
    if not joining or min(one.quiet for one in joining) < 20:
        return None
    missing = sorted(set(range(joining[0].world_size)) - set(numbers(living)))
    reason = f"the others wait in init_process_group; {len(missing)} never started; "
    return Finding("rendezvous", missing, f"{reason}preflight.py tells which links work")


def blocked(still):
    """Return why ranks that stand still do: who is not where the others wait, and where it is."""
    for members in groups_of(still):
        if found := differing(members):
            return found
    late = late_ranks(still)
    in_data = [one for one in late or still if one.phase == "data" or
               any("/utils/data/" in frame[0] for frame in one.frames)]  # fmt: skip
    some = numbers(in_data or late)
    where = standing(in_data or late, still)
    if in_data:
        reason = f"waits for its next batch. {where}"
        return Finding("hang-in-data", some, reason, "certain" if late else "likely")
    if late and waits(late[0]):
        return Finding("skipped-collective", some, f"went on without the others. {where}")
    if late:
        kind = "unknown" if late[0].phase == "checkpoint" else "straggler"
        return Finding(kind, some, f"has not come to where the others wait. {where}")
    if still and all(waits(one) for one in still):
        sure = "likely" if any(one.calls for one in still) else "a guess"
        reason = f"all are in the same collective, and it does not end. {where}"
        return Finding("network", [], reason, sure)
    return None


def late_ranks(still):
    """Return the ranks that have not entered the collective which others wait in."""
    for members in groups_of(still):
        last = {one: max(calls) for one, calls in members.items()}
        front = max(last.values())
        pends = any(calls.get(front, {}).get("pending") for calls in members.values())
        if pends and min(last.values()) < front:
            return [one for one in members if last[one] < front]
    free = [one for one in still if one.frames and not waits(one)]
    return free if any(waits(one) for one in still) else []


def waits(one):
    """Return whether a rank waits in a collective, as far as its calls and its stack tell."""
    pending = any(calls[max(calls)]["pending"] for calls in one.calls.values())
    names = ("distributed_c10d.py", "_functional_collectives.py", "rendezvous.py")
    return pending or any(os.path.basename(frame[0]) in names for frame in one.frames[-4:])


def standing(some, still):
    """Return where some ranks stand, and the others that wait: of each the first one's line."""
    others = [one for one in still if one not in some and waits(one)]
    return ". ".join(
        f"Rank{'s' * (len(each) > 1)} {spans(numbers(each))}: {each[0].phase} of step "
        f"{each[0].step}, for {each[0].quiet:.0f} s at {place(each[0].frames)}"
        for each in (some, others)
        if each
    )


# ---- collectives that differ -------------------------------------------------------------------
def differing(members):
    """Return the finding if ranks of a process group called different collectives, else None.

    A call is text: operation, sizes and, after " at ", the line.
    """
    history = []
    for number in range(max(map(min, members.values())), max(map(max, members.values())) + 1):
        made = {one.rank: calls[number] for one, calls in members.items() if number in calls}
        called = {rank: call["call"] for rank, call in made.items()}
        pends = any(call["pending"] for call in made.values())
        operations = {call.partition(" at ")[0] for call in called.values()}
        if len(operations) > 1 or (len(set(called.values())) > 1 and pends):
            usual, most = Counter(called.values()).most_common(1)[0]
            if 2 * most > len(called):
                return of_difference(number, called, usual, history, "certain")
            return of_difference(number, called, predicted(history), history, "likely")
        history += list(called.values())[:1]
    return None


def unusual(members):
    """Return the finding if the last call of a rank is not what followed before, else nothing."""
    for one, calls in members.items():
        *history, last = [call["call"] for _, call in sorted(calls.items())]
        usual = predicted(history)
        if usual not in (None, last):
            called = {one.rank: last, None: usual}
            return of_difference(max(calls), called, usual, history, "likely")
    return None


def of_difference(number, called, usual, history, sure):
    """Return who did not call what is usual; everyone, if no call is."""
    if usual not in called.values():
        usual, sure = None, "a guess"
    wrong = [rank for rank, call in called.items() if call != usual]
    odd = called[wrong[0]]
    other = usual or next(call for call in called.values() if call != odd)
    reason = f"{odd} as collective {number}, where others call {other}"
    if odd == predicted([*history, usual]):
        return Finding("skipped-collective", wrong, f"left one out: {reason}", sure)
    return Finding("mismatched-collective", wrong, f"calls {reason}", sure)


def predicted(history):
    """Return the call that followed the last time when the latest ones came in this order."""
    for context in (64, 32, 16, 8, 4, 2, 1):
        latest = history[-context:]
        for end in range(len(history) - 1, context - 1, -1):
            if latest and history[end - context : end] == latest:
                return history[end]
    return None


# ---- a run that moves --------------------------------------------------------------------------
def slowed(everyone):
    """Return the rank that the others waited for in the last collectives, and in those before."""
    living = [one for one in everyone if one.lives]
    before, now = lateness(living)
    worst = max(now, key=now.get, default=None)
    for shares in (before, now):
        rest = max((share for one, share in shares.items() if one != worst), default=0)
        if shares.get(worst, 0) < max(LATE, 3 * rest):
            return None

    def more(what, name):
        usual = median(one.beat[what].get(name, 0) for one in living if one is not worst)
        return worst.beat[what].get(name, 0) - usual

    line = max(worst.lines, key=lambda line: more("lines", line))
    task = "waiting for data" if more("phases", "data") > now[worst] / 2 else "its own work"
    reason = f"slow in {task}: the others wait for it {now[worst]:.0%} of the time; it spends more "
    reason += f"of its time than they do at {line.rpartition('/')[2]} ({more('lines', line):+.0%})"
    return Finding("straggler", [worst.rank], reason, "certain")


def lateness(living):
    """Return for each rank the share of the time that others waited for it, or nothing, twice.

    First in the older half of the last 200 collectives, then in the newer one.
    """
    most = {}, {}
    for members in groups_of(living):
        common = sorted(set.intersection(*map(set, members.values())))[-200:]
        if len(members) > 1 and len(common) >= 20:
            older, newer = common[: len(common) // 2], common[len(common) // 2 :]
            halves = shares_of(members, older), shares_of(members, newer)
            most = max(most, halves, key=lambda each: max(each[1].values(), default=0))
    return most


def shares_of(members, common):
    """Return for each rank of a group the share of its time that others waited for it.

    Who calls a collective last makes the others wait, from when the first of them called it, or
    from when the collective before it could end. The two longest waits of each rank do not count:
    it may have saved something. On NCCL, who comes last waits least.
    """
    waits, ended = {one: [] for one in members}, 0.0
    ahead = {one: shift(one, members) for one in members}
    called = [{one: calls[n]["called"] + ahead[one] for one, calls in members.items()}
              for n in common]  # fmt: skip
    for at in called:
        last = max(at, key=at.get)
        waits[last].append(max(0, at[last] - max(ended, min(at.values()))))
        ended = max(ended, at[last])
    late = {one: sum(sorted(some)[:-2]) for one, some in waits.items()}
    spent = {one: [calls[n]["milliseconds"] for n in common] for one, calls in members.items()}
    if all(None not in some for some in spent.values()):
        longest = max(map(sum, spent.values()))
        late = {one: (longest - sum(some)) / 1000 for one, some in spent.items()}
    span = ended - min(called[0].values())
    return {one: seconds / span for one, seconds in late.items() if span > 1}


def shift(one, everyone):
    """Return what to add to a rank's times, so that they are by the clock of the run's folder."""
    if len({other.host for other in everyone}) == 1:
        return 0.0
    return median(x.beat["written"] - x.beat["time"] for x in everyone if x.host == one.host)


# ---- wrong numbers -----------------------------------------------------------------------------
def not_finite(everyone):
    """Return the finding of the ranks whose own loss or gradient was the first not to be finite."""
    step = min((one.bad["step"] for one in everyone if one.bad), default=0)
    first = [one for one in everyone if one.bad and one.bad["step"] == step]
    losses = [one for one in first if not math.isfinite(one.bad["loss"])]
    what = "loss" if losses else "gradient"
    reason = f"step {step}: this rank's own {what} was not finite, before it was reduced"
    return found_in("not-finite", losses or first, reason)


def checks_of(everyone):
    """Return the checks in the order of steps: step -> rank -> check."""
    found = defaultdict(dict)
    for one in everyone:
        for check in one.checks:
            found[check["step"]][one] = check
    return dict(sorted(found.items()))


def replicas(everyone):
    """Return the finding of weights that differ on ranks which have the same part of the model."""
    for step, checks in checks_of(everyone).items():
        for part in {one.shard for one in checks}:
            sums = {one: check["weights"] for one, check in checks.items() if one.shard == part}
            usual, count = Counter(sums.values()).most_common(1)[0]
            some = [one for one, value in sums.items() if value != usual]
            reason = f"step {step}: these weights differ from those of their replicas"
            if some and count <= len(some):
                if any(one.lives and one.shard == part and one not in sums for one in everyone):
                    continue  # it will say which of them is wrong
                some, reason = list(sums), f"step {step}: one of these replicas has wrong weights"
            if some:
                return found_in("replicas-differ", some, reason)
    return None


def same_data(everyone):
    """Return the finding of ranks that had the same input in the last two steps looked at."""
    checks = [each for each in checks_of(everyone).values() if len(each) == len(everyone)][-2:]
    shown = defaultdict(list)
    for one in everyone if len(checks) == 2 else ():
        shown[tuple(check[one]["data"] for check in checks)].append(one)
    alike = [some for inputs, some in shown.items() if len(some) > 1 and all(inputs)]
    return found_in("same-data", alike[0] if alike else [], "they get the same tokens")


def spike(everyone):
    """Return the finding of ranks whose loss was far above that of most, in two looks."""
    looks = Counter()
    for checks in list(checks_of(everyone).values())[-2:]:
        means = {one: mean(check["losses"]) for one, check in checks.items()}
        usual = median_low(means.values())
        looks.update(x for x, loss in means.items() if loss > usual + max(0.5, 0.25 * usual))
    some = [one for one in everyone if looks[one] == 2]
    few = some if 2 * len(some) < len(everyone) else []
    return found_in("loss-spike", few, "its own loss was far above other ranks', twice", "likely")


def unread(everyone):
    """Return the finding of a checkpoint that this start of the run could not read."""
    printed = [line for one in everyone for line in one.printed]
    lines = [line for line in printed if re.search(CLUES["corrupt-checkpoint"], line)]
    return Finding("corrupt-checkpoint", [], lines[0][:300], "certain") if lines else None


# ---- what is used up ---------------------------------------------------------------------------
def leak(everyone):
    """Return the finding of ranks whose host memory grows all the time, not just once."""
    grown = []
    for one in everyone:
        values = one.memory[-6:]
        rises = [after > before + 0.02 for before, after in pairwise(values)]
        by = values[-1] - values[0]
        if len(rises) > 2 and sum(rises) >= len(rises) - 1 and by > max(LEAK, 0.5 * values[0]):
            grown.append(one)
    told = grown[0].memory[-6:] if grown else []
    return found_in("host-memory-leak", grown, f"memory keeps growing: {told} GiB", "likely")


def many_files(everyone):
    """Return the finding of ranks with so many open files that soon no other can be opened."""
    usual = min((one.open_files or 0 for one in everyone), default=0) + 400
    many = [x for x in everyone if (x.open_files or 0) > min(0.8 * x.files_limit, usual)]
    told = [f"{one.open_files} files are open, of {one.files_limit} at most" for one in many[:1]]
    return found_in("too-many-open-files", many, "".join(told), "likely")


def full_disk(facts):
    """Return the finding of a disk with no room for a checkpoint."""
    reason = f"{facts['run']} has {facts['free'] / 2**20:.0f} MiB free"
    return Finding("disk-full", [], reason, "certain") if facts["free"] < FULL else None


# ---- nothing wrong -----------------------------------------------------------------------------
def at_rest(facts, everyone):
    """Return what is the case where nothing is wrong, or that this cannot be told."""
    if not everyone:
        reason = f"no rank has written to {facts['run']}/ranks: was the script run by watched.py? "
        return Finding("unknown", [], reason + "Did the launchers meet? preflight.py tells")
    if all(one.end == "finished" for one in everyone):
        if any(one.asked_to_end for one in everyone):
            reason = f"stopped at step {everyone[0].step}, as asked; the same command goes on"
            return Finding("interrupted", numbers(everyone), reason, "certain")
        return Finding("finished", numbers(everyone), "the run has finished", "certain")
    longest, ended = max(one.quiet for one in everyone), [x for x in everyone if not x.lives]
    if not ended and longest > 20 and takes_long(everyone):
        reason = f"all ranks have been in {everyone[0].phase} for {longest:.0f} s, and work"
        return Finding("slow-but-healthy", [], reason)
    compiles = any(one.phase == "compile" for one in everyone)
    if ended or (longest > limit_of(everyone) and not compiles):
        reason = f"some ranks have made no progress for {longest:.0f} s, and nothing shows why"
        reason = "these ranks have ended, the others have not yet: ask again" if ended else reason
        return Finding("unknown", numbers(ended), reason)
    steps = [one.step_seconds for one in everyone if one.step_seconds]
    pace = f", in {median(steps):.3g} s each" if steps else ""
    reason = f"the ranks take steps, now {max(one.step for one in everyone)}{pace}"
    return Finding("healthy", [], reason, "certain" if steps else "likely")


# ---- report ------------------------------------------------------------------------------------
def judge(facts):
    """Return the verdict on collected facts, as a dictionary, and the ranks."""
    ranks = ranks_of(facts)
    found = find(facts, list(ranks.values()))
    down = [name for name, fact in facts["hosts"].items() if "error" in fact]
    for each in found:
        hosts = {ranks[rank].host for rank in each.ranks if rank in ranks}
        each.hosts = down if each.kind == "network" else sorted(hosts)
    first, *others = found
    more = {"section": f"{CATALOGUE}#{first.kind}", "also": [vars(other) for other in others]}
    return vars(first) | more, ranks


def show(facts, verdict, ranks):
    """Print the ranks by what they do, and the verdict last."""
    groups = defaultdict(list)
    for one in ranks.values():
        at = cause_of(one.error)[1][:200] if one.error else f"at {place(one.frames)}"
        groups[f"{one.state:8} {one.phase:10} step {one.step:<6} {at}"].append(one)
    print(f"{facts['run']}: {len(ranks)} ranks")
    for told, some in sorted(groups.items(), key=lambda each: len(each[1]))[:12]:
        print(f"  {spans(numbers(some)):8} {told}")
    for one in ranks.values():
        if one.fault:
            print(f"note: rank {one.rank} is watched in part: {one.fault.splitlines()[-1]}")
    for name, fact in facts["hosts"].items():
        if "error" in fact:
            print(f"note: {name} does not answer: {fact['error']}")
    for other in verdict["also"]:
        print(f"also: {other['kind']}{who(other)}: {other['reason']}")
    print(f"\n{verdict['kind'].upper()}{who(verdict)} ({verdict['sure']})")
    print(f"  {verdict['reason']}\n  read {verdict['section']}")


def who(finding):
    """Return the ranks and hosts of a finding, as text."""
    ranks, hosts = finding["ranks"], finding["hosts"]
    text = f" rank{'s' * (len(ranks) > 1)} {spans(ranks)}" if ranks else ""
    shown = ", ".join(hosts[:8]) + (f" and {len(hosts) - 8} more" if len(hosts) > 8 else "")
    return text + (f" on {shown}" if hosts else "")


def main():
    args = parse_args()
    facts = gather(args)
    verdict, ranks = judge(facts)
    if args.json:
        print(json.dumps(verdict, indent=1))
    else:
        show(facts, verdict, ranks)
    sys.exit(3 if verdict["kind"] == "unknown" else int(verdict["kind"] not in NO_FAULT))


if __name__ == "__main__":
    main()
