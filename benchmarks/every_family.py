"""Train a small model of each causal family of transformers in six chapters, and compare.

All:   python benchmarks/every_family.py --output benchmarks/results/families.json
Some:  python benchmarks/every_family.py --only llama gemma3_text+sliding_window=8

Each chapter must follow chapter 01's losses, or refuse the model in one line. The models have two
layers and random weights. The ranks of a chapter train all models one after the other, without a
restart. The results hold each row as soon as it is known, so the same command continues after a
stop. If a chapter differs, fails with a traceback, or exports other weights, the exit status is 1.
"""

import argparse
import gc
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from pathlib import Path
from unittest import mock

import torch
import transformers
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from contenders import load
from speed import ROOT, describe_machine, keep, parser_of

sys.path.insert(0, str(ROOT / "tests/support"))

from families import FAMILY_NAMES, OWN_SETTINGS, shrink
from worker import run

# The number of ranks of each chapter, and its flags.
LAYOUTS = {
    "01": (1, []),
    "04": (2, []),
    "05": (2, []),
    "06": (2, ["--tensor-parallel-size", "2"]),
    "07": (2, ["--pipeline-parallel-size", "2"]),
    "08": (2, ["--context-parallel-size", "2"]),
}
FLAGS = """--precision fp32 -s 32 --global-batch-size 4 -b 2 --num-steps 4
    --log-every 1 --eval-samples 4 --warmup-steps 1""".split()
# Settings that change attention or the loss.
VARIANTS = """mistral+sliding_window=8 gemma3_text+sliding_window=8 qwen2_moe+sliding_window=8
    phi3+sliding_window=8 starcoder2+sliding_window=8 cohere2+sliding_window=8
    olmo3+sliding_window=8 modernbert-decoder+sliding_window=8
    llama4_text+attention_chunk_size=8 llama4_text+floor_scale=4
    gemma3_text+use_bidirectional_attention=true bert+is_decoder=true roberta+is_decoder=true
    deepseek_v32+index_topk=8 glm_moe_dsa+index_topk=8 dots3_note_text+index_topk=8
    qwen3_moe+output_router_logits=true mixtral+output_router_logits=true
    llama+tie_word_embeddings=true cohere+logit_scale=0.25 cohere+use_qk_norm=true
    granite+logits_scaling=4.0 gemma2+final_logit_softcapping=5.0 llama+longrope
    zamba2+num_mem_blocks=2""".split()
