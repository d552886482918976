"""Test that the script of preferences computes DPO as two plain models do, answer by answer."""

import copy
import os
import shutil
from argparse import Namespace
from unittest import mock

import datasets
import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer, ByT5Tokenizer

import preparing
from chats import (
    TEMPLATES,
    copy_with_template,
    documents_of_step,
    largest_distance,
    pairs,
    plain_model,
    prepare,
    prepare_conversations,
    prepare_pairs,
    prepare_rows,
    split_documents,
    write_rows,
)
from conftest import SCRIPTS, SHORT, change_file, metrics, run_command, run_or_fail, user_error
from families import make_hub_folder
from marks import slow
from runs import copy_run

CPU = torch.device("cpu")


@pytest.fixture
def chapter(load, one_rank_group):
    return load("preferences")


# ---- a reference -----------------------------------------------------------------------------
def log_prob(model, document):
    """Compute the log-probability of a document's answer, as the sum over the answer's tokens."""
    ids = torch.tensor([[token for token, _ in document]])
    log_probs = model(input_ids=ids, use_cache=False).logits[0, :-1].log_softmax(-1)
    log_probs = log_probs.gather(-1, ids[0, 1:, None])[:, 0]
    return log_probs[torch.tensor([is_learned for _, is_learned in document[1:]])].sum()


def plain_step(model, reference, documents, beta):
    """Compute the gradients of DPO's mean loss over pairs.

    Return a tensor of four means: the loss, the accuracy, the margin and the chosen reward.
    """
    chosen, rejected = documents[::2], documents[1::2]
    totals = torch.zeros(4, dtype=torch.float64)
    for pair in zip(chosen, rejected, strict=True):
        with torch.no_grad():
            before = [log_prob(reference, document) for document in pair]
        rewards = [beta * (log_prob(model, it) - old) for it, old in zip(pair, before, strict=True)]
        margin = rewards[0] - rewards[1]
        loss = -logsigmoid(margin) / len(chosen)
        loss.backward()
        share = torch.stack([margin > 0, margin, rewards[0]]).detach() / len(chosen)
        totals += torch.cat([loss.detach()[None], share])
    return totals


def apart_in_step_2(chapter, folder, *words):
    """Compare step 2 with plain_step(); return the differences of the metrics and the gradients.

    Both differences are relative. Step 1 would hide mistakes, because the model still equals the
    reference, so the loss is always ln 2.
    """
    args, model, train_set, held_out = prepare(chapter, "--lr", 0.01, *words)
    reference, optimizer = plain_model(model), chapter.build_optimizer(args, model)
    chapter.add_references(args, folder, model, train_set, held_out, 0, CPU)
    loss, _ = chapter.train_step(args, model, optimizer, train_set, 1, CPU)
    assert loss[0].item() == pytest.approx(0.693147, abs=1e-6)
    plain = plain_model(model)
    documents = documents_of_step(chapter, args, train_set, 2)
    expected = plain_step(plain, reference, documents, args.beta)
    model.num_targets = chapter.pairs_at(args, train_set, 2)
    found = chapter.forward_backward(args, model, train_set, 2, CPU).double()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    metrics_apart = ((found - expected).norm() / expected.norm()).item()
    return metrics_apart, largest_distance(model, gradients)


CASES = [("llama", "llama2", 2), ("mistral", "qwen3", 8)]
CASES += [slow("gpt2", "phi3", 1), slow("qwen3", "chatml", 2), slow("llama", "built-in", 1)]
CASES += [slow("llama", "llama3", 8)]


@pytest.mark.parametrize("family, template, batch_size", CASES)
def test_packed_gradient_is_that_of_two_plain_models(
    chapter, layout_models, tmp_path, family, template, batch_size
):
    folder = copy_with_template(layout_models / family, tmp_path, template)
    words = ["-m", folder, "-d", prepare_pairs(tmp_path, model=folder), "-b", batch_size]
    metrics_apart, gradient_apart = apart_in_step_2(chapter, tmp_path, *words)
    assert metrics_apart < 1e-5 and gradient_apart < 1e-5


