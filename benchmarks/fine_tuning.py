"""Compare fine-tuning/conversations with SFTTrainer of trl: speed, with packing, on the same data.

First:  pip install trl==1.16.0
All:    python benchmarks/fine_tuning.py --output benchmarks/results/fine-tuning.json

Both train a Llama on one device, and take turns: on a GPU, one of 475 million weights with samples
of 2,048 tokens; on a CPU, one of 7 million weights with samples of 256. The speed counts only the
tokens of conversations, because the two pack them with different amounts of padding. TRL packs in
two ways: "bfd" keeps conversations apart; "wrapped" cuts them, and they attend to each other.
"""

import json
import re
import sys
import time
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median

import torch
from transformers import AutoTokenizer

import harness
from on_ranks import BATCH, SEQ_LENGTH, WINDOW, make_7m_llama, make_model_folder, training_flags

sys.path.append(str(harness.ROOT / "tools"))

from plot import read_metrics

# The runs of each trainer, and the steps of a run; the first WINDOW steps warm it up.
ROUNDS, STEPS = 3, 40
ON_GPU = torch.cuda.is_available()
LENGTH = 2048 if ON_GPU else SEQ_LENGTH
SCRIPT = harness.ROOT / "fine-tuning/conversations/train_llm.py"


def write_conversations(path):
    """Write a conversation for each paragraph of Python's documentation that is not too long."""
    with open(path, "w") as file:
        for topic, text in topics.items():
            for number, paragraph in enumerate(text.split("\n\n")):
                prompt = f"What does paragraph {number} on {topic} say?"
                if 40 < len(paragraph) < 2 * LENGTH:
                    file.write(json.dumps({"prompt": prompt, "completion": paragraph}) + "\n")
    return path


def run_chapter(folder, data, name):
    """Return the tokens of conversations per second of the chapter's script."""
    flags = ["-m", f"{folder}/llama", "-d", data, *training_flags(folder, name, STEPS)]
    flags += ["--seq-length", str(LENGTH)]
    done = harness.call(harness.launch_command(1, [SCRIPT, *flags]), HF_HOME=f"{folder}/hf")
    padding = float(re.search(r"([\d.]+)% are padding", done.stdout)[1]) / 100
    rows = read_metrics(Path(folder, name))
    speeds = [row["tokens_per_second"] for row in rows if row["step"] > WINDOW]
    return median(speeds) * (1 - padding)


def run_trl(folder, data, name):
    """Return the tokens of conversations per second of SFTTrainer; `name` has its packing."""
    result = folder / f"{name}.json"
    packing = name.split("-")[1]
    words = [*harness.words_of(train_with_trl), folder / "llama", data, packing, result]
    harness.call(harness.launch_command(0, words), HF_HOME=f"{folder}/hf")
    return json.loads(result.read_text())


def train_with_trl():
    """Train with SFTTrainer; write the tokens per second to a file."""
    import datasets
    from transformers import AutoConfig, AutoModelForCausalLM
    from trl import SFTConfig, SFTTrainer

    model, data, packing, result = sys.argv[1:5]
    windows = []

    class Trainer(SFTTrainer):
        """Note the tokens and the time of each step."""

        def training_step(self, model, inputs, *args, **options):
            begun = time.perf_counter()
            loss = super().training_step(model, inputs, *args, **options)
            windows.append((int((inputs["input_ids"] >= 0).sum()), begun))
            return loss

    trainer = Trainer(
        model=AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).float(),
        processing_class=AutoTokenizer.from_pretrained(model),
        train_dataset=datasets.load_dataset("json", data_files=data, split="train"),
        args=SFTConfig(
            packing=True,
            packing_strategy=packing,
            max_length=LENGTH,
            completion_only_loss=True,
            per_device_train_batch_size=BATCH,
            max_steps=STEPS,
            learning_rate=1e-5,
            optim="adamw_torch_fused",
            bf16=harness.fast_precision() == "bf16",
            use_cpu=not ON_GPU,
            gradient_checkpointing=False,
            logging_steps=WINDOW,
            output_dir=Path(result).parent / "trl",
            save_strategy="no",
            report_to=[],
            dataloader_drop_last=True,
        ),
    )
    trainer.train()
    tokens, begun = zip(*windows[WINDOW:], strict=True)
    speed = sum(tokens[:-1]) / (begun[-1] - begun[0])
    Path(result).write_text(json.dumps(speed))


RUNS = {"conversations": run_chapter, "trl-bfd": run_trl, "trl-wrapped": run_trl}


def fine_tuning(args, folder):
    """Let both take turns; compare their speeds."""
    make_7m_llama(folder / "llama")
    if ON_GPU:
        tokenizer = AutoTokenizer.from_pretrained(folder / "llama")
        make_model_folder(folder / "llama", 16, 1536, vocabulary=4096, tokenizer=tokenizer)
    data = write_conversations(folder / "conversations.jsonl")

    def measure(name, number):
        return RUNS[name](folder, str(data), f"{name}-{number}")

    for rounds in harness.take_turns(RUNS, ROUNDS, measure, "{:,.0f} tokens/s".format):
        yield {
            f"conversations / {trl}": {"median": median(ratios), "rounds": ratios}
            for trl in list(rounds[0])[1:]
            for ratios in [[found["conversations"] / found[trl] for found in rounds]]
        }


if __name__ == "__main__":
    harness.benchmark(__doc__, fine_tuning)
