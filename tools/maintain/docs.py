"""Write the generated parts of the READMEs: diffs, samples of output, and tables.

Here:  make docs                                write all parts again
       python tools/maintain/docs.py --check    print the parts that are out of date

If a comment in a README calls a function, cog inserts the output of the function. A README can call
the functions below and the macros in tables.jinja.
"""

import ast
import importlib
import json
import os
import re
import sys
from collections import defaultdict
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from statistics import median

import jinja2
from cogapp import Cog

from chapters import ROOT, changes, chapters, diff, diff_by_part, flags, parent_of, parts
from readme import readmes

RESULTS = ROOT / "benchmarks/results"


def current_folder():
    """Return the folder of the file that cog processes: a README or a file of arguments."""
    return Path(sys.modules["cog"].inFile).resolve().parent


def current_scripts():
    """Return two paths: the script of the parent chapter, and the script of the current chapter.

    The current chapter is the chapter whose README cog processes.
    """
    chapter = next(name for name, path in chapters().items() if path.parent == current_folder())
    return chapters()[parent_of(chapter)], chapters()[chapter]


# ---- scripts and their output ----------------------------------------------------------------
def fenced(kind, lines):
    """Print lines as a fenced block of Markdown; `kind` is the language of the block."""
    print(f"```{kind}", *lines, "```", sep="\n")


def listing(path, *names, only=""):
    """Print functions of a script: the `def` lines, and all lines that the pattern `only` matches.

    An empty pattern matches all lines. Three dots stand for lines that do not match.
    """
    source, lines = (ROOT / path).read_text(), []
    for name in names:
        lines += ["", ""] if lines else []
        part = [source.splitlines()[number - 1] for number in parts(source)[name]]
        for is_shown, group in groupby(part, lambda line: bool(re.search(f"^def |{only}", line))):
            found = list(group)
            indents = [re.match(" *", line)[0] for line in found if line]
            lines += found if is_shown else [min(indents, default="") + "..."]
    fenced("python", lines)


def hunk(*names, only=""):
    """Print changed lines of the named parts of the current chapter's script, as a diff.

    Compare the script with the parent chapter's script, and print only the changed lines that the
    pattern `only` matches. A part is a function, a class or a constant.
    """
    lines, by_part = [], diff_by_part(*current_scripts())
    for name in names:
        part = [mark + line for mark, line, *_ in by_part[name]]
        changed = [
            number
            for number, line in enumerate(part)
            if line[0] != " " and re.search(only, line[1:])
        ]
        if not changed:
            raise ValueError(f"{name}: no changed line matches")
        lines.append(f"@@ {name} @@")
        for number, following in pairwise([*changed, None]):
            lines.append(part[number].rstrip())
            if following is not None and following > number + 1:
                lines.append(f"@@ {name}, further down @@")
    fenced("diff", lines)


def all_changes():
    """Print a folded list of the flags and parts that the current chapter adds, changes or drops.

    Compare the chapter's script with the script of the parent chapter.
    """
    print("<details><summary>Everything that changes</summary>", "", sep="\n")
    for kind, names in changes(*current_scripts()).items():
        print(f"- **{kind}**:", ", ".join(f"`{name}`" for name in names))
    print("", "</details>", sep="\n")


def patch(path):
    """Print the hunks of a patch file, without the lines that name the changed files."""
    lines = (ROOT / path).read_text().splitlines()
    fenced("diff", [line for line in lines if not line.startswith(("---", "+++"))])


def sample(name, head=None, tail=0, speed=True):
    """Print the recorded output of a command: all lines, or the first `head` and last `tail` lines.

    With speed=False, leave out the speeds, which would differ from the speeds in other samples.
    """
    text = (ROOT / "assets/samples" / f"{name}.txt").read_text()
    lines = (text if speed else re.sub(r"  tokens_per_second \S+", "", text)).splitlines()
    if head is not None:
        lines = [*lines[:head], *(["..."] if head else []), *lines[len(lines) - tail :]]
    fenced("text", lines)


