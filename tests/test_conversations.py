"""Test that fine-tuning on conversations learns only the answers, on any layout."""

import json
import shutil
from argparse import Namespace

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from chats import (
    TEMPLATES,
    conversations,
    distances,
    documents_of_step,
    expected_documents,
    loss_of_documents,
    plain_model,
    prepare,
    split_documents,
    write_conversations,
    write_rows,
    write_tokens,
)
from conftest import ROOT, SCRIPTS, curves_of, disagreement, run_command, user_error
from families import ARGS, LONG_ROPE, OWN_SETTINGS, shrink
from marks import slow


@pytest.fixture
def chapter(load, one_rank_group):
    return load("conversations")


# ---- the gradient ----------------------------------------------------------------------------
def tokens_of(tokenizer, document):
    """Return an expected document as a tuple of (token, whether it is learned)."""
    tokens = []
    for text, is_learned in document:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += [(token, is_learned) for token in ids]
    # Nothing comes before the first token, so it cannot be predicted.
    return ((tokens[0][0], False), *tokens[1:])


WINDOW = {"mistral": ["--config", "sliding_window=24"]}
CASES = [("llama", "built-in"), ("mistral", "qwen3")]
CASES += [slow("gpt2", "qwen3"), slow("gemma3-window", "llama3")]


@pytest.mark.parametrize("family, template", CASES)
def test_packed_gradient_equals_one_conversation_at_a_time(
    chapter, layout_models, tmp_path, family, template
):
    folder = shutil.copytree(layout_models / family, tmp_path / family)
    if TEMPLATES[template]:
        (folder / "chat_template.jinja").write_text(TEMPLATES[template])
    words = ["-m", folder, "-d", write_conversations(tmp_path), *WINDOW.get(family, [])]
    args, model, train_set, held_out = prepare(chapter, *words)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [
        tokens_of(tokenizer, document)
        for turns in conversations()
        for document in expected_documents(template, turns)
    ]
    samples = torch.cat([train_set.pieces[0], held_out])
    assert sorted(split_documents(chapter, samples)) == sorted(expected)
    plain = plain_model(model)
    loss = loss_of_documents(plain, documents_of_step(chapter, args, train_set))
    loss.backward()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    found = distances(chapter, args, model, train_set, loss.item(), gradients)
    loss_apart, gradient_apart = found
    assert loss_apart < 1e-6 and gradient_apart < 1e-5


def check_family(chapter, kind, seq_length, settings):
    """Check a small model of a family as the script checks it before the first step."""
    args = Namespace(**ARGS | {"model_name": kind, "seq_length": seq_length})
    config = shrink(CONFIG_MAPPING[kind](), **OWN_SETTINGS.get(kind, {}) | settings)
    device = torch.device("cpu")
    model = chapter.shard(args, chapter.build_model(args, config), device)
    chapter.check_causal(args, model, device)


@pytest.mark.parametrize("kind", ["bloom", "qwen3_next", "xmod"])
def test_family_that_cannot_separate_conversations_is_refused(chapter, capsys, kind):
    problem = user_error(capsys, check_family, chapter, kind, 32, {})
    leak = "tokens attend to the conversation before theirs; choose a different model"
    assert f"--model-name {kind}: {leak}" in problem


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
# The angles of these models change at a length of 16 tokens.
BEYOND_A_DOCUMENT = {
    "longrope": {"rope_parameters": LONG_ROPE},
    "dynamic NTK": {"rope_parameters": DYNAMIC, "max_position_embeddings": 16},
}


@pytest.mark.parametrize("settings", BEYOND_A_DOCUMENT.values(), ids=BEYOND_A_DOCUMENT)
def test_model_that_looks_beyond_a_document_is_refused(chapter, capsys, settings):
    check_family(chapter, "llama", 15, settings)
    problem = user_error(capsys, check_family, chapter, "llama", 256, settings)
    line = "--seq-length 256: packing changes what llama computes for a conversation; lower it"
    assert line in problem


# ---- prepared tokens -------------------------------------------------------------------------
STEPS = "--num-steps 2 --global-batch-size 4 --eval-samples 4 -b 1 --eval-every 1 --lr 0.01".split()


def random_tokens(number, dtype):
    """Return samples of 64 random tokens, as prepare.py writes them for a text."""
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 259, (number, 64), generator=generator).to(dtype)


