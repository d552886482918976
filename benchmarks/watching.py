"""Measure what it costs a step of chapter 03 to be watched, by its watchdog and its health checks.

Here:  python benchmarks/watching.py --output benchmarks/results/watching-cpu-2cores.json

The difference of two runs would be lost in the noise of a shared machine. So two ranks call each
part many times by itself, in the process that also takes whole steps, and it is counted as often
as a step has it. Collectives are timed with torch's Flight Recorder in one start, and without it
in another.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from speed import describe_machine

SCRIPT = Path(__file__).resolve().parent.parent / "03-job-launchers/train_llm.py"
LINE = "--device cpu --precision fp32 --num-steps 100000 -e run --save-dir"
STEPS = 20
HEARTBEAT = 2  # seconds from one to the next, as in the script


def parse_args():
    """Return the arguments."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=formatter)
    parser.add_argument("--on-a-rank", metavar="FOLDER", help="used by itself")
    parser.add_argument("--output", type=Path, help="a JSON file for the machine and all rows")
    return parser.parse_args()


# ---- on each rank ----------------------------------------------------------------------------


def load_chapter():
    """Return chapter 03's script as a module."""
    spec = importlib.util.spec_from_file_location("chapter_03", SCRIPT)
    sys.modules[spec.name] = module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seconds(work, repeats):
    """Return the median of the seconds that a call takes."""
    times = []
    for _ in range(repeats):
        begun = time.perf_counter()
        work()
        times.append(time.perf_counter() - begun)
    return statistics.median(times)


def measure(chapter, folder):
    """Return the seconds of a step of `make train`'s model, and of each part of watching it."""
    sys.argv = [str(SCRIPT), *LINE.split(), folder]
    args = chapter.parse_args()
    device = chapter.setup(args)
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    train_set, _ = chapter.build_data(args, tokenizer)
    model = chapter.build_model(args, config)
    optimizer = chapter.build_optimizer(args, model)
    chapter.check_shared(Path(folder, "run"))
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True)
    batches = iter(chapter.build_loader(args, train_set, 0))
    steps = iter(range(1, args.num_steps))

    def step():
        chapter.train_step(args, ddp, optimizer, batches, next(steps), device)

    step()
    before = collectives(chapter)
    rows = {"step": seconds(step, STEPS)}
    rows["collectives"] = (collectives(chapter) - before) / STEPS + 1  # and that of StopRequest
    rows["all-reduce"] = seconds(lambda: dist.all_reduce(torch.ones(1)), 2000)
    return rows | watching(chapter, args, model, device, steps, Path(folder, "run"))


def collectives(chapter):
    """Return how many this rank has called in the default group."""
    groups = chapter.last_collectives().get("pg_status", {})
    return groups.get("0", {}).get("last_enqueued_collective", 0)


def watching(chapter, args, model, device, steps, run_dir):
    """Return the seconds of the parts, as often as a step has them, but for the heartbeat."""
    watchdog = chapter.Watchdog(args, run_dir, model, device)
    health = chapter.Health(args, model)
    shape = args.micro_batch_size, args.seq_length, model.config.hidden_size
    gradient = torch.randn(shape)

    def check():
        for _ in range(args.log_every):
            health.add(next(steps), torch.rand(()), torch.rand(()))
        health.check()
        watchdog.compare()

    def ticks():
        watchdog.begin(1)
        watchdog.note_end(None)
        watchdog.end()

    rows = {"ticks": seconds(ticks, 1000)}
    rows["gradient"] = seconds(lambda: health.look(gradient), 200) * args.accumulation
    health.broken = 0
    rows["check"] = seconds(check, 50) / args.log_every
    return rows | {"heartbeat": seconds(watchdog.tell, 200)}


def on_a_rank(folder):
    """Measure; rank 0 writes it down."""
    chapter = load_chapter()
    rows = measure(chapter, folder)
    if dist.get_rank() == 0:
        Path(folder, "rows.json").write_text(json.dumps(rows))
    chapter.all_ranks(True)
    dist.destroy_process_group()


# ---- all -------------------------------------------------------------------------------------


def run(recorded):
    """Return what two ranks measure with a Flight Recorder for so many collectives."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += ["--nproc-per-node", "2", __file__, "--on-a-rank", folder]
        wanted = {"TORCH_FR_BUFFER_SIZE": str(recorded), "OMP_NUM_THREADS": "1"}
        subprocess.run(command, check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"} | wanted)
        return json.loads(Path(folder, "rows.json").read_text())


def shares(rows, unrecorded):
    """Return the share of a step that each part takes."""
    found = {name: rows[name] / rows["step"] for name in ("ticks", "gradient", "check")}
    found["heartbeat"] = rows["heartbeat"] / HEARTBEAT
    more = max(0.0, rows["all-reduce"] - unrecorded["all-reduce"])
    return found | {"Flight Recorder": rows["collectives"] * more / rows["step"]}


def main():
    """Measure with and without the Flight Recorder; print the shares."""
    args = parse_args()
    if args.on_a_rank:
        on_a_rank(args.on_a_rank)
        return
    machine = describe_machine()
    rows, unrecorded = run(2000), run(0)
    found = shares(rows, unrecorded)
    for name, share in found.items():
        print(f"{name:16} {share:.4%} of a step")
    print(f"{'in all':16} {sum(found.values()):.4%}")
    if args.output:
        result = {"machine": machine, "rows": rows, "without recorder": unrecorded, "shares": found}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
