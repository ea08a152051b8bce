"""Builds the documentation site into build/site, in both languages: `python -m docs.site`."""

from __future__ import annotations

import json
import re
import shutil
import sys
from pathlib import Path

from docs.site.assemble import assemble, llms, scorer
from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).parent
OUTPUT = HERE.parents[1] / "build" / "site"
MARKER = ".made-by-docs-site"
"""File in the folders that a build has made, which the next one may remove."""


def build(output: Path) -> int:
    """Writes the site into `output`, which is emptied: English, and French in `fr`. Returns Sphinx's exit code.

    Strict: a link or an anchor that leads nowhere is a warning, and any warning is a failure.
    """
    sources = _sources(output)
    for folder in (output, sources):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        (folder / MARKER).touch()
    scores = sources / "scorer.js"
    scores.write_text(scorer())
    for language, target in (("en", output), ("fr", output / "fr")):
        assemble(language, sources / language)
        options = ["-q", "-j", "2", "-W", "--keep-going", "-b", "html"]
        options += ["-c", str(HERE), "-D", f"language={language}", "-D", f"html_search_scorer={scores}"]
        trees = str(sources / f"{language}-trees")
        if code := sphinx([*options, "-d", trees, str(sources / language), str(target)]):
            return code
    (output / "llms.txt").write_text(llms())
    list_versions(output.parent)
    return 0


VERSIONS = """\
// Offers the sites that lie beside this one; each build of a site lists them anew.
const versions = {versions};
const choice = document.currentScript.previousElementSibling;
const root = new URL(".", document.currentScript.src);
for (const name of versions) {{
  const folder = new URL(`../${{encodeURIComponent(name)}}/`, root);
  choice.add(new Option(name, new URL("index.html", folder).href, false, folder.href === root.href));
}}
choice.hidden = versions.length < 2;
"""
"""Script of the choice of a version in the sidebar."""


def list_versions(folder: Path) -> None:
    """Writes into each site of a folder which others are there: build 0.2 beside 0.1, and both offer both."""
    sites = [one for one in folder.iterdir() if (one / MARKER).is_file() and (one / "index.html").is_file()]
    names = sorted((one.name for one in sites), key=lambda name: [int(part) for part in re.findall(r"\d+", name)])
    for one in sites:
        (one / "versions.js").write_text(VERSIONS.format(versions=json.dumps(names[::-1])))


def _sources(output: Path) -> Path:
    """The folder beside `output` from which Sphinx builds."""
    return output.with_name(f"{output.name}-sources")


def stranger(output: Path) -> Path | None:
    """The one of a build's folders that holds something else than an earlier build; None: both may be emptied."""
    for folder in (output, _sources(output)):
        empty = not folder.exists() or (folder.is_dir() and not any(folder.iterdir()))
        if not empty and not (folder / MARKER).is_file():
            return folder
    return None


if __name__ == "__main__":
    given = len(sys.argv) > 1
    target = Path(sys.argv[1]) if given else OUTPUT
    if given and (other := stranger(target.resolve())):
        print(f"{other} holds something else than a built site: give an empty folder, or a new one", file=sys.stderr)
        sys.exit(2)
    failed = build(target.resolve())
    if not failed:
        print(f"{target / 'index.html'} opens in a browser as it is")
    sys.exit(failed)