@pytest.fixture(scope="module")
def tokens(load, tmp_path_factory):
    """Prepare a text, context without answers, and samples that give rank 0 of 2 no answer."""
    root, chapter = tmp_path_factory.mktemp("tokens"), load("conversations")
    context = random_tokens(12, torch.int32) | chapter.CONTEXT
    context[:, [0, 20]] |= chapter.FIRST
    mixed = context.clone()
    for position, index in enumerate(chapter.random_order(0, 0, 8).tolist()):
        if position % 2:
            mixed[index, 30 : 32 + 4 * position] &= ~chapter.CONTEXT
    mixed[9:, 50:55] &= ~chapter.CONTEXT
    samples = {"text": random_tokens(12, torch.uint16), "context": context, "mixed": mixed}
    return {name: write_tokens(root / f"{name}.tokens", samples[name]) for name in samples}


@pytest.mark.slow
def test_rank_without_answers_changes_no_curve(chapter, tokens, tmp_path):
    job = "conversations", [*STEPS, "-d", tokens["mixed"]]
    curves = curves_of(tmp_path, {1: {"one": job}, 2: {"two": job}})
    assert disagreement(curves["one"], curves["two"]) == {}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two/model")
    held_out = chapter.map_samples(tokens["mixed"] / "000000.tokens", torch.int32, 64)[8:]
    with torch.no_grad():
        loss = loss_of_documents(model, split_documents(chapter, held_out)).item()
    assert loss == pytest.approx(curves["two"][2]["val_loss"], abs=1e-5)


@pytest.mark.slow
def test_prepared_text_is_learned_as_in_chapter_05(tokens, tmp_path):
    args = [*STEPS, "-d", tokens["text"]]
    curves = curves_of(tmp_path, {1: {name: (name, args) for name in ("05", "conversations")}})
    assert disagreement(curves["05"], curves["conversations"]) == {}


def test_step_without_answers_keeps_the_weights_finite(chapter, tokens):
    words = ["-s", 64, "-d", tokens["context"], "--global-batch-size", 4]
    args, model, train_set, _ = prepare(chapter, *words)
    optimizer, device = chapter.build_optimizer(args, model), torch.device("cpu")
    loss, _ = chapter.train_step(args, model, optimizer, train_set, 1, device)
    assert loss == 0 and all(weight.to_local().isfinite().all() for weight in model.parameters())


# ---- files -----------------------------------------------------------------------------------
def say(role, content, **more):
    return {"role": role, "content": content, **more}


def samples_of(chapter, path, template=None, **values):
    """Return the training samples and the held-out samples of a file."""
    args = {"dataset_name": str(path), "dataset_subset": None, "text_column": "messages"}
    args |= {"seq_length": 64, "eval_samples": 1, "model_name": "tiny", "seed": 0, "wandb_id": "a"}
    tokenizer = ByT5Tokenizer()
    tokenizer.chat_template = template or chapter.CHAT_TEMPLATE
    train_set, held_out = chapter.build_data(Namespace(**args | values), tokenizer)
    return torch.cat([*train_set.pieces, held_out])


def error_of(capsys, *args):
    """Return the error line that samples_of() ends with."""
    return user_error(capsys, samples_of, *args).splitlines()[-1]


ASK, ANSWER = say("user", "Why?"), say("assistant", "Because.")
CALL = {"type": "function", "function": {"name": "find", "arguments": {"word": "a"}}}
CALLS = [ASK, {"role": "assistant", "tool_calls": [CALL]}, say("tool", "b"), ANSWER]
MISTAKES = {
    "role": ([ASK, say("bot", "Hm.")], "unknown role bot; known are system, developer, user"),
    "empty": ([], "it has no messages"),
    "null": (None, "it has no messages"),
    "no answer": ([say("system", "Be short."), ASK], "its last turn is by the user; end it with"),
    "parts": ([say("user", [{"text": "Why?"}]), ANSWER], "a turn's content is not text, but [{"),
    "no content": ([ASK, {"role": "assistant"}], "a turn by the assistant has no content"),
    "tool calls": (CALLS, "the model's chat template leaves out 'find' of an answer"),
}


