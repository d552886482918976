"""Test that fine-tuning on conversations learns only the answers, on any layout."""

import json
import re
import shutil
from argparse import Namespace
from itertools import groupby

import numpy as np
import pyarrow
import pyarrow.parquet as pq
import pytest
import torch
from tokenizers import normalizers
from torch.nn.attention import flex_attention as flex
from transformers import AutoModelForCausalLM, AutoTokenizer, ByT5Tokenizer
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import preparing
from chats import (
    TEMPLATES,
    conversations,
    copy_with_template,
    distances,
    documents_of_step,
    expected_documents,
    loss_of_documents,
    plain_model,
    prepare,
    prepare_conversations,
    prepare_rows,
    split_documents,
    write_rows,
    write_tokens,
)
from conftest import ROOT, SCRIPTS, change_file, curves_of, disagreement, run_command, user_error
from families import ARGS, LONG_ROPE, OWN_SETTINGS, fast_byte_tokenizer, shrink
from marks import slow
from preparing import MODULE

FIRST, CONTEXT = MODULE.FIRST, MODULE.CONTEXT


@pytest.fixture
def chapter(load, one_rank_group):
    return load("conversations")


# ---- the gradient ----------------------------------------------------------------------------
def tokens_of(tokenizer, document):
    """Tokenize a document of expected_documents().

    Return a tuple of pairs (token, whether the token is learned).
    """
    tokens = []
    for text, is_learned in document:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += [(token, is_learned) for token in ids]
    # Mark the first token as not learned, because no earlier token can predict it.
    return ((tokens[0][0], False), *tokens[1:])


CASES = [("llama", "llama2", 1, "sdpa"), ("mistral", "qwen3", 8, "sdpa")]
CASES += [slow("gpt2", "phi3", 2, "sdpa"), slow("gemma3-window", "llama3", 1, "sdpa")]
CASES += [slow("llama", "built-in", 2, "sdpa"), slow("qwen3", "chatml", 8, "sdpa")]
# Test flex attention with Gemma 3, which has layers with a sliding window and layers without a
# window.
CASES += [slow("gemma3-window", "llama3", 2, "flex_attention")]


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Run flex attention as plain operations, because torch refuses its backward pass on a CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _: flex.flex_attention)


@pytest.mark.parametrize("family, template, batch_size, attention", CASES)
def test_packed_gradient_equals_one_conversation_at_a_time(
    chapter, layout_models, tmp_path, flex_on_cpu, family, template, batch_size, attention
):
    folder = copy_with_template(layout_models / family, tmp_path, template)
    words = ["-m", folder, "-d", prepare_conversations(tmp_path, model=folder)]
    words += ["-b", batch_size, "--attention", attention]
    words += ["--config", "sliding_window=24"] * (family == "mistral")
    args, model, train_set, held_out = prepare(chapter, *words)
    assert model.config._attn_implementation == attention
    tokenizer = AutoTokenizer.from_pretrained(folder)
    expected = [
        tokens_of(tokenizer, document)
        for turns in conversations()
        for document in expected_documents(template, turns)
    ]
    samples = torch.cat([train_set.pieces[0], held_out])
    assert sorted(split_documents(chapter, samples)) == sorted(expected)
    loss_apart, gradient_apart = distances_from_plain(chapter, args, model, train_set)
    assert loss_apart < 1e-6 and gradient_apart < 1e-5


def distances_from_plain(chapter, args, model, train_set):
    """Compare a chapter's step 1 with an unsharded model that reads one document at a time.

    Return the difference of the losses, and the largest relative difference of a gradient.
    """
    plain = plain_model(model)
    loss = loss_of_documents(plain, documents_of_step(chapter, args, train_set))
    loss.backward()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    return distances(chapter, args, model, train_set, loss.item(), gradients)


