"""Test that the script of preferences computes DPO as two plain models do, answer by answer."""

from argparse import Namespace

import pytest
import torch
from torch.nn.functional import logsigmoid
from transformers import AutoTokenizer, ByT5Tokenizer

import preparing
from chats import (
    TEMPLATES,
    copy_model,
    documents_of_step,
    gradients_apart,
    pairs,
    plain_model,
    prepare,
    prepare_conversations,
    prepare_pairs,
    prepare_rows,
    split_documents,
    write_rows,
)
from conftest import SHORT, metrics, run_or_fail, user_error
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
    """Compute the gradients of DPO's mean loss over pairs; return the loss and the metrics."""
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


CASES = [("llama", "llama2", 2), ("mistral", "qwen3", 8)]
CASES += [slow("gpt2", "qwen3", 1), slow("qwen3", "llama3", 2), slow("llama", "built-in", 1)]


@pytest.mark.parametrize("family, template, batch_size", CASES)
def test_packed_gradient_is_that_of_two_plain_models(
    chapter, layout_models, tmp_path, family, template, batch_size
):
    """Compare step 2 with plain_step(), because the loss of step 1 is always ln 2."""
    folder = copy_model(layout_models / family, tmp_path / family, template)
    words = ["-m", folder, "-d", prepare_pairs(tmp_path, model=folder), "-b", batch_size]
    args, model, train_set, held_out = prepare(chapter, "--lr", 0.01, *words)
    reference, optimizer = plain_model(model), chapter.build_optimizer(args, model)
    chapter.add_references(args, tmp_path, model, train_set, held_out, 0, CPU)
    loss, _ = chapter.train_step(args, model, optimizer, train_set, 1, CPU)
    assert loss[0].item() == pytest.approx(0.693147, abs=1e-6)
    plain, documents = plain_model(model), documents_of_step(chapter, args, train_set, 2)
    expected = plain_step(plain, reference, documents, args.beta)
    model.num_targets = chapter.pairs_at(args, train_set, 2)
    found = chapter.forward_backward(args, model, train_set, 2, CPU).double()
    assert (found - expected).norm() < 1e-5 * expected.norm()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    assert gradients_apart(model, gradients) < 1e-5


# ---- runs ------------------------------------------------------------------------------------
RUN = [*SHORT, "--lr", 0.003, "-s", 256, "--global-batch-size", 4, "--eval-samples", 3, "-b", 2]
RUN += ["--num-steps", 8, "--eval-every", 4, "--log-every", 1, "--warmup-steps", 1]


@pytest.mark.slow
def test_stopped_run_reads_its_references_and_continues(tmp_path):
    """Resume from step 4 on two ranks; references computed at step 4 would change the losses."""
    tokens = prepare_pairs(tmp_path, 100)
    args = [*RUN, "-d", tokens, "--checkpoint-every", 4, "--save-dir", tmp_path]
    run_or_fail(1, [("preferences", [*args, "-e", "complete"])], tmp_path / "jobs1")
    copy_run(tmp_path / "complete", 4, tmp_path / "stopped")
    (tmp_path / "stopped/metrics.jsonl").unlink()
    run_or_fail(2, [("preferences", [*args, "-e", "stopped"])], tmp_path / "jobs2")
    complete, stopped = metrics(tmp_path / "complete"), metrics(tmp_path / "stopped")
    assert sorted(stopped) == [5, 6, 7, 8]
    for step, row in stopped.items():
        for name in ("loss", "margin", "chosen_reward", "grad_norm"):
            assert row[name] == pytest.approx(complete[step][name], rel=1e-4, abs=1e-5), step
    assert complete[0]["val_loss"] == pytest.approx(0.693147, abs=1e-6)
    assert complete[8]["accuracy"] > 0.9 and complete[8]["margin"] > complete[2]["margin"]


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
    folder = copy_model(layout_models / "llama", tmp_path / "llama", "qwen3")
    tokens = prepare_pairs(tmp_path, model=folder)
    (folder / "chat_template.jinja").unlink()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = Namespace(dataset_name=tokens, seq_length=256)
    next(chapter.pieces_of(args, tokenizer))
    assert tokenizer.chat_template == TEMPLATES["qwen3"]
