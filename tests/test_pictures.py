"""Test that tools/maintain/pictures.py makes the committed pictures, and that their texts fit."""

import re
from xml.etree import ElementTree

import matplotlib
import pytest
from PIL import ImageFont

import pictures
from chapters import ROOT
from readme import readmes

PATHS = sorted((ROOT / "assets").glob("*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def test_pictures_drawn_again_equal_the_committed_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ASSETS", tmp_path)
    pictures.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in PATHS}


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_texts_stay_inside_their_boxes_in_a_wide_font(path):
    font = f"{matplotlib.get_data_path()}/fonts/ttf/DejaVuSans.ttf"
    fonts = {size: ImageFont.truetype(font, size) for size in (13, 15)}
    root = ElementTree.parse(path)
    boxes = [
        [float(box.get(name)) for name in ("x", "y", "width", "height")]
        for box in root.iter(f"{SVG}rect")
    ]
    for text in root.iter(f"{SVG}text"):
        length = fonts[13 if "small" in text.get("class") else 15].getlength(text.text)
        x, y = float(text.get("x")), float(text.get("y"))
        left = x - length * {"start": 0, "middle": 0.5, "end": 1}[text.get("text-anchor")]
        assert left >= 0, text.text
        assert left + length <= boxes[0][2], text.text
        for box_left, top, width, height in boxes:
            is_label = abs(box_left + width / 2 - x) < 0.1 and top < y < top + height
            # Allow a number that is wider than its bar, because some bars are very narrow.
            assert not is_label or length < width or text.text.isdecimal(), text.text


def test_alternative_texts_have_one_line():
    """Check for line breaks, because the site would join the words before and after a break."""
    for path in readmes():
        assert not re.search(r"!\[[^\]]*\n", path.read_text()), path