# In the script, each of these mistakes replaces the first text with the second text.
WRONG_STEPS = {
    "answers read each other": (
        "find_packed_sequence_indices = number_documents",
        "find_packed_sequence_indices = lambda position_ids: None",
    ),
    "mean of the tokens, not their sum": (
        "sums.scatter_add(1, documents, log_probs)",
        'sums.scatter_reduce(1, documents, log_probs, "mean", include_self=False)',
    ),
    "reference of this step": (
        "references.view(torch.float64)",
        "log_probs_of(args, model, batch).detach()",
    ),
    "micro-batches have equal weights": (
        ".sum((1, 2)) / model.num_targets",
        ".sum((1, 2)) / count_pairs(batch).sum() / args.accumulation",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WRONG_STEPS)
def test_comparison_finds_a_mistake(load, one_rank_group, layout_models, tmp_path, mistake):
    script = SCRIPTS["preferences"]
    chapter = load(change_file(script, *WRONG_STEPS[mistake], copy=tmp_path / "changed.py"))
    words = ["-m", layout_models / "llama", "-b", 1]
    words += ["-d", prepare_pairs(tmp_path, model=layout_models / "llama")]
    assert apart_in_step_2(chapter, tmp_path, *words)[1] > 0.01


# ---- another library ---------------------------------------------------------------------------
def train_with_trl(model, tokenizer, rows, args, folder):
    """Train four steps with TRL, each on all rows; return the metrics that TRL logs per step."""
    import trl

    options = {"num_train_epochs": 4, "logging_steps": 1, "max_grad_norm": 0.0, "beta": args.beta}
    options |= {"max_length": None, "use_cpu": True, "bf16": False, "report_to": []}
    options |= {"save_strategy": "no", "gradient_checkpointing": False, "disable_dropout": True}
    options |= {"lr_scheduler_type": "constant", "per_device_train_batch_size": len(rows)}
    config = trl.DPOConfig(str(folder), **options)
    matrices = [weight for weight in model.parameters() if weight.ndim >= 2]
    vectors = [weight for weight in model.parameters() if weight.ndim < 2]
    groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
    options = {"betas": (0.9, 0.95), "weight_decay": args.weight_decay}
    optimizer = torch.optim.AdamW(groups, lr=args.lr, **options)
    tools = {"processing_class": tokenizer, "optimizers": (optimizer, None)}
    model.config.architectures = [type(model).__name__]
    reference, train_set = copy.deepcopy(model), datasets.Dataset.from_list(rows)
    trainer = trl.DPOTrainer(model, reference, args=config, train_dataset=train_set, **tools)
    trainer.train()
    return [row for row in trainer.state.log_history if "grad_norm" in row]


@pytest.mark.exhaustive
def test_first_steps_are_those_of_trl(chapter, layout_models, tmp_path):
    """Train on all pairs in each step, so that the order of the pairs does not matter."""
    pytest.importorskip("trl", reason="install fine-tuning/preferences/requirements.txt")
    folder = copy_with_template(layout_models / "llama", tmp_path, "llama2")
    # TRL needs the same format in all rows. pairs() repeats three formats, so use every third row.
    # With samples of 512 tokens, no pair is too long, so prepare.py leaves out no pair.
    rows = pairs(72)[::3]
    tokens = prepare_rows(tmp_path, rows, "--preferences", "-m", folder, "-s", 512)
    num_samples = (tokens / "000000.tokens").stat().st_size // (4 * 512)
    words = ["-m", folder, "-d", tokens, "-s", 512, "--global-batch-size", num_samples]
    # With so many steps, the learning rates of the first four steps are almost equal.
    words += ["--num-steps", 10**6, "--warmup-steps", 1, "--max-grad-norm", 0, "--lr", 0.003]
    args, model, train_set, held_out = prepare(chapter, *words)
    samples = torch.cat([*train_set.pieces, held_out])
    train_set = chapter.Samples(args.seed, samples, iter(()))
    # Build the optimizer before add_references(), as main() does, because a forward pass leaves the
    # weights of FSDP's root module gathered.
    optimizer = chapter.build_optimizer(args, model)
    chapter.add_references(args, tmp_path, model, train_set, held_out, 0, CPU)
    plain = plain_model(model, torch.float32)
    # Undo TRL's changes to environment variables.
    with mock.patch.dict(os.environ):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        expected = train_with_trl(plain, tokenizer, rows, args, tmp_path)
    names = ["loss", "rewards/accuracies", "rewards/margins", "rewards/chosen", "grad_norm"]
    for step in range(1, 5):
        metrics, grad_norm = chapter.train_step(args, model, optimizer, train_set, step, CPU)
        row = [expected[step - 1][name] for name in names]
        assert [*metrics.tolist(), grad_norm.item()] == pytest.approx(row, rel=1e-4, abs=1e-5)


# ---- runs ------------------------------------------------------------------------------------
RUN = [*SHORT, "--lr", 0.003, "-s", 256, "--global-batch-size", 4, "--eval-samples", 3, "-b", 2]
RUN += ["--num-steps", 8, "--eval-every", 4, "--log-every", 1, "--warmup-steps", 1]


@pytest.mark.slow
def test_stopped_run_reads_its_references_and_continues(tmp_path):
    """Resume from step 4 on two ranks, with the references that were computed before step 1.

    References from the weights of step 4 would change the losses.
    """
    tokens = prepare_pairs(tmp_path, 100)
    args = [*RUN, "-d", tokens, "--checkpoint-every", 4, "--save-dir", tmp_path]
    run_or_fail(1, [("preferences", [*args, "-e", "complete"])], tmp_path / "jobs1")
    run = tmp_path / "stopped"
    copy_run(tmp_path / "complete", 4, run)
    (run / "metrics.jsonl").unlink()
    run_or_fail(2, [("preferences", [*args, "-e", "stopped"])], tmp_path / "jobs2")
    complete, stopped = metrics(tmp_path / "complete"), metrics(run)
    assert sorted(stopped) == [5, 6, 7, 8]
    for step, row in stopped.items():
        for name in ("loss", "margin", "chosen_reward", "grad_norm"):
            assert row[name] == pytest.approx(complete[step][name], rel=1e-4, abs=1e-5), step
    assert complete[0]["val_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert complete[8]["accuracy"] > 0.9 and complete[8]["margin"] > complete[2]["margin"]


@pytest.mark.slow
def test_adapters_learn_preferences_from_the_reference_of_the_frozen_model(layout_models, tmp_path):
    """Merge preferences into LoRA's script, as the guide explains, and train.

    LoRA's references must equal the references of a full model, because new adapters change
    nothing.
    """
    script = shutil.copy(SCRIPTS["lora"], tmp_path / "on_lora.py")
    parts = script, SCRIPTS["conversations"], SCRIPTS["preferences"]
    assert run_command("git", "merge-file", "--theirs", *parts).returncode == 0
    base = make_hub_folder(layout_models, tmp_path, "llama")
    args = [*RUN, "-m", base, "--pretrained", "-d", prepare_pairs(tmp_path, 100, base)]
    args += ["--num-steps", 4, "--save-dir", tmp_path]
    jobs = [("preferences", [*args, "-e", "full"]), (script, [*args, "-e", "lora"])]
    run_or_fail(1, jobs, tmp_path / "jobs")
    full, lora = (torch.load(tmp_path / it / "references/log_probs.pt") for it in ("full", "lora"))
    for expected, found in zip(full, lora, strict=True):
        values = expected.view(torch.float64), found.view(torch.float64)
        assert torch.allclose(*values, rtol=1e-5) and values[0].abs().max() > 1
    assert metrics(tmp_path / "lora")[4]["margin"] > 0


# ---- files -----------------------------------------------------------------------------------
def test_formats_of_pairs_give_the_same_tokens(tmp_path):
    ask, yes, no = (
        {"role": role, "content": text}
        for role, text in [("user", "Why?"), ("assistant", "Because."), ("assistant", "No.")]
    )
    rows = [{"prompt": "Why?", "chosen": "Because.", "rejected": "No."}]
    rows.append({"prompt": [ask], "chosen": [yes], "rejected": [no]})
    rows.append({"chosen": [ask, yes], "rejected": [ask, no]})
    rows.append({"prompt": "Why?", "chosen": [ask, yes], "rejected": [ask, no]})
    tokens = prepare_rows(tmp_path, rows, "--preferences", "-s", 64)
    ids = torch.from_file(str(tokens / "000000.tokens"), size=4 * 64, dtype=torch.int32)
    documents = split_documents(preparing.MODULE, ids.view(4, 64))
    assert len(set(documents[::2])) == len(set(documents[1::2])) == 1 and len(documents) == 8
    learned = [[token for token, is_learned in it if is_learned] for it in documents[:2]]
    assert [ByT5Tokenizer().decode(ids) for ids in learned] == ["Because.</s>", "No.</s>"]


MISTAKES = {
    "column": ({"chosen": "a"}, "no columns chosen and rejected; the columns are: chosen"),
    "same": ({"prompt": "q", "chosen": "a", "rejected": "a"}, "chosen and rejected are the same"),
    "empty": ({"prompt": "q", "chosen": [], "rejected": []}, "it has no messages"),
    "no prompt": ({"chosen": "a", "rejected": "b"}, "its first turn is by the assistant"),
}


@pytest.mark.parametrize("row, expected", MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_a_pair_is_reported_with_its_line(tmp_path, row, expected):
    path = write_rows(tmp_path / "a.jsonl", [*pairs(2), row])
    output = preparing.prepare(tmp_path / "a.tokens", path, "--preferences", status=2)
    assert f"error: {path}, line 3: {expected}" in output


def test_folder_of_another_kind_is_refused_by_each_script(load, chapter, capsys, tmp_path):
    folders = {"conversations": prepare_conversations(tmp_path)}
    folders["preferences"] = prepare_pairs(tmp_path)
    expected = {
        ("01", "conversations"): "holds conversations; train on it with fine-tuning/conversations",
        ("01", "preferences"): "holds preferences; train on it with fine-tuning/preferences",
        ("conversations", "preferences"): "holds preferences; train on it with",
        ("preferences", "conversations"): "holds no pairs; write it with prepare.py --preferences",
    }
    for (name, kind), problem in expected.items():
        args = Namespace(dataset_name=folders[kind], seq_length=256)
        pieces = load(name).pieces_of(args, ByT5Tokenizer())
        assert f"--dataset-name {folders[kind]}: {problem}" in user_error(capsys, next, pieces)
    args = Namespace(dataset_name=folders["preferences"], seq_length=128)
    problem = user_error(capsys, next, chapter.pieces_of(args, ByT5Tokenizer()))
    assert f"--seq-length 128: {folders['preferences']} has samples of 256 tokens" in problem


def test_template_of_a_folder_is_exported(chapter, layout_models, tmp_path):
    folder = copy_with_template(layout_models / "llama", tmp_path, "phi3")
    tokens = prepare_pairs(tmp_path, model=folder)
    (folder / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = Namespace(dataset_name=tokens, seq_length=256)
    next(chapter.pieces_of(args, tokenizer))
    assert tokenizer.chat_template == TEMPLATES["phi3"]
