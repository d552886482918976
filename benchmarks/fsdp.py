"""Measure what chapter 04 holds, sends and saves, and what then fits, against the chapters before.

Here:    python benchmarks/fsdp.py costs checkpoints largest --output fsdp.json
Closer:  python benchmarks/fsdp.py costs --layers 8

costs        bytes of weights, gradients, optimizer state and gathered layers on a rank, and the
             collectives of a step, for 1, 2 and 4 ranks
checkpoints  seconds and bytes of saving and loading the same model in chapters 02 and 04
largest      the largest model that trains in a fixed memory per rank in chapters 03 and 04
"""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ByT5Tokenizer, LlamaConfig

from speed import describe_machine, in_rows

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = {name: next(ROOT.glob(f"{name}-*/train_llm.py")) for name in ("02", "03", "04")}
BATCH, SEQ_LENGTH = 8, 64
SETTINGS = {  # of each number of ranks
    "as it is": "",
    "layers kept": "--no-reshard-after-forward",
    "2 micro-batches": "--batch-size {half}",
    "2 replicas": "--replicas 2",
    "2 replicas, 2 micro-batches": "--replicas 2 --batch-size {half}",
}


def parse_args():
    """Return the arguments."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=formatter)
    add = parser.add_argument
    add("what", nargs="+", choices=["costs", "checkpoints", "largest"])
    add("--layers", type=int, default=16, help="of the model whose costs are measured")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="on which costs are measured")
    add("--width", type=int, default=512, help="of all models but the one that checkpoints save")
    add("--gib", type=float, default=2.0, help="memory a rank may take in `largest`")
    add("--output", type=Path, help="a JSON file that gets or replaces what is measured")
    return parser.parse_args()


# ---- one rank --------------------------------------------------------------------------------


COLLECTIVES = {
    "c10d::_allgather_base_": "all-gather",
    "c10d::_reduce_scatter_base_": "reduce-scatter",
    "c10d::allreduce_": "all-reduce",
}


class Collectives(TorchDispatchMode):
    """Counts the collectives on tensors with more than one number, and the bytes of the whole."""

    def __init__(self):
        super().__init__()
        self.counts, self.bytes = Counter(), Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name() in COLLECTIVES:
            name = COLLECTIVES[func.name()]
            tensors = args[:2] if name != "all-reduce" else args[0]
            whole = max(tensor.numel() * tensor.element_size() for tensor in tensors)
            if whole > 8:  # what ranks agree on is a number
                self.counts[name] += 1
                self.bytes[name] += whole
        return func(*args, **(kwargs or {}))


def bytes_of(tensors):
    """Return how many bytes of these tensors lie on this rank."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def own_memory():
    """Return how many bytes this process alone takes, once what is free was given back."""
    import ctypes

    ctypes.CDLL(None).malloc_trim(0)
    return psutil.Process().memory_full_info().uss


def measure_costs(chapter, args, device):
    """Take three steps on random tokens; return the costs of the third, on this rank."""
    before = own_memory()
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.shard(args, chapter.build_model(args, config), device)
    optimizer = chapter.build_optimizer(args, model)
    found = {"gathered": 0, "process between micro-batches": 0}
    samples = torch.randint(config.vocab_size, (BATCH, args.seq_length), dtype=torch.int32)

    def look(*_):
        whole = [weight for weight in model.parameters() if not isinstance(weight, DTensor)]
        found["gathered"] = max(found["gathered"], bytes_of(whole))

    def look_at_process(*_):
        taken = own_memory() - before
        found["process between micro-batches"] = max(found["process between micro-batches"], taken)

    def look_at_shards(*_):
        found["weights"] = bytes_of(model.parameters())
        found["gradients"] = bytes_of(weight.grad for weight in model.parameters())

    def look_at_state(*_):
        states = (optimizer.state[weight].values() for weight in model.parameters())
        found["optimizer"] = bytes_of(tensor for state in states for tensor in state)
        found["process at the step"] = own_memory() - before

    for part in model.modules():
        if isinstance(part, FSDPModule):
            part.register_forward_pre_hook(look)
            part.register_full_backward_hook(look)
    model.register_forward_pre_hook(look_at_process)
    optimizer.register_step_pre_hook(look_at_shards)
    optimizer.register_step_post_hook(look_at_state)
    for step in (1, 2):
        chapter.train_step(args, model, optimizer, samples, step, device)
    with Collectives() as seen:
        chapter.train_step(args, model, optimizer, samples, 3, device)
    found["model"] = sum(weight.numel() for weight in model.parameters()) * 4
    found["accumulation"] = args.accumulation
    found["collectives"] = {name: [seen.counts[name], seen.bytes[name]] for name in seen.counts}
    return found


def measure_checkpoint(chapter, args, device):
    """Save and load; return seconds of each and bytes on the disk."""
    _, config = chapter.build_tokenizer_and_config(args)
    args.dataset_fingerprint = args.num_weights = None
    model = chapter.build_model(args, config)
    sharded = hasattr(chapter, "shard")
    model = chapter.shard(args, model, device) if sharded else model.to(device)
    optimizer = chapter.build_optimizer(args, model)
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    optimizer.zero_grad()
    run_dir, found = Path(args.save_dir, args.experiment_name), {}
    for name, work in (
        ("save", lambda: chapter.save_checkpoint(args, run_dir, model, optimizer, 1)),
        ("load", lambda: chapter.load_checkpoint(args, run_dir, model, optimizer)),
    ):
        dist.barrier()
        start = time.perf_counter()
        work()
        dist.barrier()
        found[name] = time.perf_counter() - start
    files = [path.stat() for path in run_dir.rglob("*") if path.is_file()]
    return found | {"bytes": sum(file.st_size for file in files)}


