"""Define conversations, chat templates like those of published models, and the expected documents.

This module writes the expected documents without the templates, so that a wrong use of a template
makes a test fail.
"""

import copy
import json
import shutil
from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, ByT5Tokenizer

import preparing
from conftest import prepare_training

FLAGS = "--device cpu --precision fp32 -s 256 -b 2 --global-batch-size 8 --eval-samples 1".split()

# This template resembles Llama 3's: it prints a date, and no line break follows an answer.
LLAMA3 = """<s>system, {{ strftime_now("%Y-%m-%d") }}, {{ date_string }}
{%- for message in messages %}<h>{{ message.role }}</h>

{{ message.content | trim }}<e>
{%- endfor %}
{%- if add_generation_prompt %}<h>assistant</h>

{% endif %}"""
# This template resembles Qwen3's: only answers after the user's last turn keep thoughts.
QWEN3 = """
{%- set last = namespace(user=0) -%}
{%- for message in messages if message.role == "user" -%}
{%- set last.user = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set content = message.content -%}
{%- if message.role == "assistant" and loop.index0 < last.user -%}
{%- set content = content.split("</think>")[-1].lstrip("\\n") -%}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
# This template resembles Llama 2's: it puts a space before each answer, and has no generation
# prompt.
LLAMA2 = """{% for message in messages -%}
{% if message.role == "assistant" %} {{ message.content | trim }} </s>
{%- elif message.role == "user" %}<s>[INST] {{ message.content | trim }} [/INST]
{%- else %}<<SYS>>{{ message.content | trim }}<</SYS>>{% endif %}
{%- endfor %}"""
# This template resembles Phi-3's: an end-of-text token follows the last answer.
PHI3 = """{% for message in messages -%}
<|{{ message.role }}|>
{{ message.content }}<|end|>
{% endfor %}{{ "<|assistant|>\n" if add_generation_prompt else "<|endoftext|>" }}"""
# This template resembles ChatML: it adds a system turn to a conversation without a system turn.
CHATML = """{% if messages[0].role != "system" %}<|im_start|>system
Help.<|im_end|>
{% endif %}{% for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}{{ "<|im_start|>assistant\n" if add_generation_prompt }}"""
TEMPLATES = {"built-in": None, "llama2": LLAMA2, "llama3": LLAMA3, "qwen3": QWEN3, "phi3": PHI3}
TEMPLATES |= {"chatml": CHATML}


def copy_with_template(model, folder, name):
    """Copy a model's folder into `folder`, with the template `name`; return the copy's path."""
    copied = shutil.copytree(model, folder / model.name)
    if TEMPLATES[name]:
        (copied / "chat_template.jinja").write_text(TEMPLATES[name])
    return copied


def expected_documents(name, messages):
    """Return the documents that a conversation must become with the template `name`.

    Each document is a list of pairs (text, whether the text is learned).
    """
    ends = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
    # If a turn follows an answer, the template phi3 changes the end of the answer, and qwen3
    # removes the thoughts of the answer. So each answer must be the end of its own document.
    if name == "phi3":
        return [phi3_document(messages[: end + 1]) for end in ends]
    if name == "qwen3" and any("</think>" in messages[end]["content"] for end in ends[:-1]):
        return [last_answer(messages[: end + 1]) for end in ends]
    return [trim([piece for turn in messages for piece in turn_text(name, turn)], name)]


def phi3_document(messages):
    """Return a conversation as a document of the template phi3, with <|endoftext|> at the end.

    The document is a list of pairs (text, whether the text is learned); only the last answer is
    learned.
    """
    texts = [f"<|{turn['role']}|>\n{turn['content']}<|end|>\n" for turn in messages[:-1]]
    answer = f"{messages[-1]['content']}<|end|>\n<|endoftext|>"
    return [("".join(texts) + "<|assistant|>\n", False), (answer, True)]


def last_answer(messages):
    """Return a conversation as a document of the template qwen3.

    The document is a list of pairs (text, whether the text is learned). Only the last answer is
    learned, and only the last answer keeps its thoughts.
    """
    document = []
    for turn in messages[:-1]:
        content = turn["content"].split("</think>")[-1].lstrip("\n")
        document += [(f"<|im_start|>{turn['role']}\n{content}<|im_end|>\n", False)]
    *start, _ = turn_text("qwen3", messages[-1])
    return [*document, *start]


def turn_text(name, turn):
    """Return the texts that the template `name` writes for a turn.

    The result is a list of pairs (text, whether the text is learned).
    """
    role, content = turn["role"], turn["content"]
    is_answer = role == "assistant"
    if name == "built-in":
        # ByT5, the tokenizer of the tests, drops the line break after </s>.
        end = [] if is_answer else [("\n", False)]
        return [(f"{role}:\n", False), (content + "</s>" * is_answer, is_answer), *end]
    if name == "llama3":
        return [(f"<h>{role}</h>\n\n", False), (f"{content.strip()}<e>", is_answer)]
    if name == "llama2":
        texts = {"user": f"<s>[INST] {content} [/INST]", "assistant": f" {content} </s>"}
        return [(texts.get(role, f"<<SYS>>{content}<</SYS>>"), is_answer)]
    return [(f"<|im_start|>{role}\n", False), (f"{content}<|im_end|>", is_answer), ("\n", False)]


def trim(document, name):
    """Add the start of a document, remove its final line break, and return the new document.

    The start is the text that the template `name` puts before the first turn.
    """
    start = [("<s>system, 2024-07-26, 26 Jul 2024", False)] if name == "llama3" else []
    if name == "chatml" and not document[0][0].endswith("system\n"):
        start = [("<|im_start|>system\nHelp.<|im_end|>\n", False)]
    end = document[:-1] if document[-1] == ("\n", False) else document
    return start + end


def conversations(number=24):
    """Return `number` conversations of one or two rounds, some with a system turn or thoughts."""
    found = []
    for index in range(number):
        turns = [{"role": "system", "content": f"Rule {index}."}] * (index % 3 == 0)
        for turn in range(1 + index % 2):
            turns.append(
                {"role": "user", "content": f"{index} plus {turn} times {'x' * (index % 7)}?"}
            )
            thoughts = f"<think>\n{index}\n</think>\n\n" if index % 4 == 1 else ""
            turns.append({"role": "assistant", "content": f"{thoughts}{index + turn}."})
        found.append(turns)
    return found


def write_rows(path, rows):
    """Write rows to a file as lines of JSON; return the file's path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def prepare_rows(folder, rows, *flags):
    """Let prepare.py tokenize conversations or pairs of answers; return the folder of tokens.

    If `folder` already has the tokens of these rows, prepare.py does not tokenize the rows again.
    """
    folder.mkdir(exist_ok=True)
    tokens = folder / "rows.tokens"
    preparing.prepare(tokens, write_rows(folder / "rows.jsonl", rows), *flags)
    return tokens


