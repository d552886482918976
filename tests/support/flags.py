"""The flags that scripts have, and those that blocks of bash give them."""

import ast
import functools
import re

from conftest import ROOT

ADDERS = {"add", "add_argument"}  # how scripts declare their flags


@functools.cache
def declared(script):
    """Return the flags that a script has, as its source declares them."""
    found = {"-h", "--help"}
    if script.endswith("/will_it_fit.py"):  # it takes all that its chapter takes
        found |= declared(script.replace("will_it_fit", "train_llm"))
    for node in ast.walk(ast.parse((ROOT / script).read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in ADDERS:
            names = [word.value for word in node.args if isinstance(word, ast.Constant)]
            actions = [option.value for option in node.keywords if option.arg == "action"]
            if actions and not isinstance(actions[0], ast.Constant):  # BooleanOptionalAction
                names += [name.replace("--", "--no-", 1) for name in names]
            found |= set(names)
    return found


def unknown_flags(text):
    """Return the flags in a block of bash that the Python script before them does not have.

    Those after a variable such as `$train`, and those of a file of arguments, whose lines begin
    with a flag, must be flags of every chapter that the block names.
    """
    text = re.sub(r"(^|\s)#.*", "", text.replace("\\\n", " "), flags=re.M)
    named = set(re.findall(r"\d\d-[\w-]+/train_llm\.py", text))
    found = []
    for command in re.split(r"[\n;&|]", text):
        scripts = named if command.startswith("-") else set()
        for quoted in re.findall(r"[^\s()=]+", command):
            word = quoted.strip("\"'")
            if word.endswith(".py") and (ROOT / word).exists():
                scripts = {word}
            elif re.fullmatch(r"\$[a-z_]+", quoted):  # with quotes it would be no command
                scripts = scripts or named
            elif re.match("--?[a-zA-Z]", word):
                found += [(script, word) for script in scripts if word not in declared(script)]
    return found