# In the script, each of these mistakes replaces the first text with the second text.
WRONG_STEPS = {
    "documents read each other": (
        "find_packed_sequence_indices = number_documents",
        "find_packed_sequence_indices = lambda position_ids: None",
    ),
    "context is learned": ("labels = ids.where(batch & CONTEXT == 0, -100)", "labels = ids"),
    "positions start at 1": ("positions - starts}", "positions - starts + 1}"),
    "micro-batches have equal weights": (
        "loss_function(hidden, labels) / model.num_targets",
        "loss_function(hidden, labels) / count_answers(batch) / args.accumulation",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("mistake", WRONG_STEPS)
def test_comparison_finds_a_mistake(load, one_rank_group, layout_models, tmp_path, mistake):
    script = SCRIPTS["conversations"]
    chapter = load(change_file(script, *WRONG_STEPS[mistake], copy=tmp_path / "changed.py"))
    model_dir = layout_models / "gpt2"
    words = ["-m", model_dir, "-d", prepare_conversations(tmp_path, model=model_dir), "-b", 1]
    args, model, train_set, _ = prepare(chapter, *words)
    assert distances_from_plain(chapter, args, model, train_set)[1] > 0.01


def check_family(chapter, kind, seq_length, settings):
    """Check a small model of a family as the script checks it before the first step."""
    args = Namespace(**ARGS | {"model_name": kind, "seq_length": seq_length})
    config = shrink(CONFIG_MAPPING[kind](), **OWN_SETTINGS.get(kind, {}) | settings)
    device = torch.device("cpu")
    model = chapter.shard(args, chapter.build_model(args, config), device)
    chapter.check_packing(args, model, device)


@pytest.mark.parametrize("kind", ["bloom", "qwen3_next", "xmod"])
def test_family_that_cannot_separate_conversations_is_refused(chapter, capsys, kind):
    problem = user_error(capsys, check_family, chapter, kind, 32, {})
    assert f"--seq-length 32: packing changes what {kind} computes for a conversation" in problem


DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
# With these settings, the rotary angles of all positions change if a sample has more than 16
# tokens.
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
    """Write the folders of tokens `text`, `context` and `mixed`; return their paths by name.

    `text` has plain text, and `context` has conversations without answers. In `mixed`, only the
    held-out samples have answers, and the training samples of rank 1 if two ranks train.
    """
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


ASK, ANSWER = say("user", "Why?"), say("assistant", "Because.")


def texts_of(tokenizer, tokens):
    """Read a folder of tokens; return the sorted texts of all documents that have an answer.

    In these texts, each answer is between » and «.
    """
    texts = []
    for token in np.fromfile(tokens / "000000.tokens", np.int32).tolist():
        texts += [[]] if token & FIRST else []
        texts[-1].append(token)
    found = []
    for document in texts:
        text = ""
        for is_context, ids in groupby(document, lambda token: token & CONTEXT):
            part = tokenizer.decode([token & (CONTEXT - 1) for token in ids])
            text += part if is_context else f"»{part}«"
        found.append(text)
    return sorted(text for text in found if "»" in text)


CALL = {"type": "function", "function": {"name": "find", "arguments": {"word": "a"}}}
CALLS = [ASK, {"role": "assistant", "tool_calls": [CALL]}, say("tool", "b"), ANSWER]
MISTAKES = {
    "role": ([ASK, say("bot", "Hm.")], "unknown role bot; use one of system, developer, user"),
    "empty": ([], "it has no messages"),
    "null": (None, "it has no messages"),
    "no answer": ([say("system", "Be short."), ASK], "its last turn is by the user; end it with"),
    "no question": ([ANSWER], "its first turn is by the assistant; begin it with a turn by"),
    "picture": ([say("user", [{"type": "image"}]), ANSWER], "a turn's content is [{"),
    "no content": ([ASK, {"role": "assistant"}], "a turn by the assistant has no content"),
    "tool calls": (CALLS, "the model's chat template leaves out 'find' of an answer"),
    "thoughts": ([ASK, ANSWER | {"thinking": "Hm."}], "the model's chat template leaves out 'Hm.'"),
    "weight": ([ASK, ANSWER | {"weight": 0.5}], "a turn has weight 0.5; use 0 or 1"),
    "nothing": ([ASK, ANSWER | {"train": False}], "it has no answer to learn"),
    "text": ("a", "a turn is 'a'; make it an object with role and content"),
}


@pytest.mark.parametrize("turns, expected", MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_a_conversation_is_reported_or_left_out(tmp_path, turns, expected):
    rows = [{"messages": messages} for messages in ([ASK, ANSWER], [ASK, ANSWER], turns)]
    path = write_rows(tmp_path / "a.jsonl", rows)
    output = preparing.prepare(tmp_path / "a.tokens", path, "--conversations", status=2)
    assert f"error: {path}, line 3: {expected}" in output
    assert output.endswith("; repair it, or pass --skip-bad to leave it out\n")
    output = preparing.prepare(tmp_path / "a.tokens", path, "--conversations", "--skip-bad")
    assert "1 bad documents left out" in output and "3 rows are packed into 1 samples" in output


def save_tokenizer(folder, template, tokenizer=None):
    """Save a tokenizer with a chat template; return the folder. The default is a byte tokenizer."""
    tokenizer = tokenizer or fast_byte_tokenizer()
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return folder


def test_template_that_changes_the_prompt_is_refused(tmp_path):
    template = "{{ '<' if add_generation_prompt else messages[-1].content }}"
    model = save_tokenizer(tmp_path / "model", template)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [ASK, ANSWER]}])
    words = path, "--conversations", "-m", model
    output = preparing.prepare(tmp_path / "a.tokens", *words, status=2)
    assert "line 1: with the model's chat template, the answer's text 'Because.' does not" in output


