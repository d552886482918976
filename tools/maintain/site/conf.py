"""Configure Sphinx for the site, which pages.py builds."""

import json
import re
from pathlib import Path

from docutils import nodes

project = "Distributed training of language models"
html_title = project
author = ""
extensions = ["myst_parser", "sphinx_copybutton"]
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_inline"]
myst_url_schemes = {"http": None, "https": None, "source": {"url": "{{path}}"}}
# Hide warnings about anchors, because Sphinx knows only the anchors of headings. A test checks all
# links instead.
suppress_warnings = ["myst.xref_missing"]
root_doc = "README"
html_extra_path = ["files"]
html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_js_files = ["site.js", "step.js", "figures.js"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_show_copyright = False
copybutton_selector = "div.highlight-bash pre"
templates_path = ["templates"]
html_additional_pages = {"search": "search.html", "404": "404.html"}
html_context = {"folders": [path.name for path in Path(__file__).parent.iterdir() if path.is_dir()]}
# If the head of a table begins with one of these texts, each row of the table answers a question.
ANSWERS = ("you see", "question", "your run")


def explain_terms(app, doctree):
    """Add a tooltip with the definition to the first use of each glossary term on a page.

    Search only paragraphs. Leave out the pages README and docs/glossary.
    """
    glossary = (app.srcdir / "docs/glossary.md").read_text()
    terms = dict(re.findall(r"^\*\*(.+?)\.\*\* (.+?)(?=\n\n|\Z)", glossary, re.M | re.S))
    if app.env.docname in ("docs/glossary", app.config.root_doc):
        return
    for term, definition in terms.items():
        explanation = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", definition).replace("\n", " ")
        pattern = re.compile(rf"\b({re.escape(term)}s?)\b", re.I)
        for text in doctree.findall(nodes.Text):
            if pattern.search(text) and isinstance(text.parent, nodes.paragraph):
                before, word, after = pattern.split(text, maxsplit=1)
                tip = nodes.abbreviation("", word, explanation=explanation)
                text.parent.replace(text, [nodes.Text(before), tip, nodes.Text(after)])
                break


def name_rows(app, doctree):
    """Add an anchor to each table row that answers a question; search results link to the row."""
    for body in list(doctree.findall(nodes.tbody)):
        for row in body if answers(body.parent) else ():
            row["ids"].append(f"row-{nodes.make_id(row[0].astext())[:50]}")


def answers(table):
    """Return whether a table's rows answer questions, judging by the first words of its head."""
    head = next(table.findall(nodes.thead), None)
    return head is not None and head.astext().startswith(ANSWERS)


def write_search_index(app, error):
    """Write the search index: the titles, anchors and texts of all sections and answers.

    Leave out the pages whose names end in /diff. The index is a JavaScript file, which a page can
    load without a server.
    """
    pages = sorted(page for page in app.env.found_docs if not page.endswith("/diff"))
    trees = {app.builder.get_target_uri(page): app.env.get_doctree(page) for page in pages}
    index = {url: entries_of(doctree) for url, doctree in trees.items()}
    script = f"const SEARCH_INDEX = {json.dumps(index, ensure_ascii=False)};"
    (Path(app.outdir) / "search-index.js").write_text(script)


def entries_of(doctree):
    """Return a page's title, and a list of (anchor, titles, text) for its sections and answers."""
    found = []
    for node in doctree.findall(lambda node: isinstance(node, nodes.section | nodes.row)):
        own = node.deepcopy()
        for inner in list(own.findall(is_left_out)):
            inner.parent.remove(inner)
        between = " · " if isinstance(node, nodes.row) else " "
        text = between.join(" ".join(part.astext().split()) for part in own[1:])
        if text and node["ids"]:
            found.append((node["ids"][0], titles_of(node)[1:], text))
    return doctree.next_node(nodes.title).astext(), found


def is_left_out(node):
    """Return whether the search index leaves `node` out of the text of the section around it."""
    is_diff = isinstance(node, nodes.literal_block) and node.get("language") == "diff"
    is_answers = isinstance(node, nodes.table) and answers(node)
    is_section = isinstance(node, nodes.section) and node.parent is not None
    return is_section or is_answers or is_diff or isinstance(node, nodes.raw | nodes.comment)


def titles_of(node):
    """Return the titles from the page's title down to the title of the section or row `node`.

    The title of a row is the text of the row's first cell.
    """
    above = [] if isinstance(node, nodes.document) else titles_of(node.parent)
    return [*above, node[0].astext()] if isinstance(node, nodes.section | nodes.row) else above


def setup(app):
    app.connect("doctree-read", explain_terms)
    app.connect("doctree-read", name_rows)
    app.connect("build-finished", write_search_index)
    # Turn off Sphinx's search, because our own search shows excerpts without a server.
    app.connect("builder-inited", lambda app: setattr(app.builder, "search", False))