# Here the angles of positions depend on the length of the sequence.
LONG_ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 16}
LONG_ROPE |= {"factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
ROWS = [*FAMILY_NAMES, *VARIANTS]
# Families that CI trains.
SAMPLE = """llama apertus gemma3_text gpt2 bert bart qwen3_moe lfm2 deepseek_v3
    mistral+sliding_window=8 llama4_text+attention_chunk_size=8
    qwen3_moe+output_router_logits=true cohere+use_qk_norm=true""".split()
# Families that the small models of this script cannot compare.
NOT_COMPARED = {
    "phimoe": "its router draws experts at random in training, so each layout has other losses",
    "longcat_flash": "with few tokens, a rank may use no expert, and FSDP fails",
}
LARGEST = 20_000_000  # weights of a model
TEXT = "text.txt"  # what they learn: a copy of LICENSE, because each run tokenizes all its text
PATIENCE = 60  # seconds that a model may take
LAST_WORDS = 10  # seconds that a rank may take to fail like another
# In these models, rounding errors grow fast, so they are trained with a lower learning rate.
SENSITIVE = ["gemma4_unified_text"]
# The largest difference between two losses, and between two gradient norms in proportion. Gradient
# norms are compared in the first two steps only, because AdamW amplifies rounding errors.
TOLERANCE = {"loss": 1e-5, "val_loss": 1e-5, "grad_norm": 1e-4}


def parse_args():
    """Return the arguments."""
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--only", nargs="+", choices=ROWS, default=ROWS, metavar="FAMILY", help="which models")
    add("--chapters", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which chapters")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="where; cuda: with one rank each")
    add("--work", nargs=2, help=argparse.SUPPRESS)
    return parser.parse_args()


def build_folder(row, folder):
    """Write a small model's configuration and a tokenizer of bytes; if that fails, return why."""
    kind, *settings = row.split("+")
    if kind in NOT_COMPARED:
        return NOT_COMPARED[kind]
    if settings == ["longrope"]:
        settings = [f"rope_parameters={json.dumps(LONG_ROPE)}"]
    pairs = (word.split("=") for word in settings)
    settings = OWN_SETTINGS.get(kind, {}) | {name: json.loads(value) for name, value in pairs}
    try:
        config = shrink(CONFIG_MAPPING[kind](), **settings)
        # Without dropout, the losses do not depend on the layout.
        rates = [name for name in config.to_dict() if "drop" in name]
        rates = [name for name in rates if isinstance(getattr(config, name), float)]
        config = shrink(CONFIG_MAPPING[kind](), **dict.fromkeys(rates, 0.0) | settings)
        with torch.device("meta"):
            num_weights = AutoModelForCausalLM.from_config(config).num_parameters()
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[-200:]}"
    if num_weights > LARGEST:
        return f"{num_weights:,} weights"
    config.save_pretrained(folder / row)
    letters = {letter: number for number, letter in enumerate(sorted(ByteLevel.alphabet()), 1)}
    tokenizer = Tokenizer(models.BPE({"</s>": 0} | letters, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")
    fast.save_pretrained(folder / row)
    return None


def train_rows(chapter, rows, folder, device="cpu"):
    """Train models in a chapter; yield each row and what happened, as soon as it is known."""
    num_ranks, flags = LAYOUTS[chapter]
    script = next(ROOT.glob(f"{chapter}-*/train_llm.py"))
    left, tried = list(rows), set()
    while left:
        jobs = []
        for row in left:
            words = ["-m", str(folder / row), "-d", str(folder / TEXT), "-e", row]
            words += ["--save-dir", str(folder / chapter), "--device", device]
            words += ["--lr", "1e-4"] if row in SENSITIVE else []
            jobs.append({"script": str(script), "args": [*FLAGS, *flags, *words]})
            # These ports are below the range from which Linux gives ports to other programs.
            jobs[-1] |= {"row": row, "port": 20_000 + len(jobs)}
        (folder / "jobs.json").write_text(json.dumps(jobs))
        processes = []
        for rank in range(num_ranks):
            (folder / f"results-{rank}.jsonl").write_text("")
            settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks}
            settings |= {"MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": 1, "HF_HUB_OFFLINE": 1}
            command = [sys.executable, __file__, "--work", folder, chapter]
            env = os.environ | {name: str(value) for name, value in settings.items()}
            log = open(folder / f"rank{rank}.log", "w")
            processes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        seen = 0
        for result in results_of(processes, folder):
            yield left[seen], result
            seen += 1
        for process in processes:
            process.kill()
        left = left[seen:]
        # Try a model once more if the ranks hang or die, since many runs share their processes.
        if left and not seen and left[0] in tried:
            log = (folder / "rank0.log").read_text()[-300:]
            yield left.pop(0), {"failed": f"the ranks hang or die: {log}"}
        elif left:
            tried.add(left[0])


def results_of(processes, folder):
    """Yield what happened to each model in turn, until the ranks have ended, hang or die."""
    paths = [folder / f"results-{rank}.jsonl" for rank in range(len(processes))]
    seen, number, since = 0, 0, time.monotonic()
    while True:
        running = all(process.poll() is None for process in processes)
        lines = [line for path in paths for line in path.read_text().splitlines()[seen:][:1]]
        told = [json.loads(line) for line in lines]
        if len(told) != number:
            number, since = len(told), time.monotonic()
        # Under a launcher, a rank that fails ends the others. Here they may hang.
        failures = [result for result in told if "refused" in result or "failed" in result]
        waited = time.monotonic() - since
        late = not running or waited > (LAST_WORDS if failures else PATIENCE)
        if number == len(processes) or (late and failures):
            yield (failures or told)[0]
            seen += 1
        if late and number < len(processes):
            return
        if number < len(processes):
            time.sleep(0.2)


def work(folder, chapter):
    """Train the models of all jobs as one rank; write a line for each."""
    folder, rank = Path(folder), os.environ["RANK"]
    transformers.logging.set_verbosity_error()
    # Without this, gc.collect() below would look at all objects of all libraries.
    gc.freeze()
    for job in json.loads((folder / "jobs.json").read_text()):
        # fail() sleeps, so that only one rank prints the error.
        with mock.patch("time.sleep"):
            done = run(job)
        # Close the connections of a failed run, because the other rank may be waiting for it.
        if done["status"]:
            gc.collect()
        result = {}
        if rank == "0" or done["status"]:
            result = read_result(done, folder / chapter / job["row"])
        with open(folder / f"results-{rank}.jsonl", "a") as file:
            print(json.dumps(result), file=file)


def read_result(done, run_dir):
    """Return the curve of a run, or the line that refuses the model, or how the run failed."""
    lines = done["stderr"].strip().splitlines()
    errors = [line for line in lines if line.startswith("train_llm.py: error: ")]
    if done["status"] == 2 and errors:
        line = errors[-1].removeprefix("train_llm.py: error: ")
        return {"refused": re.sub(r"\S*/tmp\w+/", "", line)}
    if done["status"]:
        return {"failed": " ".join(lines[-1:])[:300]}
    curve = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    curve = [{name: row[name] for name in TOLERANCE if name in row} for row in curve]
    try:
        exported = validation_loss(run_dir / "model")
    except Exception as error:
        return {"failed": f"the exported model cannot be loaded: {error!r:.200}"}
    if abs(exported - curve[-1]["val_loss"]) > TOLERANCE["val_loss"]:
        return {"failed": f"exported val_loss {exported:.6f}, trained {curve[-1]['val_loss']:.6f}"}
    return {"curve": curve}


def validation_loss(folder):
    """Return the loss of an exported model on the samples that the runs held out."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"], info
    text = str(folder.parents[2] / TEXT)
    data = {"dataset_name": text, "dataset_subset": None, "text_column": "text"}
    data = argparse.Namespace(**data, seq_length=32, eval_samples=4)
    with redirect_stdout(sys.stderr), torch.no_grad():
        _, held_out = load("01").build_data(data, AutoTokenizer.from_pretrained(folder))
        ids = held_out.long()
        return model.eval()(input_ids=ids, labels=ids, use_cache=False).loss.item()


def difference(curve, reference):
    """Return the largest difference from chapter 01, as a multiple of what is tolerated."""
    assert len(curve) == len(reference)
    largest = 0.0
    for step, (row, other) in enumerate(zip(curve, reference, strict=True)):
        for name, tolerance in TOLERANCE.items():
            if name in row and (name != "grad_norm" or step <= 2):
                scale = other[name] if name == "grad_norm" else 1.0
                largest = max(largest, abs(row[name] - other[name]) / (tolerance * scale))
    return largest


def judge(rows):
    """Return how each row compares with chapter 01: equal, refused or wrong."""
    reference = {row["family"]: row.get("curve") for row in rows if row["chapter"] == "01"}
    for row in rows:
        curve, first = row.get("curve"), reference.get(row["family"])
        if "refused" in row:
            row["verdict"] = "refused"
        elif curve and first:
            row["difference"] = difference(curve, first)
            row["verdict"] = "equal" if row["difference"] <= 1 else "wrong"
        else:
            row["verdict"] = "wrong"
    return rows


def main():
    """Train what is not in the results yet; keep and print it."""
    args = parse_args()
    if args.work:
        return work(*args.work)
    rows, left_out = [], {}
    if args.output and Path(args.output).exists():
        before = json.loads(Path(args.output).read_text())
        rows, left_out = before["rows"], before["left_out"]
        rows = [row for row in rows if row["verdict"] != "wrong"]
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / TEXT).write_text((ROOT / "LICENSE").read_text())
        reasons = {row: build_folder(row, folder) for row in args.only}
        left_out |= {row: reason for row, reason in reasons.items() if reason}
        for chapter in args.chapters:
            done = {row["family"] for row in rows if row["chapter"] == chapter}
            left = [row for row in args.only if row not in done and row not in left_out]
            for family, result in train_rows(chapter, left, folder, args.device):
                rows.append({"family": family, "chapter": chapter} | result)
                row = judge(rows)[-1]
                details = row.get("failed") or row.get("refused") or row.get("difference", "")
                print(f"{chapter} {family:32} {row['verdict']} {details}", flush=True)
                keep(args.output, machine, {"rows": rows, "left_out": left_out})
    sys.exit(any(row["verdict"] == "wrong" for row in judge(rows)))


if __name__ == "__main__":
    main()