def fault(name, log_lines=0):
    """Print lines of the log of a run with the fault `name`, and the verdict of whats_wrong.py.

    Print the first `log_lines` of the recorded lines, which report problems. Leave out the
    verdict's last line, because it refers to the section of faults.md that shows this verdict.
    """
    rows = load("faults-cpu-2cores.json")["rows"]
    rows = [row for row in rows if row["fault"] == name and row["right"]]
    # Choose a row whose "text" has the verdict in "said". The two values come from two runs of
    # whats_wrong.py, which may have found different faults.
    row = next(row for row in rows if row["said"].upper() in row["text"])
    verdict = row["text"].rstrip().rpartition("\n\n")[2].splitlines()[:-1]
    log = [line for line in row["log"] if "ChildFailedError" not in line][:log_lines]
    fenced("text", [*log, *([""] if log else []), *verdict])


def plan(config):
    """Print the planner's verdicts on a model, such as "llama-3.1-8b", as lines of comments."""
    text = (ROOT / "assets/samples/05-plans.txt").read_text()
    for name, gpus, verdict in re.findall("(.*) on (.*?): (.*)", text):
        if name.lower().endswith(config):
            print(f"# {gpus}:", f"#   {verdict}", sep="\n")


def tensor_plan():
    """Print transformers' plan for splitting the matrices of a Llama model across ranks."""
    from transformers import LlamaConfig

    plan = LlamaConfig.base_model_tp_plan
    lines = [f'    "{name}": "{style}",' for name, style in plan.items()]
    fenced("python", ["base_model_tp_plan = {", *lines, "}"])


def checks_of(file):
    """Summarize a file with results of gpu_check.py.

    Return the rows of a table, and a dictionary from each reason for skipping to the names of the
    skipped checks. A row stands for all checks whose names begin with the same word, or for one
    check of speed. For each number that these checks measured, the row has the lowest and the
    highest value.
    """
    rows_by_kind, skipped = defaultdict(list), defaultdict(list)
    for row in load(file)["rows"]:
        kind = re.match("speed.*|[^-]*", row["name"])[0]
        if row["passed"] is None:
            skipped[row["reason"]].append(f"`{row['name']}`")
        else:
            rows_by_kind[kind].append(row)
    return [summary_of(kind, rows) for kind, rows in rows_by_kind.items()], skipped


def summary_of(kind, rows):
    """Return a table row for all checks of one kind: a name, the number that passed, and values.

    The name and the reason of each failed check follow the number. For each value that the checks
    measured, the row has a range. `rows` has a row for each check.
    """
    failed = [f"**{row['name']}: {row['reason']}**" for row in rows if not row["passed"]]
    values_by_name = defaultdict(list)
    for name, value in (pair for row in rows for pair in row["numbers"].items()):
        values_by_name[name].append(value)
    return {
        "name": f"{kind}-*" if len(rows) > 1 else rows[0]["name"],
        "passed": "; ".join([str(len(rows) - len(failed)), *failed]),
        "numbers": {name: ends(values) for name, values in values_by_name.items()},
    }


def ends(values):
    """Format the lowest and the highest value as a range.

    If they are equal after rounding, format only one number.
    """
    # Format each number twice, because the format .3g alone would print large numbers as 1e+06.
    rounded = [float(f"{value:.3g}") for value in (min(values), max(values))]
    return " – ".join(dict.fromkeys(f"{value:,g}" for value in rounded))


# ---- functions for the tables in tables.jinja ------------------------------------------------
@cache
def load(file):
    """Return the parsed content of a JSON file under benchmarks/results."""
    return json.loads((RESULTS / file).read_text())


def script(path):
    """Import the script at `path`, which is relative to the repository, and return its module."""
    sys.path.append(str(ROOT / "benchmarks"))
    return importlib.import_module("harness").load(str(ROOT / path))


def chapter_rows(*names):
    """Yield a table row for each named chapter; without names, yield a row for every chapter.

    The row has the chapter's folder and page, the first sentence of the script, and the number of
    lines. It also has the numbers of lines that are added and removed, compared with the parent's
    script.
    """
    for name, path in chapters().items():
        if names and name not in names:
            continue
        source, size = path.read_text(), "none before it"
        if parent := parent_of(name):
            marks = [mark for mark, *_ in diff(chapters()[parent], path)]
            size = f"+{marks.count('+')} −{marks.count('-')} against {parent}"
        yield {
            "folder": path.parent.relative_to(ROOT),
            "page": os.path.relpath(path.with_name("README.md"), current_folder()),
            "sentence": ast.get_docstring(ast.parse(source)).partition(".")[0],
            "lines": source.count("\n"),
            "size": size,
        }


