"""The committed pictures are those that tools/maintain/pictures.py makes."""

import re

import pictures
from chapters import ROOT


def test_pictures_drawn_again_equal_the_committed_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ASSETS", tmp_path)
    pictures.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in (ROOT / "assets").glob("*.svg")}


def test_chapters_show_each_picture():
    pages = "".join(page.read_text() for page in ROOT.glob("0*/README.md"))
    shown = set(re.findall(r"assets/([\w-]+\.svg)", pages))
    assert shown == {path.name for path in (ROOT / "assets").glob("*.svg")}
