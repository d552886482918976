"""What takes part in speed.py: a chapter, or one of its peers on the chapter's data and model.

One at a time:   python benchmarks/contenders.py bare --compile --num-steps 20
On two ranks:    torchrun --nproc-per-node 2 benchmarks/contenders.py zero-3 --num-steps 20

The arguments are those of the chapters. Peers start from the weights of chapter 01 and take the
same samples in the same order, with the same AdamW, learning rates and limit on gradients, so that
their losses can be compared. Apart from that each is written as its own documentation recommends.
A peer leaves metrics.jsonl as chapters do; for all, timing.json says how long things took.
"""

import importlib.util
import json
import os
import resource
import sys
import time
from contextlib import suppress
from functools import wraps
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, DistributedSampler

ROOT = Path(__file__).resolve().parent.parent
RANK, LOCAL_RANK = (int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK"))
WORLD_SIZE = int(os.environ.get("WORLD_SIZE", "1"))
STARTED = float(os.environ.get("BENCHMARK_STARTED", str(time.time())))  # unix time of the command


def script_of(chapter):
    """Return the path of a chapter's script."""
    return next(ROOT.glob(f"{chapter}-*/train_llm.py"))


def load(script):
    """Return a script as a module: a chapter's, by its number, or any by its path."""
    path = script if str(script).endswith(".py") else script_of(script)
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def settle(device):
    """Wait until a GPU has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize()


def peak_memory_gib(device):
    """Return the most memory that this process has taken; on a GPU, the most that tensors took."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20  # which Linux has in KiB


def matmul_rate(device):
    """Return the FLOPs a second of square bf16 matrix products."""
    gpu = device.type == "cuda"  # which is fast only if it has much to do
    size, times = (8192, 500) if gpu else (2048, 10)  # half a second of an H100
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    (left @ right)[0, 0].item()
    start = time.perf_counter()
    for _ in range(times):
        product = left @ right
    product[0, 0].item()
    return times * 2 * size**3 / (time.perf_counter() - start)


def flops_per_token(config, weights, seq_length):
    """Return what training on a token takes: PaLM, appendix B, https://arxiv.org/abs/2204.02311.

    `weights` are those that are multiplied with: an embedding that is looked up is none of them.
    """
    return 6 * weights + 12 * config.num_hidden_layers * config.hidden_size * seq_length


# ---- chapters --------------------------------------------------------------------------------


def chapter(name):
    """Run a chapter's script; note when its first step ended, and what it waited for else."""
    script = load(name)
    seconds = {"first_step": [], "evaluate": [], "save_checkpoint": [], "load_checkpoint": []}

    def timed(function, note):
        @wraps(function)
        def call(*args):
            begun = time.perf_counter()
            result = function(*args)
            if note == "first_step" and not seconds[note]:
                settle(args[-1])  # the device
                seconds[note].append(time.time() - STARTED)
            elif note != "first_step":
                seconds[note].append(time.perf_counter() - begun)
            return result

        return call

    for note in seconds:
        function = "train_step" if note == "first_step" else note
        if hasattr(script, function):  # the Trainer has its own
            setattr(script, function, timed(getattr(script, function), note))
    if trainer := getattr(script, "Trainer", None):  # which saves, and then the script publishes
        seconds["by_trainer"] = []
        trainer._save_checkpoint = timed(trainer._save_checkpoint, "by_trainer")
    args = script.parse_args()
    script.main()
    if trainer:
        parts = zip(seconds.pop("by_trainer"), seconds["save_checkpoint"], strict=True)
        seconds["save_checkpoint"] = [sum(both) for both in parts]
    if dist.is_initialized():
        dist.barrier()
    if RANK == 0:
        write(args, "timing.json", json.dumps(seconds))


def write(args, name, text):
    """Write a file into the run's folder."""
    folder = Path(args.save_dir, args.experiment_name)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


# ---- peers -----------------------------------------------------------------------------------


class Race:
    """What peers have in common: the chapter's arguments, model and data, and a clock."""

    def __init__(self):
        self.script = load("01")
        self.args = args = self.script.parse_args()
        self.device = torch.device(args.device, LOCAL_RANK if args.device == "cuda" else None)
        self.batch_size = args.global_batch_size // WORLD_SIZE
        tokenizer, self.config = self.script.build_tokenizer_and_config(args)
        train_set, _ = self.script.build_data(args, tokenizer)
        places = product(range(1, args.num_steps + 1), range(args.accumulation))
        batches = [self.script.batch_at(args, train_set, *place, "cpu") for place in places]
        self.samples = torch.cat(batches)  # [samples, tokens], on the CPU
        self.losses = torch.zeros(args.num_steps, device=self.device)
        self.steps, self.rows, self.first_step = 0, [], None

    def model(self):
        """Return the chapter's model as transformers gives it, and not compiled."""
        compiled, self.args.compile = self.args.compile, False
        model = self.script.build_model(self.args, self.config)
        self.args.compile = compiled
        model.set_attn_implementation("sdpa")
        return model

    def optimizer(self, model):
        """Return the chapter's AdamW, and the schedule of its learning rates."""
        optimizer, args = self.script.build_optimizer(self.args, model), self.args
        schedule = torch.optim.lr_scheduler.LambdaLR(
            optimizer, lambda done: self.script.lr_at(args, min(done + 1, args.num_steps)) / args.lr
        )
        return optimizer, schedule

    def loader(self, batch_size=None):
        """Return a loader of the samples in their order, for a library that divides it."""
        return DataLoader(self.samples, batch_size or self.batch_size)

    def step_ended(self, loss):
        """Note a step and its loss, a scalar on the device; look at the clock only now and then."""
        self.steps = step = self.steps + 1
        self.losses[step - 1] = loss.detach()  # a list of them would leave holes in the heap
        if step == 1:
            settle(self.device)
            self.first_step = time.time() - STARTED
            self.begun = (step, time.perf_counter())
        elif step % self.args.log_every == 0:
            loss.item()  # it is there when the device has done the step
            first, then = self.begun
            tokens = (step - first) * self.args.global_batch_size * self.args.seq_length
            speed = tokens / (time.perf_counter() - then)
            memory = peak_memory_gib(self.device)
            self.rows.append({"step": step, "tokens_per_second": speed, "peak_memory_gib": memory})
            self.begun = (step, time.perf_counter())

    def end(self, **more):
        """Write what was noted, the losses as means over all ranks."""
        losses = self.losses
        if WORLD_SIZE > 1:
            if not dist.is_initialized():
                dist.init_process_group("gloo")
            dist.all_reduce(losses)
        losses = losses.cpu() / WORLD_SIZE
        rows = [row | {"loss": losses[row["step"] - 1].item()} | more for row in self.rows]
        if RANK == 0:
            write(self.args, "metrics.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
            write(self.args, "timing.json", json.dumps({"first_step": [self.first_step]}))


def bare(race, dtype=torch.float32):
    """Forward, backward, clip and step, on tokens that lie on the device, and nothing else."""
    args, device = race.args, race.device
    model = race.model().to(device, dtype)
    model.set_attn_implementation("causal_sdpa")  # the chapter's: it spends nothing on masks
    optimizer, schedule = race.optimizer(model)
    run = torch.compile(model) if args.compile else model
    tokens = race.samples.to(device).split(args.global_batch_size)
    mixed = args.precision == "bf16" and dtype == torch.float32
    for batch in tokens:
        with torch.autocast(device.type, torch.bfloat16, enabled=mixed):
            loss = run(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        race.step_ended(loss)
    weights = model.num_parameters() - model.get_input_embeddings().weight.numel()
    flops = flops_per_token(race.config, weights, args.seq_length)
    race.end(matmul=matmul_rate(device) / flops)  # tokens/s if a step were matrix products only


def pure_bf16(race):
    """The bare loop with weights, gradients and moments in bf16, as some guides teach it."""
    bare(race, torch.bfloat16)


def trainer(race):
    """The Hugging Face Trainer: https://huggingface.co/docs/transformers/main/perf_train_gpu_one."""
    import transformers

    args, model = race.args, race.model()

    class Listening(transformers.Trainer):
        def training_step(self, *inputs):
            self.loss = super().training_step(*inputs)
            return self.loss

        def _get_train_sampler(self, *_):
            return torch.utils.data.SequentialSampler(race.samples)

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_, **__):
            race.step_ended(run.loss)

    run = Listening(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=f"{args.save_dir}/trainer",
            max_steps=args.num_steps,
            per_device_train_batch_size=race.batch_size,
            bf16=args.precision == "bf16",
            torch_compile=args.compile,
            use_cpu=race.device.type == "cpu",
            max_grad_norm=args.max_grad_norm,
            logging_steps=args.log_every,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        optimizers=race.optimizer(model),
        train_dataset=race.samples,
        data_collator=with_labels,
        callbacks=[Clock()],
    )
    run.train()
    race.end()


def with_labels(rows):
    """Return a batch, int64 of [samples, tokens], that is its own labels."""
    tokens = torch.stack(rows).long()
    return {"input_ids": tokens, "labels": tokens}


def accelerate(race):
    """A loop of one's own: https://huggingface.co/docs/accelerate/basic_tutorials/migration."""
    from accelerate import Accelerator

    accelerator = Accelerator(
        cpu=race.device.type == "cpu",
        mixed_precision="bf16" if race.args.precision == "bf16" else "no",
        dynamo_backend="inductor" if race.args.compile else "no",
    )
    model = race.model()
    optimizer, schedule = race.optimizer(model)
    model, optimizer, loader = accelerator.prepare(model, optimizer, race.loader())
    for batch in loader:
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), race.args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        race.step_ended(loss)
    race.end()


def fabric(race):
    """Lightning Fabric: https://lightning.ai/docs/fabric/stable/fundamentals/convert.html."""
    from lightning_fabric import Fabric

    fabric = Fabric(
        accelerator=race.device.type,
        devices=WORLD_SIZE,
        strategy="ddp" if WORLD_SIZE > 1 else "auto",
        precision="bf16-mixed" if race.args.precision == "bf16" else "32-true",
    )
    fabric.launch()
    model = race.model()
    optimizer, schedule = race.optimizer(model)
    model = torch.compile(model) if race.args.compile else model
    model, optimizer = fabric.setup(model, optimizer)
    for batch in fabric.setup_dataloaders(race.loader()):
        loss = model(input_ids=batch, labels=batch).loss
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=race.args.max_grad_norm)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        race.step_ended(loss)
    race.end()