def run_on_this_rank():
    """Measure as a rank that torchrun started; rank 0 leaves the result in the run's folder."""
    what, script, result = sys.argv[1:4]
    del sys.argv[1:4]
    spec = importlib.util.spec_from_file_location("chapter", script)
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    args = chapter.parse_args()
    device, _ = chapter.setup(args)
    measure = {"costs": measure_costs, "checkpoints": measure_checkpoint}[what]
    found = measure(chapter, args, device)
    if dist.get_rank() == 0:
        Path(result).write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


# ---- all ranks -------------------------------------------------------------------------------


def make_model_folder(folder, layers, width):
    """Write the configuration of a Llama, and a tokenizer of bytes; return the folder."""
    tokenizer = ByT5Tokenizer()
    LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        max_position_embeddings=SEQ_LENGTH,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def torchrun(ranks, command, folder, limit=None):
    """Run a command on so many ranks, each with at most `limit` bytes of data; return how it went.

    Both cores of a small machine are enough for all: what is measured is no speed.
    """
    prefix = ["prlimit", f"--data={limit}"] if limit else []
    prefix += [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    settings = {"OMP_NUM_THREADS": "1", "HF_HOME": f"{folder}/hf", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [*prefix, f"--nproc-per-node={ranks}", *map(str, command)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | settings,
    )


def measure_on_ranks(what, chapter, ranks, model, folder, options=""):
    """Return what rank 0 found."""
    result = Path(folder, "result.json")
    result.unlink(missing_ok=True)
    command = [__file__, "as-a-rank", what, SCRIPTS[chapter], result, "--model-name", model]
    command += f"--device cpu --seq-length {SEQ_LENGTH} --global-batch-size {BATCH}".split()
    command += ["--save-dir", folder, *options.split()]
    done = torchrun(ranks, command, folder)
    if not result.exists():
        sys.exit(f"{done.stdout}{done.stderr}\nno result of {what}, chapter {chapter}")
    return json.loads(result.read_text())


def costs(args, folder):
    """Return rows of costs by number of ranks and setting."""
    model = make_model_folder(f"{folder}/model", args.layers, args.width)
    rows = []
    for ranks in args.ranks:
        for name, options in SETTINGS.items():
            if "--replicas 2" in options and ranks < 4:
                continue
            given = options.format(half=BATCH // ranks // 2)
            found = measure_on_ranks("costs", "04", ranks, model, folder, given)
            print(ranks, name, found, flush=True)
            rows.append({"ranks": ranks, "setting": name, "layers": args.layers} | found)
    return rows


def checkpoints(args, folder, rounds=3):
    """Return the seconds and bytes of saves and loads, of chapters 02 and 04 in turn."""
    model = make_model_folder(f"{folder}/model", 12, 768)
    rows = []
    for number in range(rounds):
        for chapter in ("02", "04"):
            name = f"--experiment-name {chapter}-{number}"
            found = measure_on_ranks("checkpoints", chapter, 2, model, folder, name)
            print(chapter, found, flush=True)
            rows.append({"chapter": chapter, "round": number} | found)
    return rows


def trains(chapter, ranks, layers, args, folder):
    """Say whether a model of so many layers takes two steps in the memory that a rank may have."""
    model = make_model_folder(f"{folder}/model", layers, args.width)
    options = f"""--device cpu --seq-length {SEQ_LENGTH} --global-batch-size 4 --batch-size 1
        --num-steps 2 --eval-samples 4 --save-dir {folder} --model-name {model}
        --checkpoint-every 99 --experiment-name {chapter}-{ranks}-{layers}"""
    limit = int(args.gib * 2**30)
    done = torchrun(ranks, [SCRIPTS[chapter], *options.split()], folder, limit)
    # after its last step it saves: that the step was logged is what counts here
    metrics = Path(folder, f"{chapter}-{ranks}-{layers}/metrics.jsonl")
    fits = metrics.exists() and '"step": 2,' in metrics.read_text()
    no_memory = "allocate memory" in done.stderr or "MemoryError" in done.stderr
    print(f"chapter {chapter}, {ranks} ranks, {layers} layers: {'fits' if fits else 'too many'}")
    assert fits or no_memory, f"{done.stdout}{done.stderr}"
    return fits


def largest(args, folder):
    """Return the most layers, and weights, that each way of training has room for, within 10%."""
    rows = []
    for chapter, ranks in (("03", 2), ("04", 2), ("03", 4), ("04", 4)):
        fits, fails = 1, 2
        while trains(chapter, ranks, fails, args, folder):
            fits, fails = fails, 2 * fails
        while fails - fits > max(1, fits // 10):
            middle = (fits + fails) // 2
            if trains(chapter, ranks, middle, args, folder):
                fits = middle
            else:
                fails = middle
        layer = args.width**2 * 4 + 3 * args.width * (args.width * 11 // 4) + 2 * args.width
        weights = fits * layer + args.width * (2 * len(ByT5Tokenizer()) + 1)
        row = {"chapter": chapter, "ranks": ranks, "layers": fits, "weights": weights}
        rows.append(row | {"gib": args.gib})
        print(rows[-1], flush=True)
    return rows


def main():
    """Measure what was asked for; with --output, write it down beside what is there."""
    args = parse_args()
    known = args.output and args.output.exists()
    results = json.loads(args.output.read_text()) if known else {}
    results["machine"] = describe_machine()
    for what in args.what:
        with tempfile.TemporaryDirectory() as folder:
            results[what] = {"costs": costs, "checkpoints": checkpoints, "largest": largest}[what](
                args, folder
            )
        if args.output:
            args.output.write_text(in_rows(results) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["as-a-rank"]:  # as which torchrun starts this script, for each rank
        del sys.argv[1]
        run_on_this_rank()
    else:
        main()