def test_answers_without_a_control_token_at_their_end_are_counted(tmp_path):
    path = write_rows(tmp_path / "a.jsonl", [{"messages": TURNS}])
    output = preparing.prepare(tmp_path / "a.tokens", path, "--conversations")
    assert "end without a control token" not in output
    model = save_tokenizer(tmp_path / "model", TEMPLATES["qwen3"])
    output = preparing.prepare(tmp_path / "b.tokens", path, "--conversations", "-m", model)
    assert "2 answers end without a control token" in output


def test_weights_mix_conversations_and_count_only_what_is_written(tmp_path):
    turns = conversations(600)
    rows = [{"messages": [turn | {"content": "a"} for turn in it]} for it in turns[:60]]
    small = write_rows(tmp_path / "small.jsonl", rows)
    large = write_rows(tmp_path / "large.jsonl", [{"messages": it} for it in turns])
    tokens, sources = tmp_path / "a.tokens", [f"{large}:0.5", f"{small}:0.5"]
    output = preparing.prepare(tokens, *sources, "--conversations", "-s", 256)
    written = sum(path.stat().st_size for path in tokens.glob("*.tokens")) // (4 * 256)
    counted = re.findall(r"packed into ([\d,]+) samples", output)
    assert 0 < sum(int(number.replace(",", "")) for number in counted) <= written
    assert "small.jsonl: " in output and " times" in output


def test_long_conversations_and_control_tokens_are_left_out(tmp_path):
    # Each good document gets its own sample, because two good documents do not fit into one sample.
    good = [[ASK, ANSWER], [say("system", "Be short."), ASK, ANSWER]]
    left_out = [[ASK, say("assistant", "a" * 64)], [say("user", "</s>"), ANSWER]]
    left_out.append([ASK, ANSWER | {"thinking": "</s>"}])
    rows = [{"messages": turns} for turns in [*good, *left_out]]
    path = write_rows(tmp_path / "a.jsonl", rows)
    output = preparing.prepare(tmp_path / "a.tokens", path, "--conversations", "-s", 64)
    assert "5 rows are packed into 2 samples" in output
    assert "Left out: 1 too long for --seq-length, 2 with a control token in their text" in output


