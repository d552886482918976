"""The site: all links lead somewhere, and in a browser it shows and does what a reader expects."""

import json
import re
import resource
import shutil
import subprocess
import tarfile
from collections import Counter
from itertools import pairwise

import pytest

from chapters import chapters, diff, parent_of
from conftest import ROOT, run_command

PLACES = {
    name: f"{script.parent.relative_to(ROOT)}/index.html" for name, script in chapters().items()
}
CHILDREN = [name for name in chapters() if parent_of(name)]
browsing = pytest.mark.exhaustive
PAINT = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
LINES = """[...document.querySelectorAll('#script pre > div > *')].map(line => [line.tagName,
    line.textContent, line.offsetLeft > 0, line.getBoundingClientRect().top])"""


def build(folder, *flags):
    done = run_command(ROOT / "tools/maintain/pages.py", "--output", folder, *flags, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def links(path):
    """Return the anchors of a page, and where its links lead."""
    tags = " ".join(re.findall(r"<\w[^>]*>", path.read_text()))
    return Counter(re.findall(r'\sid="?([^"\s>]+)', tags)), re.findall(
        r'(?:href|src)="(.*?)"', tags
    )


def test_every_link_and_anchor_leads_somewhere(tmp_path):
    site = build(tmp_path, "--no-plans")
    pages = {path: links(path) for path in site.glob("**/*.html")}
    index = json.loads((site / "search.js").read_text().removeprefix("INDEX = "))
    found = [(path, target) for path, (_, targets) in pages.items() for target in targets]
    for path, target in found + [(site / "index.html", entry[0]) for entry in index]:
        file, _, anchor = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        if not target.startswith(("https:", "data:")):
            assert there.is_file() and (not anchor or pages[there][0][anchor]), (path, target)
    assert all(max(ids.values(), default=1) == 1 for ids, _ in pages.values())


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    folder = build(tmp_path_factory.mktemp("site"))
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 60
    return folder


@pytest.fixture(scope="module")
def browser():
    sync = pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
    if not (found := shutil.which("chromium")):
        pytest.skip("needs apt-get install chromium")
    with sync.sync_playwright() as driver:
        yield driver.chromium.launch(executable_path=found, args=["--no-sandbox"])


@pytest.fixture
def page(site, browser):
    """A page that opens paths of the site, complains of nothing and asks for no network."""
    with browser.new_page(viewport={"width": 1600, "height": 1000}) as page:
        wrong, page.open = [], lambda path: page.goto(f"file://{site / path}")
        page.on("console", lambda said: wrong.append(said.text))
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("request", lambda one: re.match("file:|data:", one.url) or wrong.append(one.url))
        yield page
        assert not wrong


@browsing
@pytest.mark.alone
def test_all_pages_are_small_quiet_fast_and_fit_a_phone(site, page):
    """The fastest of five first paints counts."""
    assert sum(path.stat().st_size for path in site.glob("**/*") if path.is_file()) < 5e6
    page.set_viewport_size({"width": 390, "height": 844})
    for path in site.glob("**/*.html"):
        page.open(path)
        assert page.evaluate("document.scrollingElement.scrollWidth") <= 390, path
    for path in ("index.html", *PLACES.values()):
        took = [page.open(path) and page.wait_for_function(PAINT).json_value() for _ in range(5)]
        assert min(took) < 200, (path, took)


@browsing
@pytest.mark.parametrize("chapter", CHILDREN)
def test_the_split_view_shows_what_diff_shows(page, chapter):
    """The parent's lines are on the left, and unchanged ones beside themselves."""
    page.open(PLACES[chapter])
    page.keyboard.press("o")
    lines = page.evaluate(LINES)
    expected = diff(chapters()[parent_of(chapter)], chapters()[chapter])
    for tag, marks in (("DEL", "-"), ("INS", "+"), ("DEL B", "- "), ("INS SPAN", "+ ")):
        told = [text for mark, text, *_ in expected if mark in marks]
        assert [text for name, text, *_ in lines if name in tag.split()] == told
    left, right = ([line for line in lines if line[0] == name] for name in ("B", "SPAN"))
    assert [line[3] for line in left] == [line[3] for line in right]
    assert all(on_right == (name in ("INS", "SPAN")) for name, _, on_right, top in lines if top)


@browsing
@pytest.mark.parametrize("before, after", list(pairwise(CHILDREN)))
def test_walking_keeps_the_place(page, before, after):
    page.open(PLACES[before])
    press = page.keyboard.press
    press("o")  # a part that is read stays open
    press("u")
    page.evaluate("scroller().scrollBy(0, below($('[data-name=main]')) + 40)")
    link, slider = page.locator("nav a", has_text=before), page.locator("#walk")
    for step in (lambda: press("n"), link.click, lambda: slider.press("ArrowRight")):
        with page.expect_navigation():
            step()
        assert -60 < page.evaluate("below($('[data-name=main]'))") < -10
        assert page.locator("[data-view][aria-pressed=true]").inner_text() == "unified"
    assert f"/{PLACES[after]}?" in page.url


@browsing
def test_folding_names_terms_and_colours(page):
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
    assert page.locator("article del").first.is_visible()
    assert not page.locator("#script del:visible").count()
    page.locator("a.term", has_text="DDP").first.focus()
    tip = page.evaluate("getComputedStyle(document.activeElement, '::after').content")
    assert "Distributed data parallel" in tip
    page.keyboard.press("d")
    assert page.evaluate("document.documentElement.style.colorScheme") == "dark"


@browsing
def test_search_and_the_planner(page):
    page.open("docs/glossary.html")
    page.keyboard.press("/")
    page.keyboard.type("require_backward_grad_sync")
    page.locator("#search a", has_text="train_step").first.click()
    page.wait_for_url("**/02-ddp/index.html#f-train_step")
    page.open(f"{PLACES['03']}#f-rank_first")  # which is the same in both, and folded
    assert page.locator("[data-name=rank_first] details[open]").count()
    page.keyboard.press("/")
    page.keyboard.type("check_shared")
    page.locator("#search a", has_text="check_shared").first.click()
    assert not page.locator("#search").is_visible()
    page.open("planner.html")
    page.locator("#plans select").first.select_option("llama-3.1-70b")
    page.locator("#plans select").nth(1).select_option("4")
    rows = page.locator("#planned tbody tr:visible").all_inner_texts()
    shown = {row.split("\t")[2]: row.split("\t")[3:5] for row in rows}
    asked = "@05-large-model/configs/llama-3.1-70b.args --nodes 4 --global-batch-size 32 --json"
    told = run_command(ROOT / "tools/planner/will_it_fit.py", *asked.split(), cwd=ROOT).stdout
    for name, plan in json.loads(told)["settings"].items():
        sizes = [f"{plan[of] / 2**30:.1f}" for of in ("gpu_needs", "host_needs")]
        assert shown.get(name) == (sizes if plan["fits"] else None)


@browsing
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(page, tmp_path, scheme):
    """In pages of all kinds; their pictures are kept in outputs/site."""
    npm = subprocess.run(["npm", "pack", "axe-core@4"], check=False, cwd=tmp_path)
    if npm.returncode:
        pytest.skip("needs axe-core from npm")
    tarfile.open(next(tmp_path.glob("*.tgz"))).extractall(tmp_path, filter="data")
    page.emulate_media(color_scheme=scheme)
    chapter = PLACES[CHILDREN[-2]]
    for path in ("index.html", chapter, chapter.replace("index", "readmes"), "planner.html"):
        page.open(path)
        page.add_script_tag(path=tmp_path / "package/axe.min.js")
        for key in "sl" if path == chapter else "/":
            page.keyboard.press(key)
            name = f"{path}-{scheme}-{key}.png".replace("/", "-")
            page.screenshot(path=ROOT / "outputs/site" / name)
            for rule in page.evaluate("axe.run({preload: false})")["violations"]:
                told = [node["html"][:200] for node in rule["nodes"][:3]]
                assert rule["impact"] not in ("serious", "critical"), (path, key, rule["id"], told)
