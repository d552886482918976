"""Train a small model of each causal family of transformers in six chapters, and compare.

All:   python benchmarks/every_family.py --output benchmarks/results/families.json
Some:  python benchmarks/every_family.py --only llama gemma3_text+sliding_window=8

Each chapter must follow chapter 01's losses, or refuse the model in one line. The models have two
layers and random weights. Each rank is a fork of this process, which has imported the libraries.
The results hold each row as soon as it is known, so the same command continues after a stop. If a
chapter differs, fails with a traceback, or exports other weights, the exit status is 1.
"""

import argparse
import json
import multiprocessing
import os
import re
import runpy
import sys
import time
from itertools import product

import torch
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from harness import ROOT, benchmark, free_port, load, script_of

sys.path.insert(0, str(ROOT / "tests/support"))

from families import FAMILY_NAMES, OWN_SETTINGS, shrink

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
SAMPLE = """llama apertus bert bart qwen3_moe lfm2 gemma3_text+sliding_window=8
    llama4_text+attention_chunk_size=8""".split()
# Families that the small models of this script cannot compare.
NOT_COMPARED = {
    "phimoe": "its router draws experts at random in training, so each layout has other losses",
    "longcat_flash": "with few tokens, a rank may use no expert, and FSDP fails",
}
LARGEST = 20_000_000  # weights of a model
# The models learn a copy of LICENSE, because each run tokenizes all its text.
TEXT = "text.txt"
PATIENCE = 120  # seconds that a model may take
# In these models, rounding errors grow fast, so they are trained with a lower learning rate.
SENSITIVE = ["gemma4_unified_text"]
# The largest difference between two losses, and between two gradient norms in proportion. Gradient
# norms are compared in the first two steps only, because AdamW amplifies rounding errors.
TOLERANCE = {"loss": 1e-5, "val_loss": 1e-5, "grad_norm": 1e-4}


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


def train(chapter, row, folder, device):
    """Train a model in a chapter, on forked ranks; return the curve, the refusal or the failure."""
    num_ranks, flags = LAYOUTS[chapter]
    words = ["-m", folder / row, "-d", folder / TEXT, "--save-dir", folder / chapter, "-e", row]
    words += ["--device", device] + ["--lr", "1e-4"] * (row in SENSITIVE)
    command = list(map(str, [script_of(chapter), *FLAGS, *flags, *words]))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    ranks, logs = [], [folder / f"rank{rank}.log" for rank in range(num_ranks)]
    for rank, log in enumerate(logs):
        variables |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
        arguments = command, dict(variables), log, folder / chapter / row
        ranks.append(multiprocessing.get_context("fork").Process(target=work, args=arguments))
        ranks[-1].start()
    deadline = time.monotonic() + PATIENCE
    # A rank that fails ends the run, because the other ranks may wait for it.
    while time.monotonic() < deadline:
        statuses = [rank.exitcode for rank in ranks]
        if any(statuses) or None not in statuses:
            break
        time.sleep(0.02)
    for rank in ranks:
        rank.kill()
        rank.join()
    if statuses == [0] * num_ranks:
        return json.loads((folder / chapter / row / "result.json").read_text())
    lines = "".join(log.read_text() for log in logs).splitlines() or [""]
    errors = [line for line in lines if line.startswith("train_llm.py: error: ")]
    if 2 in statuses and errors:
        line = errors[-1].removeprefix("train_llm.py: error: ")
        return {"refused": re.sub(r"\S*/tmp\w+/", "", line)}
    return {"failed": f"exit statuses {statuses}: {lines[-1][:300]}"}


def work(command, variables, log, run_dir):
    """Train as one rank; rank 0 writes the curve."""
    with open(log, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    torch.set_num_threads(1)
    sys.argv = command
    runpy.run_path(command[0], run_name="__main__")
    if variables["RANK"] == "0":
        (run_dir / "result.json").write_text(json.dumps(read_result(run_dir)))


def read_result(run_dir):
    """Return the curve of a run, or the problem with its exported model."""
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
    with torch.no_grad():
        _, held_out = load("01").build_data(data, AutoTokenizer.from_pretrained(folder))
        ids = held_out.long()
        return model.eval()(input_ids=ids, labels=ids, use_cache=False).loss.item()


def difference(curve, reference, tolerances=TOLERANCE):
    """Return the largest difference of two curves, as a multiple of what is tolerated."""
    largest = 0.0
    for step, (row, other) in enumerate(zip(curve, reference, strict=True)):
        for name in row.keys() & tolerances.keys():
            if name != "grad_norm" or step <= 2:
                scale = other[name] if name == "grad_norm" else 1.0
                largest = max(largest, abs(row[name] - other[name]) / tolerances[name] / scale)
    return largest


def judge(rows):
    """Add each row's verdict against chapter 01: equal, refused or wrong; return the rows."""
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


def families(args, folder):
    """Train the models that are not in the results yet; fail if a row is wrong."""
    rows, left_out = [], {}
    if args.output and args.output.exists():
        before = json.loads(args.output.read_text())
        left_out = before["left_out"]
        rows = [row for row in before["rows"] if row["verdict"] != "wrong"]
    # Import the libraries of all chapters, so that the forks have them.
    load("08")
    (folder / TEXT).write_text((ROOT / "LICENSE").read_text())
    reasons = {row: build_folder(row, folder) for row in args.only}
    left_out |= {row: reason for row, reason in reasons.items() if reason}
    done = {(row["chapter"], row["family"]) for row in rows}
    for chapter, family in product(args.chapters, args.only):
        if family in left_out or (chapter, family) in done:
            continue
        result = train(chapter, family, folder, args.device)
        rows.append({"family": family, "chapter": chapter} | result)
        row = judge(rows)[-1]
        details = row.get("failed") or row.get("refused") or row.get("difference", "")
        print(f"{chapter} {family:32} {row['verdict']} {details}", flush=True)
        yield {"rows": rows, "left_out": left_out}
    sys.exit(any(row["verdict"] == "wrong" for row in judge(rows)))


def add_flags(add):
    """Declare the flags."""
    add("--only", nargs="+", choices=ROWS, default=ROWS, metavar="FAMILY", help="which models")
    add("--chapters", nargs="+", choices=LAYOUTS, default=list(LAYOUTS), help="which chapters")
    add("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: one GPU for each rank")


if __name__ == "__main__":
    # A fork cannot use a GPU that this process has used.
    benchmark(__doc__, families, add_flags, gpus=False)
