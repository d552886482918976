"""Compare the flags in blocks of bash with the flags that the scripts declare."""

import ast
import functools
import re

from conftest import ROOT

# Scripts declare their flags with these functions.
ADDERS = {"add", "add_argument"}


@functools.cache
def declared_flags(script):
    """Return the set of flags that a script accepts; read the flags in the script's source."""
    flags = {"-h", "--help"}
    # The planner's scripts accept all flags of the newest chapter, too.
    if script.startswith("tools/planner/"):
        flags |= declared_flags(max(map(str, ROOT.glob("[0-9][0-9]-*/train_llm.py"))))
    if script == "tools/evaluate.py":
        flags |= declared_flags("01-single-gpu/train_llm.py")
    # Add the flag that all benchmarks share, which harness.py declares.
    if script.startswith("benchmarks/") and script != "benchmarks/harness.py":
        flags |= declared_flags("benchmarks/harness.py")
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ADDERS:
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            actions = [option.value for option in node.keywords if option.arg == "action"]
            # An action that is not a string is BooleanOptionalAction, which adds --no-FLAG.
            if actions and not isinstance(actions[0], ast.Constant):
                names += [name.replace("--", "--no-", 1) for name in names]
            flags |= set(names)
    return flags


def unknown_flags(text):
    """Return a pair (script, flag) for each flag of a bash block that its script does not declare.

    Some flags have no script before them: flags after a variable such as `$train`, and flags in a
    file of arguments, where lines begin with a flag. Every chapter in the block must declare these
    flags.
    """
    text = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "), flags=re.M)
    chapters = set(re.findall(r"\d\d-[\w-]+/train_llm\.py", text))
    unknown = []
    for command in re.split(r"[\n;&|]", text):
        scripts = chapters if command.startswith("-") else set()
        for quoted in re.findall(r"[^\s()=]+", command):
            word = quoted.strip("\"'")
            if word.endswith(".py") and (ROOT / word).exists():
                scripts = {word}
            # A variable without quotes, such as $train, is a command; in quotes, it would be an
            # argument.
            elif re.fullmatch(r"\$[a-z_]+", quoted):
                scripts = scripts or chapters
            elif re.match("--?[a-zA-Z]", word):
                missing = [script for script in scripts if word not in declared_flags(script)]
                unknown += [(script, word) for script in missing]
    return unknown
