"""Configure Sphinx for the site, which pages.py builds."""

import re

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
html_js_files = ["step.js", "figures.js"]
html_copy_source = False
html_use_index = False
html_show_sphinx = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"


def explain_terms(app, doctree):
    """Give the first use of each term of the glossary on a page its definition as a tooltip."""
    glossary = (app.srcdir / "docs/glossary.md").read_text()
    terms = dict(re.findall(r"^\*\*(.+?)\.\*\* (.+?)(?=\n\n|\Z)", glossary, re.M | re.S))
    if app.env.docname in ("docs/glossary", app.config.root_doc):
        return
    for term, definition in terms.items():
        pattern = re.compile(rf"\b{re.escape(term)}s?\b", re.I)
        for text in list(doctree.findall(nodes.Text)):
            found = pattern.search(text)
            if not found or not isinstance(text.parent, nodes.paragraph):
                continue
            explanation = re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", definition).replace("\n", " ")
            before, after = text[: found.start()], text[found.end() :]
            tip = nodes.abbreviation("", found[0], explanation=explanation)
            text.parent.replace(text, [nodes.Text(before), tip, nodes.Text(after)])
            break


def setup(app):
    app.connect("doctree-read", explain_terms)