TURNS = [ASK, ANSWER, say("user", "How?"), say("assistant", "So.")]
SHAREGPT = [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]
SHAREGPT += [{"from": "human", "value": "How?"}, {"from": "gpt", "value": "So."}]
SYSTEM = [say("system", "Be short."), *TURNS]
# The rows of each group have different formats, but the same meaning.
EQUAL = {
    "turns": [{"messages": TURNS}, {"conversations": SHAREGPT}],
    "system": [{"messages": SYSTEM}, {"conversations": SHAREGPT, "system": "Be short."}],
    "parts": [
        {"messages": TURNS[:2]},
        {"messages": [say("user", [{"type": "text", "text": "Why?"}]), ANSWER]},
        {"prompt": "Why?", "completion": "Because."},
        {"prompt": [ASK], "completion": [ANSWER]},
    ],
    "context": [
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        {"messages": [ASK, ANSWER | {"weight": 0}, *TURNS[2:]]},
        {"messages": [ASK, ANSWER | {"train": False}, *TURNS[2:]]},
        {"messages": [ASK, ANSWER | {"loss_mask": 0}, *TURNS[2:]]},
    ],
}


@pytest.mark.parametrize("rows", EQUAL.values(), ids=EQUAL)
def test_formats_of_conversations_give_the_same_tokens(tmp_path, rows):
    tokens = prepare_rows(tmp_path, rows, "--conversations", "-s", 512)
    first, *others = texts_of(ByT5Tokenizer(), tokens)
    assert len(others) == len(rows) - 1 and set(others) == {first}
    assert first.count("»") == (2 if rows in (EQUAL["turns"], EQUAL["system"]) else 1)


# This template resembles Qwen3's: it shows the tools, the tool calls, and their results.
TOOLS = """{% for tool in tools or [] %}{{ tool | tojson }}
{% endfor %}{% for message in messages %}<{{ message.role }}>{{ message.content }}
{%- for call in message.tool_calls or [] %}<call>{{ call.function | tojson }}{% endfor %}<end>
{% endfor %}{{ "<assistant>" if add_generation_prompt }}"""
PARAMETERS = {"word": {"type": "string"}}
TOOL = {"type": "function", "function": {"name": "find", "parameters": PARAMETERS}}
NULLS = {"type": "function", "function": {"name": "find", "arguments": {"word": "a", "x": None}}}
AS_TEXT = {"type": "function", "function": CALL["function"] | {"arguments": '{"word": "a"}'}}
FROM_FUNCTION = [
    {"from": "human", "value": "Why?"},
    {"from": "function_call", "value": json.dumps(CALL["function"])},
    {"from": "observation", "value": "b"},
    {"from": "gpt", "value": "Because."},
]


def call_rows():
    """Return rows with the same conversation and tool call, in the formats of several data sets."""
    ends = [say("tool", "b"), ANSWER]
    calls = [say("assistant", "", tool_calls=[call]) for call in (CALL, NULLS, AS_TEXT)]
    rows = [{"messages": [ASK, call, *ends], "tools": [TOOL]} for call in calls]
    rows.append({"messages": [ASK, calls[0], *ends], "tools": json.dumps([TOOL])})
    return [*rows, {"conversations": FROM_FUNCTION, "tools": json.dumps([TOOL])}]


def test_calls_of_tools_are_learned_without_the_null_keys_of_tables(tmp_path):
    words = "--conversations", "-s", 512, "-m", save_tokenizer(tmp_path / "model", TOOLS)
    tokens = prepare_rows(tmp_path, call_rows(), *words)
    # Test a Parquet table, too: there, each call has the keys of all calls, with null for missing
    # values.
    table = tmp_path / "a.parquet"
    pq.write_table(pyarrow.Table.from_pylist(call_rows()[:2]), table)
    preparing.prepare(tmp_path / "a.tokens", table, *words)
    found = texts_of(fast_byte_tokenizer(), tokens)
    found += texts_of(fast_byte_tokenizer(), tmp_path / "a.tokens")
    call = '{"name": "find", "arguments": {"word": "a"}}'
    expected = f"<user>Why?<end>\n<assistant>»<call>{call}<end>«\n"
    expected += "<tool>b<end>\n<assistant>»Because.<end>«"
    assert [text.partition("\n")[2] for text in found] == [expected] * 7
    assert {text.partition("\n")[0] for text in found} == {json.dumps(TOOL)}