@pytest.mark.parametrize("turns, expected", MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_a_conversation_is_reported_with_its_number(
    chapter, capsys, tmp_path, turns, expected
):
    rows = [{"messages": messages} for messages in ([ASK, ANSWER], [ASK, ANSWER], turns)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    line = f"error: --dataset-name {path}: conversation 3: {expected}"
    assert line in error_of(capsys, chapter, path)


UNEQUAL = "{{ '<' if add_generation_prompt else messages[-1].content }}"
PAIR = {"prompt": "a", "completion": "b"}
FILES = {
    "text": ({"messages": "a"}, None, "conversation 1: a turn has no role and content, but is 'a'"),
    "latin1": (PAIR | {"prompt": "é"}, None, "conversation 0: 'utf-8' codec can't decode"),
    "column": ({"text": "a"}, None, "messages: no such column, and no prompt and completion; "),
    "unequal": (PAIR, UNEQUAL, "'b' does not begin with the prompt '<'"),
}


@pytest.mark.parametrize("row, template, expected", FILES.values(), ids=FILES)
def test_unusable_file_or_template_is_refused(chapter, capsys, tmp_path, row, template, expected):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(row, ensure_ascii=False) + "\n", encoding="latin1")
    assert expected in error_of(capsys, chapter, path, template)


def test_long_conversations_and_control_tokens_are_left_out(chapter, capsys, tmp_path):
    # Each good document fills a sample, because two of them do not fit into one sample.
    good = [[ASK, ANSWER], [say("system", "Be short."), ASK, ANSWER]]
    left_out = [[ASK, say("assistant", "a" * 64)], [say("user", "</s>"), ANSWER]]
    rows = [{"messages": turns} for turns in [*good, *left_out]]
    samples = samples_of(chapter, write_rows(tmp_path / "a.jsonl", rows))
    assert len(split_documents(chapter, samples)) == 2
    assert "Left out: 1 too long for --seq-length, 1 with a control token" in capsys.readouterr()[0]
    line = error_of(capsys, chapter, write_rows(tmp_path / "b.jsonl", rows[2:]))
    assert "--eval-samples 1: there are only 0 samples; add conversations" in line


def test_formats_of_conversations_give_the_same_samples(chapter, tmp_path):
    rows = {"messages": [], "conversations": [], "pairs": []}
    for question, answer in [("Why?", "Because."), ("How?", "So."), ("Is it so?", "It is.")]:
        rows["messages"].append({"messages": [say("user", question), say("assistant", answer)]})
        turns = [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]
        rows["conversations"].append({"conversations": turns})
        rows["pairs"].append({"prompt": question, "completion": answer})
    messages, *others = (
        samples_of(chapter, write_rows(tmp_path / f"{name}.jsonl", rows[name]), text_column=name)
        for name in rows
    )
    assert len(messages) == 2 and all(torch.equal(messages, other) for other in others)


# ---- the same on chapter 08 ------------------------------------------------------------------
PATCH = ROOT / "fine-tuning/conversations/on-08.patch"
PARALLEL = {
    "tensor": ["--tensor-parallel-size", 2],
    "gather": ["--context-parallel-size", 2],
    "ulysses": ["--context-parallel-size", 2, "--context-parallel-style", "ulysses"],
    "pipeline": ["--pipeline-parallel-size", 2],
    "interleaved": ["--pipeline-parallel-size", 2, "--pipeline-schedule", "interleaved-1f1b"],
}


@pytest.fixture
def merged_script(tmp_path):
    """Merge the diff of conversations into chapter 08; return the script's path."""
    script = shutil.copy(SCRIPTS["08"], tmp_path / "on_08.py")
    merge = ["git", "merge-file", "--ours", script, SCRIPTS["05"], SCRIPTS["conversations"]]
    assert run_command(*merge).returncode == 0
    done = run_command("patch", "--fuzz=0", script, PATCH)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout
    return script


@pytest.mark.exhaustive
def test_merged_into_chapter_08_the_curve_stays_the_same(merged_script, layout_models, tmp_path):
    args = ["-m", layout_models / "llama", "-d", write_conversations(tmp_path, 100), "-s", 128]
    args += ["-b", 2, "--lr", 0.001]
    jobs = {name: (merged_script, [*args, *flags]) for name, flags in PARALLEL.items()}
    curves = curves_of(tmp_path, {1: {"one": ("conversations", args)}, 2: jobs})
    apart = {name: disagreement(curves["one"], curves[name]) for name in jobs}
    assert apart == {name: {} for name in jobs}


def test_script_merged_into_chapter_08_has_all_names_of_conversations(load, merged_script):
    import harness

    own, merged = load("conversations"), harness.load(merged_script)
    assert {name for name in vars(own) if not name.startswith("_")} <= vars(merged).keys()
