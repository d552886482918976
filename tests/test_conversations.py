"""Test that fine-tuning on conversations learns only the answers, on any layout."""

import json
import shutil
from argparse import Namespace
from itertools import groupby
from operator import itemgetter

import numpy as np
import pytest
import torch
from tokenizers import normalizers
from torch.nn.attention import flex_attention as flex
from transformers import AutoTokenizer, ByT5Tokenizer
from transformers.integrations.flex_attention import WrappedFlexAttention
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import preparing
import recorded
from chats import (
    TEMPLATES,
    conversations,
    copy_model,
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
)
from conftest import ROOT, SCRIPTS, curves_of, disagreement, run_command, user_error
from families import ARGS, OWN_SETTINGS, fast_byte_tokenizer, shrink
from marks import slow
from preparing import MODULE


@pytest.fixture
def chapter(load, one_rank_group):
    return load("conversations")


# ---- the gradient ----------------------------------------------------------------------------
def tokens_of(tokenizer, document):
    """Tokenize an expected document; return a tuple of pairs (token, whether it is learned)."""
    tokens = []
    for text, is_learned in document:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens += [(token, is_learned) for token in ids]
    # Mark the first token as not learned, because no earlier token can predict it.
    return ((tokens[0][0], False), *tokens[1:])


WINDOW = {"mistral": ["--config", "sliding_window=24"]}
CASES = [("llama", "llama2", 1, "sdpa"), ("mistral", "qwen3", 8, "sdpa")]
CASES += [slow("gpt2", "llama3", 2, "sdpa"), slow("qwen3", "built-in", 8, "sdpa")]
CASES += [("mistral", "llama2", 2, "flex_attention")]
CASES += [slow("gemma3-window", "llama3", 1, "flex_attention")]


@pytest.fixture
def flex_on_cpu(monkeypatch):
    """Run flex attention as plain operations, because torch refuses its backward pass on a CPU."""
    monkeypatch.setattr(flex, "_validate_device", lambda *_: None)
    monkeypatch.setattr(WrappedFlexAttention, "__call__", lambda _: flex.flex_attention)


@pytest.mark.parametrize("family, template, batch_size, attention", CASES)
def test_packed_gradient_equals_one_conversation_at_a_time(
    chapter, layout_models, tmp_path, flex_on_cpu, family, template, batch_size, attention
):
    folder = copy_model(layout_models / family, tmp_path / family, template)
    words = ["-m", folder, "-d", prepare_conversations(tmp_path, model=folder)]
    words += ["-b", batch_size, *WINDOW.get(family, []), "--attention", attention]
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
    # Compare step 1 with an unsharded model that reads one document at a time.
    plain = plain_model(model)
    loss = loss_of_documents(plain, documents_of_step(chapter, args, train_set))
    loss.backward()
    gradients = {name: weight.grad for name, weight in plain.named_parameters()}
    apart = distances(chapter, args, model, train_set, loss.item(), gradients)
    assert apart[0] < 1e-6 and apart[1] < 1e-5


@pytest.mark.parametrize("kind", ["bloom", "qwen3_next", "xmod"])
def test_family_that_cannot_separate_conversations_is_refused(chapter, capsys, kind):
    args, device = Namespace(**ARGS | {"model_name": kind, "seq_length": 32}), torch.device("cpu")
    config = shrink(CONFIG_MAPPING[kind](), **OWN_SETTINGS.get(kind, {}))
    model = chapter.shard(args, chapter.build_model(args, config), device)
    problem = user_error(capsys, chapter.check_packing, args, model, device)
    assert f"--seq-length 32: packing changes what {kind} computes for a conversation" in problem


@pytest.mark.slow
def test_prepared_text_is_learned_as_in_chapter_05(small_tokens, tmp_path):
    args = ["-d", small_tokens(), "--num-steps", 2, "--lr", 0.01]
    curves = curves_of(tmp_path, {1: {name: (name, args) for name in ("05", "conversations")}})
    assert disagreement(curves["05"], curves["conversations"]) == {}


# ---- files -----------------------------------------------------------------------------------
def say(role, content, **more):
    return {"role": role, "content": content, **more}


ASK, ANSWER = say("user", "Why?"), say("assistant", "Because.")


def documents_in(tokens):
    """Return the documents in a folder of samples of 512 tokens, as split_documents() does."""
    ids = np.fromfile(tokens / "000000.tokens", np.int32).reshape(-1, 512)
    return split_documents(MODULE, torch.from_numpy(ids))


def texts_of(tokenizer, tokens):
    """Return the text of each document in a folder of tokens, with answers in »«."""
    texts = []
    for document in documents_in(tokens):
        text = ""
        for is_learned, group in groupby(document, itemgetter(1)):
            part = tokenizer.decode([token for token, _ in group])
            text += f"»{part}«" if is_learned else part
        texts.append(text)
    return texts


