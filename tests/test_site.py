"""The site: all links lead somewhere, and in a browser it shows and does what a reader expects."""

import json
import os
import resource
import shutil
import subprocess
import tarfile
from collections import Counter
from html.parser import HTMLParser

import pytest

from chapters import chapters, diff, parent_of
from conftest import ROOT, printed

CHILDREN = [name for name in chapters() if parent_of(name)]
PAIRS = list(zip(CHILDREN, CHILDREN[1:], strict=False))
TOP = """name => { const box = document.querySelector(`[data-name="${name}"]`).getBoundingClientRect();
  return box.top - document.querySelector('#script').getBoundingClientRect().top; }"""


def build(folder, *flags):
    """Build the site in a folder; return the folder and how many seconds of a core it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    done = printed(ROOT / "tools/maintain/pages.py", "--output", folder, *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder, resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before


class Links(HTMLParser):
    """The anchors of a page, and where its links lead."""

    def __init__(self, path):
        super().__init__()
        self.ids, self.targets = Counter(), set()
        self.feed(path.read_text())

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.ids[found.get("id")] += 1
        self.targets |= {found[name] for name in ("href", "src") if name in found}


def test_every_link_and_anchor(tmp_path):
    site, _ = build(tmp_path / "site", "--no-plans")
    pages = {path: Links(path) for path in site.glob("**/*.html")}
    assert len(pages) > len(list(ROOT.glob("**/README.md")))
    for path, page in pages.items():
        twice = {name for name, count in page.ids.items() if name and count > 1}
        assert not twice, (path, twice)
        for target in page.targets:
            file, _, anchor = target.partition("#")
            there = (path.parent / file).resolve() if file else path
            if not target.startswith(("https://", "data:")):
                assert there.is_file(), (path, target)
                assert not anchor or pages[there].ids[anchor], (path, target)
    index = json.loads((site / "search.js").read_text().partition("= ")[2])
    for url, *_ in index:
        file, _, anchor = url.partition("#")
        assert pages[site / file].ids[anchor], url


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder, seconds = build(tmp_path_factory.mktemp("site") / "site")
    assert seconds < 60
    return folder


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    found = shutil.which("chromium")
    if not found:
        pytest.skip("there is no chromium: apt-get install chromium")
    with sync.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture
def visit(site, browser):
    """Open a page of the site, by its path; at the end, none has asked for more or complained."""
    pages, wrong = [], []

    def open_(path, width=1600, height=1000, scheme="light"):
        size = {"width": width, "height": height}
        page = browser.new_page(viewport=size, color_scheme=scheme)
        page.on("console", lambda said: wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda asked: asked.url[:5] == "file:" or wrong.append(asked.url))
        page.goto(f"file://{site / path}")
        pages.append(page)
        return page

    yield open_
    for page in pages:
        page.close()
    assert not wrong


def page_of(chapter):
    return f"{chapters()[chapter].parent.name}/index.html"


@pytest.mark.exhaustive
def test_all_pages_are_small_quiet_and_fit_a_phone(site, visit):
    assert sum(path.stat().st_size for path in site.glob("**/*") if path.is_file()) < 5e6
    for path in site.glob("**/*.html"):
        page = visit(path, 390, 844)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, path
        page.close()


@pytest.mark.exhaustive
@pytest.mark.parametrize("path", ["index.html", *map(page_of, chapters())])
def test_first_paint(visit, path):
    """Other tests may use the cores: the fastest of five counts."""
    page, took = visit(path), []
    for _ in range(5):
        page.reload()
        page.wait_for_function("performance.getEntriesByName('first-contentful-paint').length")
        took.append(page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime"))
    assert min(took) < 200, took


@pytest.mark.exhaustive
@pytest.mark.parametrize("chapter", CHILDREN)
def test_the_split_view_shows_what_diff_shows(visit, chapter):
    """All lines of `diff`, the parent's on the left, those of a row at the same height."""
    page = visit(page_of(chapter))
    page.keyboard.press("o")
    shown = page.evaluate("""() => [...document.querySelectorAll('#script pre > div')].map(run =>
        [...run.children].map(line => { const box = line.getBoundingClientRect();
            return [line.tagName, line.textContent, box.left, box.top, line.style.getPropertyValue('--r')]; }))""")
    lines = [line for run in shown for line in run]
    expected = diff(chapters()[parent_of(chapter)], chapters()[chapter])
    for tags, marks in ((("DEL", "B"), "- "), (("INS", "SPAN"), "+ "), (("DEL",), "-"), (("INS",), "+")):
        told = [text for tag, text, *_ in lines if tag in tags]
        assert told == [line for mark, line, *_ in expected if mark in marks]
    for run in shown:
        left, right = ([line for line in run if line[0] in tags] for tags in ("DEL B", "INS SPAN"))
        tops = {row: top for *_, top, row in left}
        assert all(tops.get(row, top) == top for *_, top, row in right)
    visible = [line for line in lines if line[3]]
    assert len({(line[0] in "DEL B", line[2]) for line in visible if line[2]}) == 2
