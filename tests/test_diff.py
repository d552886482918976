"""The diff is the lesson: nothing differs from the parent but what the README lists."""

import re

import pytest

from chapters import (
    banners,
    chapters,
    children_of,
    flags,
    imports,
    noise,
    parent_of,
    parts,
    text_of,
)

CHILDREN = [name for name in chapters() if parent_of(name)]


def both(chapter):
    """Return the scripts of a chapter's parent and of the chapter."""
    return chapters()[parent_of(chapter)].read_text(), chapters()[chapter].read_text()


def listed(chapter):
    """Return the README's list of what changes: from kind to names."""
    text = (chapters()[chapter].parent / "README.md").read_text()
    items = re.findall(r"^- \*\*(\w+)\*\*: (.*?)(?=^- |\n\n)", text, re.M | re.S)
    return {kind: set(re.findall(r"`([\w-]+)`", names)) for kind, names in items}


def different(chapter):
    """Return what really changes, under the same names."""
    before, after = both(chapter)
    old, new = parts(before), parts(after)
    old_flags, new_flags = flags(before), flags(after)
    old_text = {name: text_of(before, lines) for name, lines in old.items()}
    new_text = {name: text_of(after, lines) for name, lines in new.items()}
    common = old.keys() & new.keys()
    found = {
        "imports": imports(before) ^ imports(after),
        "flags": {
            name
            for name in old_flags.keys() | new_flags.keys()
            if old_flags.get(name) != new_flags.get(name)
        },
        "changed": {name for name in common if old_text[name][1] != new_text[name][1]},
        "decorated": {
            name
            for name in common
            if old_text[name][1] == new_text[name][1] and old_text[name] != new_text[name]
        },
        "new": new.keys() - old.keys(),
        "gone": old.keys() - new.keys(),
    }
    return {kind: names for kind, names in found.items() if names}


@pytest.mark.parametrize("chapter", CHILDREN)
def test_what_differs_is_what_the_readme_lists(chapter):
    assert listed(chapter) == different(chapter)


@pytest.mark.parametrize("chapter", CHILDREN)
def test_no_hunk_is_noise(chapter):
    assert noise(chapters()[parent_of(chapter)], chapters()[chapter]) == []


@pytest.mark.parametrize("chapter", CHILDREN)
def test_what_is_common_keeps_its_order(chapter):
    before, after = map(parts, both(chapter))
    kept = [name for name in after if name in before]
    assert kept == [name for name in before if name in after]


@pytest.mark.parametrize("chapter", CHILDREN)
def test_banners_and_flags_are_the_parents(chapter):
    """New flags and choices may come; what is there means what it meant, in the same words."""
    before, after = both(chapter)
    assert len(banners(before)) == 5 and banners(before) == banners(after)
    old, new = flags(before), flags(after)
    assert [name for name in new if name in old] == list(old)
    for name, declared in old.items():
        wider = re.escape(declared).replace(r"'\]", r"'(, '\w+')*\]")  # the choices
        assert re.fullmatch(wider, new[name])


def test_every_chapter_descends_from_the_first():
    reached = ["01"]
    for name in reached:
        reached += children_of(name)
    assert sorted(reached) == sorted(chapters())


SCRIPT = """
import os


def first(value):
    total = value + 1  # one more
    return total


def second(value):
    for item in value:
        print(item)
    return os.name
"""
NOISE = {
    "only comments or blank lines": [
        ("  # one more", "  # add one"),
        ("  # one more", ""),
        ("    return total", "    # this is the sum\n    return total"),
        ("    return total", "\n    return total"),
    ],
    "only another indentation": [("        print(item)", "            print(item)")],
    "only moved": [("    total = value + 1  # one more\n", "")],
}


@pytest.mark.parametrize(
    "reason, old, new", [(reason, *change) for reason, list_ in NOISE.items() for change in list_]
)
def test_noise_is_seen(reason, old, new, tmp_path):
    """The check above can fail."""
    before, after = tmp_path / "before.py", tmp_path / "after.py"
    changed = SCRIPT.replace(old, new)
    if reason == "only moved":
        changed += f"\n\ndef third(value):\n{old}"
    before.write_text(SCRIPT)
    after.write_text(changed)
    assert [found for found, _ in noise(before, after)] == [reason]
