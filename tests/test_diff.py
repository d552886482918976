"""Test that diffs between scripts are small, have no noise, and keep the order of common parts."""

import os
import re
from functools import cache
from pathlib import Path

import pytest

import chapters as scripts
from chapters import chapters, noise, num_added, parent_of

# Cache the results of these functions, because several tests read each script.
flags, parts = cache(scripts.flags), cache(scripts.parts)
CHILDREN = [name for name in chapters() if parent_of(name)]


# CEILINGS has the largest number of code lines that chapter 01 may have, and that each other script
# may add to its parent, because people read only small scripts and diffs. Before you raise a
# ceiling, remove the lines that the lesson does not need.
CEILINGS = {"01": 422, "02": 92, "03": 63, "04": 115, "05": 158, "06": 127, "07": 159, "08": 95}
CEILINGS |= {"09": 193, "conversations": 48, "lora": 70, "preferences": 89, "muon": 75}
CEILINGS |= {"float8": 60}


@pytest.mark.parametrize("chapter", CEILINGS)
def test_script_stays_below_its_ceiling(chapter):
    parent = chapters().get(parent_of(chapter), Path(os.devnull))
    assert num_added(parent, chapters()[chapter]) <= CEILINGS[chapter]


def test_code_is_counted_without_comments_and_docstrings():
    source = '"""One.\n\nTwo."""\nx = "#"  # Three.\n# Four.\n\n'
    source += 'def f():\n    """Five."""\n    return x'
    assert scripts.code_lines(source) == {4, 7, 9}


@pytest.mark.parametrize("chapter", CHILDREN)
def test_no_hunk_is_noise(chapter):
    assert noise(chapters()[parent_of(chapter)], chapters()[chapter]) == []


@pytest.mark.parametrize("chapter", CHILDREN)
def test_common_parts_keep_their_order_their_banners_and_their_flags(chapter):
    before, after = (chapters()[name].read_text() for name in (parent_of(chapter), chapter))
    old, new = parts(before), parts(after)
    assert [name for name in new if name in old] == [name for name in old if name in new]
    banners, parent_banners = (re.findall(r"^# ---- .*$", text, re.M) for text in (after, before))
    assert len(banners) == 5 and banners == parent_banners
    old, new = flags(before), flags(after)
    assert [name for name in new if name in old] == list(old)
    for name, declaration in old.items():
        # Accept choices that the parent's flag does not have, because a child may add choices.
        pattern = re.escape(declaration).replace(r"'\]", r"'(, '\w+')*\]")
        assert re.fullmatch(pattern, new[name]), name


@pytest.mark.parametrize("start", ["    # A comment.\n", "\n", "    "])
def test_noise_is_found(start, tmp_path):
    """Check that an added comment, an added blank line and a changed indentation are noise."""
    script, changed, line = chapters()["01"], tmp_path / "changed.py", "    return model\n"
    changed.write_text(script.read_text().replace(line, start + line, 1))
    assert len(noise(script, changed)) == 1
    changed.write_text(script.read_text().replace(line, "    return None\n", 1))
    assert noise(script, changed) == []
