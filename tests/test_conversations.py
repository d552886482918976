"""Fine-tuning on conversations: what is learned, from which tokens, and on any layout."""

import json
import shutil

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chats import TEMPLATES, conversations, expected_documents
from conftest import prepare_training

FLAGS = "--device cpu --precision fp32 -s 256 -b 2 --global-batch-size 8 --eval-samples 1".split()


@pytest.fixture
def chat_model(layout_models, tmp_path):
    """Return a function that copies a tiny model's folder, with a chat template."""

    def copy(family, template):
        folder = shutil.copytree(layout_models / family, tmp_path / f"{family}-{template}")
        if TEMPLATES[template]:
            (folder / "chat_template.jinja").write_text(TEMPLATES[template])
        return folder

    return copy


@pytest.fixture
def data(tmp_path):
    """Write the conversations to a file, and return its path."""
    path = tmp_path / "conversations.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in conversations()))
    return path


def prepare(chapter, *words):
    """Return the arguments, the sharded model and the samples of a command line."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        args, model, _, train_set, held_out = prepare_training(chapter, *FLAGS, *words)
    device = torch.device("cpu")
    return args, chapter.shard(args, model, device), train_set, held_out


def split_documents(chapter, samples):
    """Return the documents in samples as tuples of (token, whether it is learned), without padding."""
    documents = []
    for sample in samples.tolist():
        for token in sample:
            if token & chapter.FIRST:
                documents.append([])
            is_learned = not token & chapter.CONTEXT
            documents[-1].append((token & (chapter.CONTEXT - 1), is_learned))
    return [tuple(document) for document in documents if any(learned for _, learned in document)]


def tokens_of(tokenizer, document):
    """Return an expected document as a tuple of (token, whether it is learned)."""
    tokens = []
    for text, is_learned in document:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += [(token, is_learned) for token in ids]
    # Nothing comes before the first token, so it cannot be predicted.
    return ((tokens[0][0], False), *tokens[1:])


def reference(model, documents):
    """Return the loss and the gradients in fp64, from one document at a time."""
    plain = AutoModelForCausalLM.from_config(model.config, dtype=torch.float64)
    weights = {name: weight.full_tensor() for name, weight in model.state_dict().items()}
    plain.load_state_dict(weights)
    plain.set_attn_implementation("eager")
    plain.train()
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([[token for token, _ in document]])
        labels = [token if learned else -100 for token, learned in document]
        logits = plain(input_ids=ids, use_cache=False).logits[0, :-1]
        targets = torch.tensor(labels[1:])
        total += torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
        count += int((targets != -100).sum())
    (total / count).backward()
    return (total / count).item(), {name: weight.grad for name, weight in plain.named_parameters()}


def distance(chapter, args, model, train_set, documents):
    """Return how far the loss and the gradients of step 1 are from the reference's."""
    expected_loss, expected = reference(model, documents)
    loss = chapter.forward_backward(args, model, train_set, 1, torch.device("cpu"))
    apart = []
    for name, weight in model.named_parameters():
        gradient, wanted = weight.grad.full_tensor().double(), expected[name]
        if wanted.norm() > 1e-12:
            apart.append(((gradient - wanted).norm() / wanted.norm()).item())
    return abs(loss.item() - expected_loss), max(apart)


CASES = [("llama", name) for name in TEMPLATES]
CASES += [("gpt2", "chatml"), ("mistral", "qwen3"), ("gemma3-window", "llama3")]


@pytest.mark.parametrize("family, template", CASES)
def test_packed_gradient_equals_one_conversation_at_a_time(
    load, one_rank_group, chat_model, data, family, template
):
    chapter = load("conversations")
    words = ["--config", "sliding_window=24"] if family == "mistral" else []
    folder = chat_model(family, template)
    args, model, train_set, held_out = prepare(chapter, "-m", folder, "-d", data, *words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [
        tokens_of(tokenizer, document)
        for turns in conversations()
        for document in expected_documents(template, turns)
    ]
    samples = torch.cat([train_set.pieces[0], held_out])
    assert sorted(split_documents(chapter, samples)) == sorted(expected)
    batch = chapter.samples_at(args, train_set, range(args.global_batch_size))
    documents = split_documents(chapter, batch)
    loss_apart, gradient_apart = distance(chapter, args, model, train_set, documents)
    assert loss_apart < 1e-6 and gradient_apart < 1e-5
