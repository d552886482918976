"""Tests of the site: all links lead somewhere, and a browser shows what a reader expects."""

import json
import re
import shutil
from collections import Counter

import pytest

from chapters import chapters, diff, parent_of
from conftest import ROOT, run_command

PLACES = {
    name: f"{script.parent.relative_to(ROOT)}/index.html" for name, script in chapters().items()
}
CHILDREN = [name for name in chapters() if parent_of(name)]
# For each line of the script: its tag, its text, whether it is on the right side, and its height.
LINES = """[...document.querySelectorAll('#script pre > div > *')].map(line => [line.tagName,
    line.textContent, line.offsetLeft > 0, line.getBoundingClientRect().top])"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = run_command(ROOT / "tools/maintain/pages.py", "--output", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def links(path):
    """Return the anchors of a page with their counts, and the targets of its links."""
    tags = " ".join(re.findall(r"<\w[^>]*>", path.read_text()))
    anchors = Counter(re.findall(r'\sid="?([^"\s>]+)', tags))
    return anchors, re.findall(r'(?:href|src)="(.*?)"', tags)


def test_links_and_anchors_lead_somewhere(site):
    """The links are those of the READMEs, of the pages around them, and of the search."""
    pages = {path: links(path) for path in site.glob("**/*.html")}
    index = json.loads((site / "search.js").read_text().removeprefix("INDEX = "))
    found = [(path, target) for path, (_, targets) in pages.items() for target in targets]
    for path, target in found + [(site / "index.html", entry[0]) for entry in index]:
        file, _, anchor = target.partition("#")
        page = (path.parent / file).resolve() if file else path
        if not target.startswith(("https:", "data:")):
            assert page.is_file() and (not anchor or pages[page][0][anchor]), (path, target)
    assert all(max(ids.values(), default=1) == 1 for ids, _ in pages.values()), "an id is repeated"
    assert sum(path.stat().st_size for path in site.glob("**/*") if path.is_file()) < 5e6


# ---- in a browser ----------------------------------------------------------------------------
@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if not (found := shutil.which("chromium")):
        pytest.skip("needs apt-get install chromium")
    with sync.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture
def page(site, browser):
    """Return a page that opens paths of the site, and fails on messages and network requests."""
    with browser.new_page(viewport={"width": 1600, "height": 1000}) as page:
        problems, page.open = [], lambda path: page.goto(f"file://{site / path}")
        page.on("console", lambda message: problems.append(message.text))
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("request", lambda it: re.match("file:|data:", it.url) or problems.append(it.url))
        yield page
        assert not problems


@pytest.mark.exhaustive
def test_pages_fit_a_phone(site, page):
    page.set_viewport_size({"width": 390, "height": 844})
    for path in site.glob("**/*.html"):
        page.open(path)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, path


@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", CHILDREN)
def test_split_view_shows_the_diff(page, chapter):
    """The lines of the parent are on the left, and unchanged lines are on both sides."""
    page.open(PLACES[chapter])
    page.keyboard.press("o")
    lines = page.evaluate(LINES)
    expected = diff(chapters()[parent_of(chapter)], chapters()[chapter])
    for tag, marks in (("DEL", "-"), ("INS", "+"), ("DEL B", "- "), ("INS SPAN", "+ ")):
        texts = [text for mark, text, *_ in expected if mark in marks]
        assert [text for name, text, *_ in lines if name in tag.split()] == texts
    left, right = ([line for line in lines if line[0] == name] for name in ("B", "SPAN"))
    assert [line[3] for line in left] == [line[3] for line in right]
    assert all(on_right == (name in ("INS", "SPAN")) for name, _, on_right, top in lines if top)


@pytest.mark.exhaustive
def test_walking_to_other_chapters_keeps_the_place_and_the_view(page):
    page.open(PLACES["02"])
    page.keyboard.press("o")
    page.keyboard.press("u")
    page.evaluate("scroller().scrollBy(0, below($('[data-name=main]')) + 40)")
    link, slider = page.locator("nav a", has_text="02"), page.locator("#walk")
    for walk in (lambda: page.keyboard.press("n"), link.click, lambda: slider.press("ArrowRight")):
        with page.expect_navigation():
            walk()
        assert -60 < page.evaluate("below($('[data-name=main]'))") < -10
        assert page.locator("[data-view][aria-pressed=true]").inner_text() == "unified"
    assert f"/{PLACES['03']}?" in page.url


@pytest.mark.exhaustive
def test_keys_links_terms_and_search_work(page):
    page.open(PLACES["02"])
    part, line = page.locator("summary", has_text="lr_at"), page.locator("[data-name=lr_at] span")
    folds = part.click, lambda: part.press("Enter"), lambda: page.keyboard.press("o")
    for fold, visible in zip(folds, (True, False, True), strict=True):
        fold()
        assert line.first.is_visible() == visible
    page.locator("article a[href='#f-evaluate']").first.click()
    assert abs(page.evaluate("below($('[data-name=evaluate]'))")) < 5
    page.locator("[data-name=evaluate] .back").click()
    assert 0 < page.locator("#m-evaluate").bounding_box()["y"] < 1000
    page.keyboard.press("l")
    assert "02: " in page.locator("#legend").inner_text()
    page.locator("a.term", has_text="DDP").first.focus()
    tip = page.evaluate("getComputedStyle(document.activeElement, '::after').content")
    assert "Distributed data parallel" in tip
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.style.colorScheme") == "dark"
    page.open("docs/glossary.html")
    page.keyboard.press("/")
    page.keyboard.type("require_backward_grad_sync")
    page.locator("#search a", has_text="forward_backward").first.click()
    page.wait_for_url("**/02-ddp/index.html#f-forward_backward")