def flag_rows(chapter, *names):
    """Yield a dictionary for each named flag of a chapter's script.

    The dictionary has the flag's name under the key "name". Each other key is a keyword of the
    flag's declaration, such as "default", with the syntax tree of its value.
    """
    declared = flags(chapters()[chapter].read_text())
    for name in names:
        options = ast.parse(declared[f"--{name}"]).body[0].value.keywords
        yield {option.arg: option.value for option in options} | {"name": name}


def flag_table():
    """Yield a table row for each flag: the first script that has it, its default and its help."""
    known = set()
    for name, path in chapters().items():
        source = path.read_text()
        # Collect the variables of the script, because the help of some flags is in a variable.
        texts = {
            ast.unparse(node.targets[0]): node.value.value
            for node in ast.walk(ast.parse(source))
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        }
        for flag in [flag for flag in flags(source) if flag not in known]:
            known.add(flag)
            [row] = flag_rows(name, flag.removeprefix("--"))
            default = row.get("default", ast.Constant("off" if "action" in row else "none"))
            # Only --experiment-name has a variable as its default. Describe this variable in words:
            # it is the name of the script's folder.
            value = "its folder's name" if isinstance(default, ast.Name) else ast.unparse(default)
            value = {"True": "on", "[]": "none"}.get(value, value.strip("'\""))
            help_text = texts.get(ast.unparse(row["help"])) or getattr(row["help"], "value", None)
            # If the help is an f-string, show only the words before its first value.
            help_text = help_text or f"{row['help'].values[0].value}..."
            page = os.path.relpath(path.with_name("README.md"), current_folder())
            yield {"flag": flag, "script": name, "page": page, "default": value, "help": help_text}


def reason_of(row):
    """Return the error message of a refused model, with placeholders for details of this model."""
    reason = row["refused"].replace(row["family"], "NAME")
    reason = re.sub(r"how to split \S+", "how to split MODULE", reason)
    reason = re.sub(r"because it has \w+", "because it has FEATURE", reason)
    # Keep only the first sentence, because the message of an exception may have several sentences.
    return reason.partition(". ")[0]


def family_table():
    """Return the columns, the rows and the error messages of a table of model families.

    Families with equal results share a row. A result is "yes", the number of an error message, or
    an empty text if the family was not tested in the column's chapter.
    """
    results, messages = defaultdict(dict), []
    rows = load("families.json")["rows"]
    columns = sorted({row["chapter"] for row in rows})
    for row in sorted(rows, key=lambda row: row["chapter"]):
        message = reason_of(row) if "refused" in row else None
        if message and message not in messages:
            messages.append(message)
        result = messages.index(message) + 1 if message else {"equal": "yes"}[row["verdict"]]
        results[row["family"]][row["chapter"]] = result
    families = defaultdict(list)
    for family, by_chapter in sorted(results.items()):
        name, *settings = family.split("+")
        # Leave a cell empty if the family was not tested in the chapter that the column stands for.
        pattern = tuple(by_chapter.get(column, "") for column in columns)
        families[pattern].append(" ".join([name, *(f"`{setting}`" for setting in settings)]))
    rows = sorted(families.items(), key=lambda row: (-row[0].count("yes"), -len(row[1])))
    return {"columns": columns, "rows": rows, "messages": messages}


def at(scene, strategy, devices):
    """Return the prediction in scale.json for a scene, a strategy and a number of devices."""
    point = {"scene": scene, "strategy": strategy, "devices": devices}
    rows = load("scale.json")["scenes"]
    return next(row["predicted"] for row in rows if point.items() <= row.items())


def gain(point, other_point):
    """Divide the predicted speed at `point` by the predicted speed at `other_point`.

    A point is a scene, a strategy and a number of devices.
    """
    return at(*point)["tokens_per_second"] / at(*other_point)["tokens_per_second"]


def fastest(row, ways):
    """Return the fastest of the `ways` to split a model, or "does not fit" if no way fits.

    `row` has a prediction for each way that fits in memory.
    """
    fitting = [way for way in ways if way in row]
    speed_of = {way: row[way]["tokens_per_second"] for way in fitting}
    return max(fitting, key=speed_of.get, default="does not fit")


