"""Broken packages: names the installed package that cannot be imported, a torchvision made for another torch, say."""

from __future__ import annotations

import contextlib
import importlib.metadata
import traceback


def broken_package(error: BaseException) -> str | None:
    """One line on the installed package in whose own import `error` was raised; None where it was in none."""
    package: str | None = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "<module>":
            package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    if package in (None, "", "__main__", "grappe", "torch"):
        return None
    with contextlib.suppress(Exception):  # metadata of whatever form
        for name in importlib.metadata.packages_distributions().get(package, [package]):
            text = str(error).strip().partition("\n")[0]
            version = importlib.metadata.version(name)
            return (
                f"{name} {version} cannot be imported ({type(error).__name__}: {text}); it "
                f"may not fit torch {importlib.metadata.version('torch')}: install a {name} that does, or remove it: "
                f"pip uninstall {name}"
            )
    return None