def test_answer_does_not_begin_with_the_space_that_a_tokenizer_adds(tmp_path):
    tokenizer = fast_byte_tokenizer()
    # Put a space before each text, as the tokenizer of Llama 2 does.
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    model = save_tokenizer(tmp_path / "model", TEMPLATES["qwen3"], tokenizer)
    tokens = prepare_rows(tmp_path, [{"messages": TURNS}], "--conversations", "-m", model)
    [text] = texts_of(tokenizer, tokens)
    assert "assistant\n»Because.<|im_end|>«" in text
    ids = np.fromfile(tokens / "000000.tokens", np.int32)
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False).rstrip()
    expected = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert [token & (CONTEXT - 1) for token in ids.tolist()[: len(expected)]] == expected


# ---- the same on chapters 08 and 09 ------------------------------------------------------------
PATCH = ROOT / "fine-tuning/conversations/parallelism.patch"
CP2, PP2 = ["--context-parallel-size", 2], ["--pipeline-parallel-size", 2]
EP2 = ["--expert-parallel-size", 2]
# Map each chapter to its layouts; each layout has a number of ranks and a list of flags.
LAYOUTS = {
    "08": {
        "tensor": (2, ["--tensor-parallel-size", 2]),
        "gather": (2, CP2),
        "ulysses": (2, [*CP2, "--context-parallel-style", "ulysses"]),
        "pipeline": (2, PP2),
        "interleaved": (2, [*PP2, "--pipeline-schedule", "interleaved-1f1b"]),
    },
    "09": {
        "experts": (2, EP2),
        "experts and gather": (2, [*EP2, *CP2]),
        # Each of the two stages needs two ranks to split its experts.
        "experts and pipeline": (4, [*EP2, *PP2]),
    },
}


def merged(chapter, folder):
    """Add fine-tuning on conversations to a later chapter; return the path of the new script.

    Merge the changes that turn chapter 05 into fine-tuning/conversations, and apply PATCH.
    """
    script = shutil.copy(SCRIPTS[chapter], folder / f"on_{chapter}.py")
    merge = ["git", "merge-file", "--ours", script, SCRIPTS["05"], SCRIPTS["conversations"]]
    assert run_command(*merge).returncode == 0
    done = run_command("patch", "--fuzz=0", script, PATCH)
    assert done.returncode == 0 and "FAILED" not in done.stdout, done.stdout
    return script


@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", ["08", "09"])
def test_merged_into_a_later_chapter_the_curve_stays_the_same(layout_models, tmp_path, chapter):
    model = layout_models / ("llama" if chapter == "08" else "glm4_moe")
    script = merged(chapter, tmp_path)
    args = ["-m", model, "-d", prepare_conversations(tmp_path, 100, model, 128), "-s", 128]
    args += ["-b", 2, "--lr", 0.001]
    runs = {1: {"one": ("conversations", args)}}
    for name, (ranks, flags) in LAYOUTS[chapter].items():
        runs.setdefault(ranks, {})[name] = (script, [*args, *flags])
    curves = curves_of(tmp_path, runs)
    for name in LAYOUTS[chapter]:
        assert disagreement(curves["one"], curves[name]) == {}, name


@pytest.mark.parametrize("chapter", ["08", "09"])
def test_merged_script_has_all_names_of_conversations(load, tmp_path, chapter):
    own, found = load("conversations"), load(merged(chapter, tmp_path))
    assert {name for name in vars(own) if not name.startswith("_")} <= vars(found).keys()
