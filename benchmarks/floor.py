"""Name what a step of chapter 01 takes above the bare loop's, part by part.

Here:  python benchmarks/floor.py --output benchmarks/results/floor.json
       python benchmarks/floor.py --compile

The chapter's own train_step and a bare step take turns, in one process, each on a 7M Llama of its
own, on the same samples. What each calls is timed; on a GPU each call is waited for. Shares are of
the bare step, medians over all steps. Compiled, the bare loop's model is one graph, and the
chapter's one per layer.
"""

import json
import sys
import time
from collections import Counter
from functools import partial, wraps
from statistics import median

import torch

from contenders import Race, settle
from speed import describe_machine, keep, measured_apart, parser_of

PARTS = ("batch", "forward", "backward", "norm and clip", "AdamW", "the rest")


class Clock:
    """Adds up the seconds of what it is told to time."""

    def __init__(self, device):
        self.device, self.seconds = device, Counter()

    def timed(self, name, work):
        """Return `work` so that the seconds it takes are added to this part's."""

        @wraps(work)
        def timed_work(*args, **options):
            begun = time.perf_counter()
            result = work(*args, **options)
            settle(self.device)
            self.seconds[name] += time.perf_counter() - begun
            return result

        return timed_work

    def step(self, work, *args):
        """Return the seconds of the parts of a step."""
        self.seconds.clear()
        self.timed("step", work)(*args)
        parts = dict(self.seconds)
        whole = parts.pop("step")
        return parts | {"the rest": whole - sum(parts.values())}


def bare_step(forward, args, model, optimizer, samples, step, device):
    """Take a step as contenders.py's bare loop does, on samples that lie on the device."""
    batch = samples.split(args.global_batch_size)[step - 1]
    with torch.autocast(device.type, torch.bfloat16):
        loss = forward(input_ids=batch, labels=batch, use_cache=False).loss
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
    optimizer.step()
    optimizer.zero_grad()


def measure():
    """Take steps of both; print the seconds of their parts, which are medians."""
    race = Race()
    args, device, chapter, clock = race.args, race.device, race.script, Clock(race.device)
    ours = chapter.build_model(args, race.config).to(device)
    bare = race.model().to(device)
    bare.set_attn_implementation("causal_sdpa")
    forward = clock.timed("forward", torch.compile(bare) if args.compile else bare)
    ours.forward = clock.timed("forward", ours.forward)
    for name in ("get_total_norm", "clip_grads_with_norm_", "clip_grad_norm_"):
        work = clock.timed("norm and clip", getattr(torch.nn.utils, name))
        setattr(torch.nn.utils, name, work)
    chapter.batch_at = clock.timed("batch", chapter.batch_at)
    torch.Tensor.backward = clock.timed("backward", torch.Tensor.backward)

    steps = {"chapter 01": (chapter.train_step, ours), "bare": (partial(bare_step, forward), bare)}
    optimizers = {name: race.optimizer(model)[0] for name, (_, model) in steps.items()}
    for optimizer in optimizers.values():
        optimizer.step = clock.timed("AdamW", optimizer.step)
    samples, rows = race.samples.to(device), {name: [] for name in steps}
    for step in range(1, args.num_steps + 1):
        for name, (take, model) in steps.items():
            inputs = args, model, optimizers[name], samples, step, device
            rows[name].append(clock.step(take, *inputs))
    found = {}
    for name, some in rows.items():
        warm = some[len(some) // 4 :]
        found[name] = {part: median(row.get(part, 0.0) for row in warm) for part in PARTS}
    print(json.dumps(found))


def main():
    """Measure in a process with the harness's settings; print a row per part."""
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="of each; the first quarter warms up")
    parser.add_argument("--compile", action="store_true", help="both, as chapter 01 and as one")
    args = parser.parse_args()
    found = measured_apart(__file__, args.steps, *["--compile"] * args.compile)
    ours, bare = found["chapter 01"], found["bare"]
    whole = sum(bare.values())
    for part in PARTS:
        print(f"{part:16} {ours[part] / whole:7.1%} {bare[part] / whole:7.1%}")
    print(f"{'a step':16} {sum(ours.values()) / whole:7.1%} {1:7.1%}")
    keep(args.output, describe_machine(), {"parts": found})


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:  # as which it starts itself anew
        del sys.argv[1]
        measure()
    else:
        main()