def job(seq_length):
    """Return a dictionary that describes the 70B job of docs/train-a-70b-on-64-gpus.md.

    The dictionary has the plans of the job for samples of `seq_length` tokens, and the numbers of
    the fastest plan. "total" is the number of tokens per second of all GPUs together. "step" is the
    time of a step in seconds.
    """
    row = next(row for row in load("scale.json")["job"] if row["seq_length"] == seq_length)
    best = row["predicted"][0]
    _, script_words, layout_words = best["command"].split(" \\\n    ")
    script, _ = script_words.split(" ", 1)
    if "--recompute" not in layout_words:
        layout_words += " --recompute none"
    steps = re.search(r"--num-steps (\d+)", script_words)[1]
    found = {"best": best, "script": script, "words": layout_words, "steps": int(steps)}
    found["total"] = 64 * best["speed"]["tokens_per_second"]
    return row | found | best["speed"] | {"stop_seconds": best["stop_seconds"]}


def days(tokens, tokens_per_second, gpus=64):
    """Return the days until `gpus` GPUs have trained on `tokens` tokens.

    Each GPU trains on `tokens_per_second` tokens per second.
    """
    return tokens / tokens_per_second / gpus / 86400


def misses(rows):
    """Return the absolute error of each predicted speed, as a share of the published speed."""
    return [abs(row["predicted"]["tokens_per_second"] / row["published"] - 1) for row in rows]


def mixture(name):
    """Return a dictionary for each plan in the sample `name` of docs/pretrain-a-mixture.md.

    "total" is the number of tokens per second of all GPUs together. "step" is the time of a step in
    seconds.
    """
    text = (ROOT / "assets/samples" / f"{name}.txt").read_text()
    pattern = r"layout:(.*)\n +all tensors +(\S+) GiB\nspeed: (\S+) tokens/s.*@(\d+)"
    plans = []
    for words, tensors, speed, stop_seconds in re.findall(pattern, text):
        tokens_per_second = float(speed.replace(",", ""))
        plan = {"words": words.strip(), "gib": float(tensors) * 1.05 + 3, "stop": stop_seconds}
        plan |= {"tokens_per_second": tokens_per_second, "total": 32 * tokens_per_second}
        plans.append(plan | {"step": 512 * 4096 / plan["total"]})
    return plans


def spread(values, digits=2):
    """Format the lowest and the highest value as a range, with `digits` decimal places."""
    return f"{min(values):.{digits}f} – {max(values):.{digits}f}"


def with_range(values, digits=2):
    """Format the median of values, and their range if it is wider than a fifth of the median.

    Without values, return "1", which is the ratio of a result to itself.
    """
    if not values:
        return "1"
    middle, wide = median(values), max(values) - min(values) > median(values) / 5
    return f"{middle:.{digits}f}" + (f" ({spread(values, digits)})" if wide else "")


def files(pattern):
    """Return the names of the files under benchmarks/results that match a pattern."""
    return sorted(path.name for path in RESULTS.glob(pattern))


def macros():
    """Return a dictionary with a function for each macro in tables.jinja, by the macro's name.

    The function passes its arguments to the macro, and prints the result.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.ChainableUndefined,
    )
    # Let the macros call every function in this file, as a function or as a filter.
    environment.globals |= globals()
    environment.filters = globals() | environment.filters
    environment.tests["search"] = lambda text, word: word in text
    environment.filters |= {
        "f": format,
        "mb": lambda value, digits=".0f": format(value / 1e6, digits),
        "before": lambda text, mark: text.partition(mark)[0],
        "ratios": lambda rows, name, other: [row[name] / row[other] for row in rows],
    }
    module = environment.get_template("tables.jinja").module
    return {
        name: lambda *args, macro=macro: print(macro(*args).strip())
        for name, macro in vars(module).items()
        if not name.startswith("_")
    }


globals().update(macros())


# ---- the command -----------------------------------------------------------------------------
def main():
    """Write all generated parts with cog.

    With --check, write nothing; print the parts that are out of date, and exit with 5 if there are
    any.
    """
    files = [*readmes(), *sorted(ROOT.glob("*/configs/*.args"))]
    options = ["--check", "--diff"] if sys.argv[1:] == ["--check"] else ["-r"]
    command = ["cog", *options, "-P", "-p", "from docs import *", *map(str, files)]
    sys.exit(Cog().main(command))


if __name__ == "__main__":
    main()
