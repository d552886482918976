"""Test that the site's figures that move compute what the pictures of the chapters show."""

import pytest

import pictures
from conftest import ROOT


@pytest.fixture(scope="module")
def page(browser):
    """Open a page with pictures of chapters 04 and 07, and a moving figure below each picture."""
    images = '<p><img src="04-holds-light.svg"></p><p><img src="07-1f1b-light.svg"></p>'
    script = (ROOT / "tools/maintain/site/static/figures.js").read_text()
    page = browser.new_page()
    page.set_content(f"<body>{images}<script>{script}</script></body>")
    return page


def test_figures_compute_what_the_pictures_show(page):
    for ranks in (1, 4, 16, 512):
        held = page.evaluate("ranks => figures.held(ranks, 8)", ranks)
        expected = pictures.held_parts(ranks, 8)
        assert held == {name: list(map(list, parts)) for name, parts in expected.items()}
    for ranks, micro_batches in ((1, 1), (3, 4), (4, 2), (8, 24)):
        for schedule in ("gpipe", "1f1b"):
            numbers = [schedule, ranks, micro_batches]
            rows = page.evaluate("numbers => figures.turns(...numbers)", numbers)
            turns = {
                (rank, turn): text
                for rank, row in enumerate(rows)
                for turn, text in enumerate(row)
                if text
            }
            assert turns == pictures.turns_of(*numbers)


def test_sliders_change_the_figures(page):
    memory, schedule = page.locator(".memory"), page.locator(".schedule")
    assert "128 GB: too much" in memory.inner_text()
    # The value of a slider is an index: 4 selects the last amount of memory, 180 GB.
    memory.get_by_label("GB per GPU").fill("4")
    assert "too much" not in memory.inner_text()
    schedule.get_by_label("ranks, K").fill("3")
    assert "(K − 1) / (M + K − 1) = 43%" in schedule.inner_text()
    assert [f"keeps {kept}" in schedule.inner_text() for kept in (4, 5)] == [True, False]
