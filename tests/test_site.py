"""Test that all links of the site lead somewhere, and that it is small and needs no network."""

import re
from collections import Counter

import pytest

from conftest import ROOT, run_command


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
        loads = re.findall(r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(.*?)\"", path.read_text())
        loads += re.findall(
            r"<link[^>]*rel=\"(?:stylesheet|preload)\"[^>]*href=\"(.*?)\"", path.read_text()
        )
        assert not [url for url in loads if "//" in url], f"{path} loads files from a network"
    size = sum(path.stat().st_size for path in site.glob("**/*") if path.is_file())
    assert size < 8_000_000, f"the site has {size / 1e6:.1f} MB"


def test_each_picture_has_a_light_and_a_dark_form(site):
    for page in site.glob("**/*.html"):
        tags = re.findall(r"<img[^>]*\.svg[^>]*>", page.read_text())
        names = [re.search(r"([\w-]+)-(light|dark)\.svg", tag).groups() for tag in tags]
        assert names[::2] == [(name, "light") for name, _ in names[1::2]], page
        assert names[1::2] == [(name, "dark") for name, _ in names[::2]], page
        assert all(f"only-{theme}" in tag for tag, (_, theme) in zip(tags, names, strict=True))
    for path in site.glob("_images/*.svg"):
        assert "prefers-color-scheme" not in path.read_text(), path
