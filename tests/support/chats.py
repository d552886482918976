"""Chat templates of the shapes that published models have, and what each of them must produce.

The expected texts are written without the templates, so that they can check the templates' use.
"""

# As in Qwen2.5 and SmolLM.
CHATML = """
{%- for message in messages -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
# As in Llama 3: the template prints a date, and the answer ends without a new line.
LLAMA3 = """<s>system, {{ strftime_now("%Y-%m-%d") }}, {{ date_string }}
{%- for message in messages %}<h>{{ message.role }}</h>

{{ message.content | trim }}<e>
{%- endfor %}
{%- if add_generation_prompt %}<h>assistant</h>

{% endif %}"""
# As in Qwen3: an answer keeps its thoughts only while no later turn of the user follows.
QWEN3 = """
{%- set last = namespace(user=0) -%}
{%- for message in messages if message.role == "user" -%}
{%- set last.user = messages.index(message) -%}
{%- endfor -%}
{%- for message in messages -%}
{%- set said = message.content -%}
{%- if message.role == "assistant" and loop.index0 < last.user -%}
{%- set said = said.split("</think>")[-1].lstrip("\\n") -%}
{%- endif -%}
<|im_start|>{{ message.role }}
{{ said }}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""
TEMPLATES = {"built-in": None, "chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}


def expected_documents(name, messages):
    """Return the documents of a conversation, each as a list of (text, whether it is learned)."""
    if name == "qwen3":
        # Each answer with thoughts is the end of a document, in which earlier thoughts are gone.
        ends = [number for number, turn in enumerate(messages) if turn["role"] == "assistant"]
        thinking = any("</think>" in messages[end]["content"] for end in ends[:-1])
        if thinking:
            return [last_answer(messages[: end + 1]) for end in ends]
    return [trim([piece for turn in messages for piece in turn_text(name, turn)], name)]


def last_answer(messages):
    """Return a document that learns only its last answer; earlier answers have no thoughts."""
    document = []
    for turn in messages[:-1]:
        said = turn["content"].split("</think>")[-1].lstrip("\n")
        document += [(f"<|im_start|>{turn['role']}\n{said}<|im_end|>\n", False)]
    *start, _ = turn_text("qwen3", messages[-1])
    return [*document, *start]


def turn_text(name, turn):
    """Return the text of a turn as a list of (text, whether it is learned)."""
    role, said = turn["role"], turn["content"]
    is_answer = role == "assistant"
    if name == "built-in":
        return [(f"{role}:\n", False), (said + "</s>" * is_answer, is_answer), ("\n", False)]
    if name == "llama3":
        return [(f"<h>{role}</h>\n\n", False), (f"{said.strip()}<e>", is_answer)]
    return [(f"<|im_start|>{role}\n", False), (f"{said}<|im_end|>", is_answer), ("\n", False)]


def trim(document, name):
    """Return a document with what a template adds before it, and without white space at its end."""
    start = [("<s>system, 26 Jul 2024, 26 Jul 2024", False)] if name == "llama3" else []
    end = document[:-1] if document[-1] == ("\n", False) else document
    return start + end


def conversations(number=24):
    """Return conversations of one or two rounds, some with a system turn, some with thoughts."""
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