def zero(race, stage):
    """DeepSpeed's ZeRO: https://www.deepspeed.ai/getting-started/."""
    import deepspeed

    if race.device.type == "cpu":
        deepspeed.ops.__compatible_ops__ = {}  # or its first start compiles, for minutes
    config = {
        "train_batch_size": race.args.global_batch_size,
        "train_micro_batch_size_per_gpu": race.batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": race.args.max_grad_norm,
        "zero_optimization": {"stage": stage},
    }
    if race.args.precision == "bf16":
        config["bf16"] = {"enabled": True}
        # zero_to_fp32 could not read checkpoints of stage 1 with gradients in fp32.
        if stage > 1:
            config["data_types"] = {"grad_accum_dtype": "fp32"}
    model = race.model()
    optimizer, schedule = race.optimizer(model)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config=config
    )
    if race.args.compile:
        engine.compile()
    order = DistributedSampler(race.samples, shuffle=False)  # its own loader would shuffle
    for batch in DataLoader(race.samples, race.batch_size, sampler=order):
        tokens = batch.to(race.device)
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        race.step_ended(loss)
    race.end()


PEERS = {
    "bare": bare,
    "pure-bf16": pure_bf16,
    "trainer": trainer,
    "accelerate": accelerate,
    "fabric": fabric,
    **{f"zero-{stage}": lambda race, stage=stage: zero(race, stage) for stage in (1, 2, 3)},
}


def main():
    """Run the one that the first argument names."""
    name = sys.argv.pop(1)
    if name in PEERS:
        PEERS[name](Race())
    else:
        chapter(name)
    with suppress(ValueError, AssertionError):  # there may be no group
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
