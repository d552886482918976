"""Measure how fast the chapters train, next to a bare loop and to the Hugging Face Trainer.

Here:    python benchmarks/speed.py
Closer:  python benchmarks/speed.py --only chapter-01 trainer --rounds 5 --output speed.json

Every contender trains the same 7M Llama, with the same tokens a step, in a process of its own. They
take turns, and a ratio is one of two speeds in the same round: on a shared machine speeds come and
go, and ratios stay.
"""

import argparse
import importlib.util
import json
import os
import platform
import shlex
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

ROOT = Path(__file__).resolve().parent.parent
CHAPTER_01, CHAPTER_02, CHAPTER_04 = (
    ROOT / folder / "train_llm.py" for folder in ("01-single-gpu", "02-ddp", "04-fsdp")
)
BATCH, SEQ_LENGTH, WINDOW = 8, 256, 10  # samples a step, tokens a sample, steps a measurement
TOKENS = BATCH * SEQ_LENGTH * WINDOW

BARE, TRAINER = ([__file__, "--run", name] for name in ("bare", "trainer"))
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
CONTENDERS = {  # threads a process, and what Python runs
    "trainer": (2, TRAINER),
    "bare": (2, BARE),
    "bare-compiled": (2, [*BARE, "--compile"]),
    "chapter-01": (2, [CHAPTER_01]),
    "chapter-01-compiled": (2, [CHAPTER_01, "--compile"]),
    "chapter-02": (1, [*TORCHRUN, CHAPTER_02]),
    "chapter-02-compiled": (1, [*TORCHRUN, CHAPTER_02, "--compile"]),
    "chapter-04": (1, [*TORCHRUN, CHAPTER_04]),
    "chapter-04-compiled": (1, [*TORCHRUN, CHAPTER_04, "--compile"]),
    "chapter-04-kept": (1, [*TORCHRUN, CHAPTER_04, "--no-reshard-after-forward"]),
}
RATIOS = {  # and the least to be reached; matmul: the speed if a step were matrix products only
    ("chapter-01", "trainer"): 1.05,
    ("chapter-01-compiled", "trainer"): 1.4,
    ("chapter-01", "bare"): 0.95,
    ("chapter-01-compiled", "bare-compiled"): 0.95,
    ("chapter-01", "matmul"): None,
    ("chapter-01-compiled", "matmul"): 0.5,
    ("bare", "matmul"): None,
    ("bare-compiled", "matmul"): None,
    ("chapter-02", "chapter-01"): 0.9,
    ("chapter-04", "chapter-02"): None,
    ("chapter-04-compiled", "chapter-02-compiled"): None,
    ("chapter-04-kept", "chapter-02"): None,
}


def parse_args():
    """Return the arguments."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0], formatter_class=formatter)
    add = parser.add_argument
    add("--rounds", type=int, default=3, help="how often each contender runs")
    add("--steps", type=int, default=60, help=f"of each run; the first {WINDOW} warm it up")
    add("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS), help="who takes part")
    add("--output", type=Path, help="a JSON file for the machine, all speeds and all ratios")
    args = parser.parse_args()
    if args.rounds < 1 or args.steps < 2 * WINDOW or args.steps % WINDOW:
        parser.error(f"it takes one round or more, and 2, 3, 4 ... times {WINDOW} steps")
    return args


# ---- contenders ------------------------------------------------------------------------------


def bare(args, device, chapter):
    """Train on one batch in memory, with nothing around it; return metrics as chapters do."""
    _, config = chapter.build_tokenizer_and_config(args)
    model = chapter.build_model(args, config).to(device)
    optimizer = chapter.build_optimizer(args, model)
    batch = torch.randint(config.vocab_size, (BATCH, SEQ_LENGTH), device=device)
    rows, start = [], time.perf_counter()
    for step in range(1, args.num_steps + 1):
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % WINDOW == 0:
            loss.item()  # it is there when the device has done the step
            rows.append({"step": step, "tokens_per_second": TOKENS / (time.perf_counter() - start)})
            rows[-1]["matmul"] = matmul_rate(device) / flops_per_token(model)
            start = time.perf_counter()
    return rows


def matmul_rate(device, size=2048, times=10):
    """Return the FLOPs a second of square bf16 matrix products."""
    left, right = torch.randn(2, size, size, device=device).bfloat16()
    (left @ right)[0, 0].item()
    start = time.perf_counter()
    for _ in range(times):
        product = left @ right
    product[0, 0].item()
    return times * 2 * size**3 / (time.perf_counter() - start)


def flops_per_token(model):
    """Return what training on a token takes: PaLM, appendix B, https://arxiv.org/abs/2204.02311."""
    config, embedding = model.config, model.get_input_embeddings().weight
    weights = model.num_parameters() - embedding.numel()
    return 6 * weights + 12 * config.num_hidden_layers * config.hidden_size * SEQ_LENGTH