CALL = {"type": "function", "function": {"name": "find", "arguments": {"word": "a"}}}
CALLS = [ASK, {"role": "assistant", "tool_calls": [CALL]}, say("tool", "b"), ANSWER]
MISTAKES = {
    "role": ([ASK, say("bot", "Hm.")], "unknown role bot; use one of system, developer, user"),
    "empty": ([], "it has no messages"),
    "no answer": ([say("system", "Be short."), ASK], "its last turn is by the user; end it with"),
    "no question": ([ANSWER], "its first turn is by the assistant; begin it with a turn by"),
    "picture": ([say("user", [{"type": "image"}]), ANSWER], "a turn's content is [{"),
    "no content": ([ASK, {"role": "assistant"}], "a turn by the assistant has no content"),
    "tool calls": (CALLS, "the model's chat template leaves out 'find' of an answer"),
    "thoughts": ([ASK, ANSWER | {"thinking": "Hm."}], "the model's chat template leaves out 'Hm.'"),
    "weight": ([ASK, ANSWER | {"weight": 0.5}], "a turn has weight 0.5; use 0 or 1"),
    "nothing": ([ASK, ANSWER | {"train": False}], "it has no answer to learn"),
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


def save_model(folder, template, tokenizer=None):
    """Save a tokenizer with a chat template; return the folder."""
    (tokenizer or fast_byte_tokenizer()).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(template)
    return folder


def test_template_that_changes_the_prompt_is_refused(tmp_path):
    template = "{{ '<' if add_generation_prompt else messages[-1].content }}"
    model = save_model(tmp_path / "model", template)
    path = write_rows(tmp_path / "a.jsonl", [{"messages": [ASK, ANSWER]}])
    words = path, "--conversations", "-m", model
    output = preparing.prepare(tmp_path / "a.tokens", *words, status=2)
    assert "line 1: with the model's chat template, the answer's text 'Because.' does not" in output


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


# This template resembles Qwen3's: it shows the tools, the calls of tools, and the results.
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


def test_calls_of_tools_are_learned_without_the_null_keys_of_tables(tmp_path):
    """Prepare one conversation in the formats of several data sets."""
    ends = [say("tool", "b"), ANSWER]
    calls = [say("assistant", "", tool_calls=[call]) for call in (CALL, NULLS, AS_TEXT)]
    rows = [{"messages": [ASK, call, *ends], "tools": [TOOL]} for call in calls]
    rows.append({"conversations": FROM_FUNCTION, "tools": json.dumps([TOOL])})
    model = save_model(tmp_path / "model", TOOLS)
    tokens = prepare_rows(tmp_path, rows, "--conversations", "-s", 512, "-m", model)
    call = '{"name": "find", "arguments": {"word": "a"}}'
    expected = f"{json.dumps(TOOL)}\n<user>Why?<end>\n<assistant>»<call>{call}<end>«\n"
    expected += "<tool>b<end>\n<assistant>»Because.<end>«"
    assert texts_of(AutoTokenizer.from_pretrained(model), tokens) == [expected] * len(rows)


def test_answer_does_not_begin_with_the_space_that_a_tokenizer_adds(tmp_path):
    tokenizer = fast_byte_tokenizer()
    # Put a space before each text, as Llama 2 does.
    tokenizer.backend_tokenizer.normalizer = normalizers.Prepend(" ")
    model = save_model(tmp_path / "model", TEMPLATES["qwen3"], tokenizer)
    rows = [{"messages": TURNS}]
    tokens = prepare_rows(tmp_path, rows, "--conversations", "-s", 512, "-m", model)
    (text,) = texts_of(tokenizer, tokens)
    assert "assistant\n»Because.<|im_end|>«" in text
    tokenizer.chat_template = TEMPLATES["qwen3"]
    expected = tokenizer.apply_chat_template(TURNS, tokenize=False).rstrip()
    expected = tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert [token for token, _ in documents_in(tokens)[0]] == expected


# ---- the same on chapters 08 and 09 ------------------------------------------------------------
PATCH = ROOT / "fine-tuning/conversations/parallelism.patch"
PARALLEL = {
    "tensor": ["--tensor-parallel-size", 2],
    "gather": ["--context-parallel-size", 2],
    "ulysses": ["--context-parallel-size", 2, "--context-parallel-style", "ulysses"],
    "pipeline": ["--pipeline-parallel-size", 2],
    "interleaved": ["--pipeline-parallel-size", 2, "--pipeline-schedule", "interleaved-1f1b"],
}
EXPERTS = {
    "experts": ["--expert-parallel-size", 2],
    "experts and gather": ["--expert-parallel-size", 2, *PARALLEL["gather"]],
}


def merged(chapter, folder):
    """Merge the changes from chapter 05 to conversations into a later chapter; return its path."""
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
    flags = PARALLEL if chapter == "08" else EXPERTS
    jobs = {name: (script, [*args, *flags[name]]) for name in flags}
    curves = curves_of(tmp_path, {1: {"one": ("conversations", args)}, 2: jobs})
    apart = {name: disagreement(curves["one"], curves[name]) for name in jobs}
    assert apart == {name: {} for name in jobs}


@pytest.mark.parametrize("chapter", ["08", "09"])
def test_merged_script_has_all_names_of_conversations(load, tmp_path, chapter):
    own, found = load("conversations"), recorded.load(merged(chapter, tmp_path))
    assert {name for name in vars(own) if not name.startswith("_")} <= vars(found).keys()
