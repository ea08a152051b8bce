"""Sets Sphinx up for both languages; `python -m docs.site` gives the language and the folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sphinx.application import Sphinx
from sphinx.locale import _

project = "grappe"
extensions = ["myst_parser"]
templates_path = ["templates"]
html_static_path = ["static"]
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
FRENCH = {"On this page": "Sur cette page", "Next": "Suivant", "Previous": "Précédent", "Home": "Accueil"}
"""The theme's words that its catalogues leave in English."""


def setup(app: Sphinx) -> None:
    """Gives each page the addresses of its translations, and the theme its French words."""
    app.connect("html-page-context", _languages)


def _languages(app: Sphinx, page: str, template: str, context: dict[str, Any], tree: Any) -> None:
    found: dict[str, str] = json.loads((Path(app.srcdir) / "translations.json").read_text())
    up = "../" * (page.count("/") + (app.config.language == "fr"))
    english = app.config.language == "en"
    other = found.get(page, "fr/index.html" if english else "index.html")
    if not english:
        context["_"] = lambda text: FRENCH.get(text) or _(text)
    context["translation"] = up + other
    context["translation_language"] = "fr" if english else "en"
    context["translation_name"] = "Français" if english else "English"
