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
        took.append(
            page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
        )
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
    for tags, marks in (
        (("DEL", "B"), "- "),
        (("INS", "SPAN"), "+ "),
        (("DEL",), "-"),
        (("INS",), "+"),
    ):
        told = [text for tag, text, *_ in lines if tag in tags]
        assert told == [line for mark, line, *_ in expected if mark in marks]
    for run in shown:
        left, right = ([line for line in run if line[0] in tags] for tags in ("DEL B", "INS SPAN"))
        tops = {row: top for *_, top, row in left}
        assert all(tops.get(row, top) == top for *_, top, row in right)
    visible = [line for line in lines if line[3]]
    assert len({(line[0] in "DEL B", line[2]) for line in visible if line[2]}) == 2


@pytest.mark.exhaustive
@pytest.mark.parametrize("before, after", PAIRS)
def test_walking_keeps_the_place(visit, before, after):
    """By key, by click and by slider, there and back; in the view that was chosen."""
    page = visit(page_of(before))
    page.keyboard.press("u")
    page.evaluate(f"scroller().scrollBy(0, ({TOP})('main') + 40)")
    for step in (
        lambda: page.keyboard.press("n"),
        lambda: page.locator("nav a", has_text=before).click(),
        lambda: page.locator("#walk").press("ArrowRight"),
    ):
        with page.expect_navigation():
            step()
        assert (
            -60 < page.evaluate(TOP, "main") < -20
            and page.evaluate("document.body.className") == "unified"
        )
    assert f"/{page_of(after)}?" in page.url


@pytest.mark.exhaustive
def test_folding_and_names(visit):
    page = visit(page_of("02"))
    part = page.locator('[data-name="lr_at"]')
    assert not part.locator("span").first.is_visible()
    for fold, open_ in (
        (lambda: part.locator("summary").click(), True),
        (lambda: part.locator("summary").press("Enter"), False),
        (lambda: page.keyboard.press("o"), True),
        (lambda: page.locator("#fold").click(), False),
    ):
        fold()
        assert part.locator("span").first.is_visible() == open_
    page.locator('article a[href="#f-evaluate"]').first.click()
    assert abs(page.evaluate(TOP, "evaluate")) < 5
    page.locator('[data-name="evaluate"] .back').click()
    assert page.locator("#m-evaluate").is_visible()
    page.keyboard.press("l")
    assert page.locator("#legend span").all_inner_texts()[1].startswith("02: ")
    assert not page.locator("del").first.is_visible()
    page.locator("a.term").first.focus()
    shown = "getComputedStyle(document.activeElement, '::after').content"
    assert "Distributed data parallel" in page.evaluate(shown)


@pytest.mark.exhaustive
def test_search_and_the_planner(visit):
    page = visit("docs/glossary.html")
    page.keyboard.press("/")
    page.keyboard.type("require_backward_grad_sync")
    page.locator("#search a", has_text="train_step").first.click()
    page.wait_for_url("**/02-ddp/index.html#f-train_step")
    page = visit("planner.html")
    rows = page.locator("#planned tbody tr:visible")
    every = rows.count()
    page.locator("#plans select").first.select_option("llama-3.1-70b")
    page.locator("#plans select").nth(1).select_option("4")
    assert 0 < rows.count() < every
    asked = [
        "@05-large-model/configs/llama-3.1-70b.args",
        "--nodes",
        "4",
        "--global-batch-size",
        "32",
        "--json",
    ]
    told = json.loads(printed(ROOT / "05-large-model/will_it_fit.py", *asked, cwd=ROOT).stdout)[
        "settings"
    ]
    shown = {row[2]: row[3:5] for row in (text.split("\\t") for text in rows.all_inner_texts())}
    for name, plan in told.items():
        assert (name in shown) == plan["fits"]
        sizes = [f"{plan[of] / 2**30:.1f}" for of in ("gpu_needs", "host_needs")]
        assert shown.get(name, sizes) == sizes


@pytest.mark.exhaustive
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(visit, tmp_path, scheme):
    done = subprocess.run(
        ["npm", "pack", "axe-core@4"], cwd=tmp_path, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"npm has no axe-core: {done.stderr}")
    tarfile.open(next(tmp_path.glob("*.tgz"))).extractall(tmp_path, filter="data")
    pictures = ROOT / "outputs/site"
    os.makedirs(pictures, exist_ok=True)
    last = page_of(CHILDREN[-2])
    for path, key in (
        ("index.html", ""),
        (last, "s"),
        (last, "l"),
        (last.replace("index", "readmes"), ""),
        ("planner.html", ""),
        ("benchmarks/index.html", "/"),
    ):
        page = visit(path, scheme=scheme)
        page.add_script_tag(path=tmp_path / "package/axe.min.js")
        if key:
            page.keyboard.press(key)
        page.screenshot(path=pictures / f"{path.replace('/', '-')}{key.strip('/')}-{scheme}.png")
        found = page.evaluate("axe.run()")["violations"]
        serious = [rule for rule in found if rule["impact"] in ("serious", "critical")]
        assert not serious, json.dumps(
            [(rule["id"], [n["html"][:200] for n in rule["nodes"][:3]]) for rule in serious]
        )
