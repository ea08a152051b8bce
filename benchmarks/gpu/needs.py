"""Lists the packages, name==version, that grappe needs beside torch, from an environment that has them."""

from __future__ import annotations

import importlib.metadata

from packaging.requirements import Requirement

THERE = {"torch", "numpy"}
"""A machine made for GPUs has torch, and what torch brings."""


def main() -> None:
    """Prints a package a line, those that grappe's dependencies need included."""
    found: dict[str, str] = {}
    _add("grappe", {"energy", "images"}, found)
    found.pop("grappe")
    print(*(f"{name}=={version}" for name, version in sorted(found.items())), sep="\n")


def _add(name: str, extras: set[str], found: dict[str, str]) -> None:
    if name in found or name in THERE:
        return
    found[name] = importlib.metadata.version(name)
    for text in importlib.metadata.requires(name) or ():
        need = Requirement(text)
        if need.marker is None or any(need.marker.evaluate({"extra": extra}) for extra in extras or {""}):
            _add(need.name.lower(), set(need.extras), found)


if __name__ == "__main__":
    main()