def prepare_conversations(folder, number=24, model="tiny", seq_length=256):
    """Tokenize `number` conversations; return the folder of tokens."""
    folder = folder / f"{number}-{seq_length}-{Path(model).name}"
    rows = [{"messages": turns} for turns in conversations(number)]
    return prepare_rows(folder, rows, "--conversations", "-m", model, "-s", seq_length)


def prepare_pairs(folder, number=24, model="tiny", seq_length=256):
    """Tokenize `number` pairs of answers; return the folder of tokens."""
    folder = folder / f"pairs-{number}-{seq_length}-{Path(model).name}"
    return prepare_rows(folder, pairs(number), "--preferences", "-m", model, "-s", seq_length)


def pairs(number=24):
    """Return `number` rows, each with a chosen and a rejected answer to a prompt.

    The rows use three formats of data sets in turn. Some chosen answers are longer than the
    rejected answers, and some are shorter.
    """
    rows = []
    for index, turns in enumerate(conversations(number)):
        *prompt, chosen = turns
        rejected = chosen | {"content": f"{'No' * (index % 5)}, {index}."}
        if index % 3 == 0:
            rows.append({"prompt": prompt, "chosen": [chosen], "rejected": [rejected]})
        elif index % 3 == 1:
            rows.append({"chosen": [*prompt, chosen], "rejected": [*prompt, rejected]})
        else:
            row = {"prompt": prompt[-1]["content"], "chosen": chosen["content"]}
            rows.append(row | {"rejected": rejected["content"]})
    return rows


