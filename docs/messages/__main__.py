"""Renews the catalogues of help and messages: `python -m docs.messages`; with --check says what is missing in them."""

from __future__ import annotations

import functools
import gc
import sys

from docs.messages.catalogue import FOLDER, mistakes, mo, read, renewed, write
from docs.messages.flow import Program
from docs.messages.others import others

LANGUAGES = ("fr",)


@functools.cache
def templates() -> dict[str, set[str]]:
    """Returns all that is to be translated, each text with the files that it is from."""
    return {**Program(FOLDER.parent).found, **others()}


def check(language: str) -> list[str]:
    """Lists what keeps a language's catalogue from being whole and compiled."""
    catalogue = read(language)
    found = mistakes(catalogue, templates())
    compiled = FOLDER / f"{language}.mo"
    if not found and (not compiled.exists() or compiled.read_bytes() != mo(catalogue)):
        found.append(f"{compiled.name} is not compiled from {language}.po")
    return found


def main() -> int:
    """Exit code 1 when --check finds a mistake, or a text waits for its translation."""
    gc.disable()  # which would look at half a million nodes of syntax again and again
    if "--check" not in sys.argv:
        for language in LANGUAGES:
            write(renewed(read(language), templates()), language)
    found = [f"{language}.po: {one}" for language in LANGUAGES for one in check(language)]
    for line in found:
        print(line)
    if found:
        print(f"{len(found)} to mend in {FOLDER}; `make docs` adds what is new, and compiles")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
