"""Sets Sphinx up for both languages; `python -m docs.site` gives the language and the folders."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.locale import _

import grappe

project = "grappe"
extensions = ["myst_parser", "sphinx_copybutton"]
templates_path = ["templates"]
html_static_path = ["static"]
html_logo = "static/logo.svg"
html_favicon = "static/logo.svg"
version = grappe.__version__
html_css_files = ["grappe.css"]
html_theme = "furo"
html_title = "grappe"
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
html_show_search_summary = False  # it would fetch pages, which a browser refuses for a folder
html_sidebars = {
    "**": [
        "sidebar/brand.html",
        "sidebar/language.html",
        "sidebar/version.html",
        "sidebar/search.html",
        "sidebar/scroll-start.html",
        "sidebar/navigation.html",
        "sidebar/scroll-end.html",
    ]
}
highlight_language = "text"
smartquotes = False  # options have two hyphens, and code has straight quotes
myst_heading_anchors = 4
myst_links_external_new_tab = False
nitpicky = True
show_warning_types = True
TABLE = re.compile(r"<table .*?</table>", re.DOTALL)
CODE = re.compile(r"(<(?:pre|code|script|style).*?</(?:pre|code|script|style)>|<[^>]+>)", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
FRENCH = {
    "On this page": "Sur cette page",
    "Next": "Suivant",
    "Previous": "Précédent",
    "Home": "Accueil",
}
"""The theme's words that its catalogues leave in English."""


def setup(app: Sphinx) -> None:
    """Gives each page the addresses of its translations, and the theme its French words."""
    app.connect("html-page-context", _languages, priority=900)  # after the theme


def _languages(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    found: dict[str, str] = json.loads((Path(app.srcdir) / "translations.json").read_text())
    up = "../" * (page.count("/") + (app.config.language == "fr"))
    english = app.config.language == "en"
    other = found.get(page, "fr/index.html" if english else "index.html")
    context["body"] = TABLE.sub(_labelled, context.get("body", ""))
    if not english:
        context["_"] = lambda text: FRENCH.get(text) or _(text)
        for part in ("body", "toc", "title", "furo_navigation_tree"):
            context[part] = _unbroken(context.get(part, ""))
    context["translation"], context["root"] = up + other, up
    context["translation_language"] = "fr" if english else "en"
    context["translation_name"] = "Français" if english else "English"


def _unbroken(html: str) -> str:
    """Keeps French punctuation on the line of the word before it."""
    parts = CODE.split(html)
    parts[::2] = [re.sub(r" (?=[?!:;»])|(?<=«) ", "\N{NO-BREAK SPACE}", text) for text in parts[::2]]
    return "".join(parts)


def _labelled(table: re.Match[str]) -> str:
    """Names each cell by its column, for narrow pages, which show the cells of a row below each other."""
    head = [TAG.sub("", cell).strip() for cell in re.findall(r"<th[^>]*>(.*?)</th>", table[0], re.DOTALL)]
    if not 2 <= len(head) <= 4:
        return table[0]
    columns = itertools.cycle(head)
    shown = re.sub("<td", lambda _: f'<td data-label="{next(columns)}"', table[0])
    return shown.replace('<table class="', '<table class="stacked ', 1)
