"""Builds the documentation site into build/site, in both languages: `python -m docs.site`."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from docs.site.assemble import assemble
from sphinx.cmd.build import main as sphinx

HERE = Path(__file__).parent
OUTPUT = HERE.parents[1] / "build" / "site"


def build(output: Path) -> int:
    """Writes the site into an empty folder `output`: English, and French in `fr`. Returns Sphinx's exit code.

    Strict: a link or an anchor that leads nowhere is a warning, and any warning is a failure.
    """
    sources = output.with_name(f"{output.name}-sources")
    for folder in (output, sources):
        shutil.rmtree(folder, ignore_errors=True)
    for language, target in (("en", output), ("fr", output / "fr")):
        assemble(language, sources / language)
        options = [
            "-q",
            "-j",
            "2",
            "-W",
            "--keep-going",
            "-b",
            "html",
            "-c",
            str(HERE),
            "-D",
            f"language={language}",
        ]
        trees = str(sources / f"{language}-trees")
        if code := sphinx([*options, "-d", trees, str(sources / language), str(target)]):
            return code
    return 0


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    failed = build(target.resolve())
    if not failed:
        print(f"{target / 'index.html'} opens in a browser as it is")
    sys.exit(failed)
