"""Test that all links of the site lead somewhere, and that it is small and needs no network.

Other tests open its pages in a browser.
"""

import re
from collections import Counter

import pytest
from axe_playwright_python.sync_playwright import Axe

from chapters import chapters
from conftest import ROOT, run_command
from readme import blocks

# Each key is a text that a reader may search for, and its value is a section of a page. One of the
# first three results of the search must lead to this section.
ENTRIES = {
    "out of memory": "diagnosing-errors/faults.html#device-out-of-memory",
    "nccl timeout": "docs/questions.html#row-nccl-timed-out",
    "loss is nan": "docs/questions.html#row-the-loss-is-nan-where",
    "hangs": "diagnosing-errors/README.html#row-hangs",
    "address already in use": "docs/questions.html#row-a-run-ends-at-once-with-address",
    "unrecognized arguments": "docs/questions.html#row-a-script-ends-with-unrecognized",
    "no space left on device": "diagnosing-errors/faults.html#disk-full",
    "connection refused": "docs/questions.html#row-a-rank-reports-connection-refused",
    "watchdog timeout": "docs/questions.html#row-nccl-timed-out",
    "killed": "diagnosing-errors/faults.html#killed",
}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = run_command(ROOT / "tools/maintain/pages.py", "--output", folder, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


def links(path):
    """Return the anchors of a page with their counts, and the targets of its links."""
    tags = " ".join(re.findall(r"<\w[^>]*>", path.read_text()))
    return Counter(re.findall(r'\sid="(.*?)"', tags)), re.findall(r'(?:href|src)="(.*?)"', tags)


def test_links_and_anchors_lead_somewhere(site):
    pages = {path: links(path) for path in site.glob("**/*.html")}
    for path, (anchors, targets) in pages.items():
        assert max(anchors.values(), default=1) == 1, f"{path}: an anchor is there twice"
        for target in targets:
            file, _, anchor = target.partition("#")
            page = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not target.startswith(("https:", "data:")):
                assert page.is_file() and (not anchor or pages[page][0][anchor]), (path, target)


def test_site_needs_no_network_and_is_small(site):
    for path in site.glob("**/*.html"):
        tags = '<(?:script|img|iframe|source|link[^>]*rel="(?:stylesheet|preload)")'
        loads = re.findall(rf'{tags}[^>]*\s(?:src|href)="(.*?)"', path.read_text())
        assert not [url for url in loads if "//" in url], f"{path} loads files from a network"
    size = sum(path.stat().st_size for path in site.glob("**/*") if path.is_file())
    assert size < 8_000_000, f"the site has {size / 1e6:.1f} MB"


def test_each_picture_has_a_light_and_a_dark_form(site):
    for page in site.glob("**/*.html"):
        tags = re.findall(r"<img[^>]*\.svg[^>]*>", page.read_text())
        light, dark = tags[::2], tags[1::2]
        assert all("only-light" in tag and "-light.svg" in tag for tag in light), page
        assert [tag.replace("-light", "-dark") for tag in light] == dark, page
    for path in site.glob("_images/*.svg"):
        assert "prefers-color-scheme" not in path.read_text(), path


def test_each_hunk_in_a_readme_leads_to_its_place_in_the_diff_and_back(site):
    for script in chapters().values():
        readme = script.with_name("README.md")
        diffs = [block.text for block in blocks(readme) if block.kind == "diff"]
        shown = re.findall(r"^@@ \w+.* @@$", "".join(diffs), re.M)
        for page in ("README", "diff"):
            text = (site / script.parent.relative_to(ROOT) / f"{page}.html").read_text()
            links = re.findall(r'<a id="(shown-\d+)" href="(?:diff.html)?#([\w-]+)">', text)
            assert len(links) == len(shown), (readme, page)
        for target in {target for _, target in links}:
            back = re.search(rf'<div class=hunk id="{target}">\s*<a href="#(shown-\d+)">', text)
            assert (back[1], target) in links, (readme, target)


def test_diff_marks_changed_words(site):
    text = (site / "02-ddp/diff.html").read_text()
    assert "train_step(args, <mark>model</mark>, optimizer" in text
    assert "train_step(args, <mark>ddp</mark>, optimizer" in text


# ---- in a browser ----------------------------------------------------------------------------
@pytest.fixture
def page(browser):
    """Open an empty browser tab; after the test, check that the tab has requested only local files.

    No script on a page may have raised an error.
    """
    page = browser.new_page(viewport={"width": 1440, "height": 900}, reduced_motion="reduce")
    requested, errors = [], []
    page.on("request", lambda request: requested.append(request.url))
    page.on("pageerror", lambda error: errors.append(str(error)))
    yield page
    assert requested and not [url for url in requested if not url.startswith(("file:", "data:"))]
    assert errors == []
    page.close()


def test_links_lead_from_a_readme_to_its_diff_and_back(site, page):
    page.goto(f"file://{site}/02-ddp/diff.html")
    title, link = page.locator("h1"), page.locator("#shown-2")
    assert page.evaluate("scrollY") == 0 and title.bounding_box()["y"] < 200
    link.focus()
    page.keyboard.press("Enter")
    hunk = page.locator(".hunk:target")
    box = hunk.bounding_box()
    assert "ddp, optimizer" in hunk.inner_text() and 0 < box["y"] < 800
    hunk.locator("a").first.click()
    back = page.locator(".read :target")
    assert back.get_attribute("id") == "shown-2" and 0 < back.bounding_box()["y"] < 800


def test_diff_is_split_in_a_wide_window_or_if_a_reader_wants_it(site, page):
    def columns():
        sides = [page.locator(f".hunk .{name}").first for name in ("removed", "added")]
        return len({side.bounding_box()["x"] for side in sides})

    page.goto(f"file://{site}/02-ddp/diff.html")
    assert columns() == 1
    page.set_viewport_size({"width": 1800, "height": 900})
    assert columns() == 2
    page.locator("#split").uncheck()
    page.reload()
    assert columns() == 1
    page.locator("#split").check()
    page.set_viewport_size({"width": 390, "height": 844})
    assert columns() == 1
    assert page.evaluate("document.documentElement.scrollWidth") == 390


def test_theme_button_changes_the_pictures(site, page):
    page.goto(f"file://{site}/02-ddp/README.html")
    seen = set()
    for _ in range(3):
        page.locator(".theme-toggle-content button").click()
        pictures = page.locator("article img[src$='.svg']").all()
        shown = [image.get_attribute("src") for image in pictures if image.is_visible()]
        (theme,) = {re.search(r"-(light|dark)\.svg", name)[1] for name in shown}
        seen.add(theme)
    assert seen == {"light", "dark"}


def test_only_commands_have_a_copy_button_which_copies_the_command(site, page):
    page.goto(f"file://{site}/01-single-gpu/README.html")
    assert page.locator("button.copybtn").count() == page.locator(".highlight-bash").count() > 0
    page.locator(".highlight-bash").first.hover()
    page.locator("button.copybtn").first.click()
    page.locator(".sidebar-search").focus()
    page.keyboard.press("Control+V")
    command = page.locator(".highlight-bash pre").first.inner_text()
    assert page.locator(".sidebar-search").input_value() == command.replace("\n", " ").strip()


def test_search_finds_the_text_of_an_error(site, page):
    page.goto(f"file://{site}/search.html?q=hangs")
    for error, entry in ENTRIES.items():
        page.locator("#query").fill(error)
        found = page.locator("#results > li").all()[:3]
        urls = [item.locator("a").get_attribute("href") for item in found]
        assert any(url.startswith(entry) for url in urls), (error, urls)
        assert all(item.locator("p").inner_text() for item in found)


@pytest.mark.slow
@pytest.mark.parametrize("theme", ["light", "dark"])
@pytest.mark.parametrize(
    "name", ["index", "01-single-gpu/README", "02-ddp/diff", "docs/questions", "search"]
)
def test_page_is_accessible(name, theme, site, page):
    page.add_init_script(f"localStorage.theme = '{theme}'")
    page.goto(f"file://{site}/{name}.html?q=out of memory")
    found = Axe().run(page).response["violations"]
    assert [item for item in found if item["impact"] in ("serious", "critical")] == []
