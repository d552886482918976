"""Measure what chapter 04 holds, sends and saves, and what then fits, against the chapters before.

Here:    python benchmarks/fsdp.py costs checkpoints largest --output fsdp.json
Closer:  python benchmarks/fsdp.py costs --layers 8

costs        bytes of weights, gradients, optimizer state and gathered layers on a rank, and the
             collectives of a step, for 1, 2 and 4 ranks
checkpoints  seconds and bytes of saving and loading the same model in chapters 02 and 04
largest      the largest model that trains in a fixed memory per rank in chapters 03 and 04
"""

import time
from collections import Counter
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import ByT5Tokenizer

from contenders import script_of
from on_ranks import make_model_folder, measure_all, on_ranks, torchrun
from speed import describe_machine, parser_of

BATCH, SEQ_LENGTH = 8, 64
COMMON = f"--seq-length {SEQ_LENGTH} --global-batch-size {BATCH}"
SETTINGS = {  # of each number of ranks
    "as it is": "",
    "layers kept": "--no-reshard-after-forward",
    "2 micro-batches": "--batch-size {half}",
    "2 replicas": "--replicas 2",
    "2 replicas, 2 micro-batches": "--replicas 2 --batch-size {half}",
}


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("what", nargs="+", choices=MEASURES)
    add("--layers", type=int, default=16, help="of the model whose costs are measured")
    add("--ranks", type=int, nargs="+", default=[1, 2, 4], help="on which costs are measured")
    add("--width", type=int, default=512, help="of all models but the one that checkpoints save")
    add("--gib", type=float, default=2.0, help="memory a rank may take in `largest`")
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
    ids = torch.randint(config.vocab_size, (BATCH, args.seq_length), dtype=torch.int32)
    samples = chapter.Samples(ids)

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


# ---- all ranks -------------------------------------------------------------------------------


def costs(args, folder):
    """Return rows of costs by number of ranks and setting."""
    model = make_model_folder(f"{folder}/model", args.layers, args.width)
    rows = []
    for ranks in args.ranks:
        for name, options in SETTINGS.items():
            if "--replicas 2" in options and ranks < 4:
                continue
            given = options.format(half=BATCH // ranks // 2)
            found = on_ranks(measure_costs, "04", ranks, model, folder, f"{COMMON} {given}")
            print(ranks, name, found, flush=True)
            rows.append({"ranks": ranks, "setting": name, "layers": args.layers} | found)
    return rows


def checkpoints(args, folder, rounds=3):
    """Return the seconds and bytes of saves and loads, of chapters 02 and 04 in turn."""
    model = make_model_folder(f"{folder}/model", 12, 768)
    rows = []
    for number in range(rounds):
        for chapter in ("02", "04"):
            options = f"{COMMON} --experiment-name {chapter}-{number}"
            found = on_ranks(measure_checkpoint, chapter, 2, model, folder, options)
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
    done = torchrun(ranks, [script_of(chapter), *options.split()], folder, limit)
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


MEASURES = {"costs": costs, "checkpoints": checkpoints, "largest": largest}

if __name__ == "__main__":
    measure_all(MEASURES, parse_args(), describe_machine())