def trainer(args, device, chapter):
    """Train with the Hugging Face Trainer, set up as its documentation does; return metrics."""
    tokenizer, config = chapter.build_tokenizer_and_config(args)
    samples, _ = chapter.build_data(args, tokenizer)
    tokenizer.pad_token = tokenizer.eos_token
    ends = [time.perf_counter()]

    class Clock(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **_):
            if "loss" in logs:  # the last log of all has none
                ends.append(time.perf_counter())

    transformers.Trainer(
        model=transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32),
        args=transformers.TrainingArguments(
            output_dir=args.save_dir,
            max_steps=args.num_steps,
            per_device_train_batch_size=BATCH,
            bf16=True,
            use_cpu=device.type == "cpu",
            optim="adamw_torch_fused",
            logging_steps=WINDOW,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=samples.select(range(len(samples) // BATCH * BATCH)).with_format(None),
        data_collator=transformers.DataCollatorForLanguageModeling(tokenizer, mlm=False),
        callbacks=[Clock()],
    ).train()
    speeds = [TOKENS / (end - start) for start, end in pairwise(ends)]
    return [{"step": i * WINDOW, "tokens_per_second": speed} for i, speed in enumerate(speeds, 1)]


def run_contender(name):
    """Run one of the above on a chapter's arguments; leave metrics.jsonl as the chapter does."""
    spec = importlib.util.spec_from_file_location("chapter_01", CHAPTER_01)
    chapter = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(chapter)
    args = chapter.parse_args()
    if name == "trainer":
        rows = trainer(args, torch.device(args.device), chapter)
    else:  # bare has the settings of the chapter
        rows = bare(args, chapter.setup(args), chapter)
    metrics = Path(args.save_dir, args.experiment_name, "metrics.jsonl")
    metrics.parent.mkdir(parents=True)
    metrics.write_text("".join(json.dumps(row) + "\n" for row in rows))


# ---- rounds ----------------------------------------------------------------------------------


def make_model_folder(folder):
    """Write a 7M Llama's configuration, and a tokenizer trained on Python's documentation."""
    end, alphabet = "<|endoftext|>", pre_tokenizers.ByteLevel.alphabet()
    tokens = Tokenizer(models.BPE())
    tokens.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    options = {"special_tokens": [end], "initial_alphabet": alphabet, "show_progress": False}
    tokens.train_from_iterator(topics.values(), trainers.BpeTrainer(vocab_size=4096, **options))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tokens, eos_token=end)
    tokenizer.save_pretrained(folder)
    transformers.LlamaConfig(
        vocab_size=4096,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    ).save_pretrained(folder)


def run(name, steps, folder, run_name):
    """Run a contender; return its metrics after the warm-up."""
    threads, command = CONTENDERS[name]
    arguments = f"""
        --model-name {folder}/llama --seq-length {SEQ_LENGTH} --precision bf16
        --global-batch-size {BATCH} --batch-size {BATCH} --num-steps {steps} --log-every {WINDOW}
        --eval-samples {BATCH} --eval-every {steps} --checkpoint-every {steps}
        --save-dir {folder} --experiment-name {run_name}"""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "HF_HOME": f"{folder}/hf",
    }
    command = [sys.executable, *map(str, command), *arguments.split()]
    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=os.environ | settings
    )
    if done.returncode:
        sys.exit(f"{done.stdout}{done.stderr}\nfailed: {shlex.join(command)}")
    rows = map(json.loads, Path(folder, run_name, "metrics.jsonl").read_text().splitlines())
    return [row for row in rows if row["step"] > WINDOW]


def speeds_of(runs):
    """Return each contender's tokens a second in a round: the median of its windows."""
    speeds = {name: median(row["tokens_per_second"] for row in runs[name]) for name in runs}
    matmul = [row["matmul"] for rows in runs.values() for row in rows if "matmul" in row]
    return speeds | ({"matmul": median(matmul)} if matmul else {})


def compare(speeds):
    """Return the ratios of those who took part, in each round, with median and goal."""
    ratios = {}
    for (one, other), goal in RATIOS.items():
        if {one, other} <= speeds[0].keys():
            values = [by_name[one] / by_name[other] for by_name in speeds]
            ratios[f"{one} / {other}"] = {"median": median(values), "goal": goal, "rounds": values}
    return ratios


def describe_machine():
    """Return what the numbers depend on beside the code."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    facts = {name.strip(): value for name, _, value in (line.partition(":") for line in lines)}
    flags = {"avx512_bf16", "amx_bf16"} & set(facts.get("flags", "").split())
    packages = filter(importlib.util.find_spec, ("torch", "transformers", "accelerate"))
    return {
        "cpu": facts.get("model name", platform.processor()).strip(),
        "cores": os.cpu_count(),
        "bf16 flags": ", ".join(sorted(flags)) or "none",
        "python": platform.python_version(),
        **{name: version(name) for name in packages},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join(["python", *sys.argv]),
    }


def show(machine, speeds, ratios):
    """Print machine, speeds and ratios: medians over the rounds, then the lowest and highest."""
    print(*(f"{name:12} {value}" for name, value in machine.items()), "", sep="\n")
    for name in speeds[0]:
        values = [by_name[name] for by_name in speeds]
        print(f"{name:36} {median(values):7,.0f} tokens/s {min(values):7,.0f} – {max(values):,.0f}")
    for name, (middle, goal, values) in ((name, ratio.values()) for name, ratio in ratios.items()):
        verdict = goal and f"goal {goal:.2f} {'reached' if middle >= goal else 'MISSED'}"
        spread = f"{min(values):.2f} – {max(values):.2f}"
        print(f"{name:36} {middle:7.2f} {spread:>13}   {verdict or ''}".rstrip())


def main():
    """Let the contenders take turns; print a table and, with --output, write all of it down."""
    args = parse_args()
    rounds = [{} for _ in range(args.rounds)]
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(f"{folder}/llama")
        for number, runs in enumerate(rounds, 1):
            for name in args.only:
                runs[name] = run(name, args.steps, folder, f"{name}-{number}")
                print(f"round {number}: {name} {speeds_of(runs)[name]:,.0f} tokens/s", flush=True)
    machine, speeds = describe_machine(), [speeds_of(runs) for runs in rounds]
    ratios = compare(speeds)
    show(machine, speeds, ratios)
    if args.output:
        result = {"machine": machine, "ratios": ratios, "speeds": speeds, "rounds": rounds}
        args.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:  # as which main() starts this script anew, for a contender
        del sys.argv[1]
        run_contender(sys.argv.pop(1))
    else:
        main()
