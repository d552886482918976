"""Test that tools/maintain/pictures.py makes the committed pictures."""

import pictures
from chapters import ROOT


def test_pictures_drawn_again_equal_the_committed_files(tmp_path, monkeypatch):
    monkeypatch.setattr(pictures, "ASSETS", tmp_path)
    pictures.main()
    drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert drawn == {path.name: path.read_text() for path in (ROOT / "assets").glob("*.svg")}