def write_tokens(folder, samples):
    """Write samples for the tiny model to a folder, as prepare.py does; return the folder."""
    folder.mkdir()
    tokenizer = preparing.MODULE.fingerprint_of(ByT5Tokenizer())
    index = {"tokenizer": tokenizer, "parts": 1, "dtype": str(samples.dtype).partition(".")[2]}
    (folder / "index.json").write_text(json.dumps(index))
    (folder / "part-0.json").write_text(json.dumps({"ended": True, "pieces": 1}))
    samples.numpy().tofile(folder / "000000.tokens")
    return folder


# ---- training steps in the process of a test -------------------------------------------------
def prepare(chapter, *words):
    """Build and shard the model that a command line asks for, and read the samples.

    Return the arguments, the sharded model, the training samples and the held-out samples.
    """
    args, model, _, train_set, held_out = prepare_training(chapter, *FLAGS, *words)
    return args, chapter.shard(args, model, torch.device("cpu")), train_set, held_out


def split_documents(chapter, samples):
    """Split samples into documents; leave out documents without learned tokens, such as padding.

    Each document is a tuple of pairs (token, whether the token is learned).
    """
    documents = []
    for sample in samples.tolist():
        for token in sample:
            if token & chapter.FIRST:
                documents.append([])
            is_learned = not token & chapter.CONTEXT
            documents[-1].append((token & (chapter.CONTEXT - 1), is_learned))
    return [tuple(document) for document in documents if any(learned for _, learned in document)]


def documents_of_step(chapter, args, train_set, step=1):
    """Return the documents in the training samples of a step."""
    first = chapter.position_of(args, step)
    samples = [train_set[first + number] for number in range(args.global_batch_size)]
    return split_documents(chapter, torch.stack(samples))


def plain_model(model, dtype=torch.float64):
    """Return an unsharded copy of a sharded model, with numbers of `dtype` and without adapters."""
    # Copy the configuration, because set_attn_implementation() changes it in place.
    plain = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=dtype)
    # Gather the sharded weights, and copy the buffers, which are not sharded.
    values = {
        name: value.full_tensor() if isinstance(value, DTensor) else value
        for name, value in model.state_dict().items()
    }
    plain.load_state_dict({name: values[name] for name in plain.state_dict()})
    plain.set_attn_implementation("eager")
    # Choose the eager implementation of experts, because the default does not support fp64.
    plain.set_experts_implementation("eager")
    return plain.train()


def loss_of_documents(model, documents):
    """Run a model on one document at a time; return the mean loss of all learned tokens."""
    total, count = 0.0, 0
    for document in documents:
        ids = torch.tensor([[token for token, _ in document]])
        targets = torch.tensor([token if learned else -100 for token, learned in document[1:]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        total += cross_entropy(logits, targets, reduction="sum")
        count += int((targets != -100).sum())
    return total / count


def distances(chapter, args, model, train_set, loss, gradients):
    """Compute the loss and the gradients of step 1; compare them with `loss` and `gradients`.

    Return the difference of the losses, and the largest relative difference of a gradient.
    """
    model.num_targets = chapter.answers_at(args, train_set, 1)
    found = chapter.forward_backward(args, model, train_set, 1, torch.device("cpu"))
    return abs(found.item() - loss), largest_distance(model, gradients)


def largest_distance(model, gradients):
    """Compare each weight's gradient with `gradients`; return the largest relative difference.

    Leave out frozen weights, and weights whose gradient in `gradients` is almost 0.
    """
    apart = []
    for name, weight in model.named_parameters():
        if weight.requires_grad and gradients[name].norm() > 1e-12:
            gradient = weight.grad.full_tensor().double() - gradients[name]
            apart.append((gradient.norm() / gradients[name].norm()).item())
    return max(apart)
