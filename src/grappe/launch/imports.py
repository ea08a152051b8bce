"""Imports what takes seconds; the search for garbage meanwhile would take a fifth of torch's import."""

from __future__ import annotations

import contextlib
import gc
import importlib
from collections.abc import Callable, Iterator
from typing import Any

LIGHTNING = ("lightning", "pytorch_lightning")
"""Packages of Lightning, whose scripts start their processes themselves."""


def function(name: str) -> Callable[..., Any]:
    """Returns the function "package.module:name"."""
    module, _, attribute = name.partition(":")
    with without_collection():
        return getattr(importlib.import_module(module), attribute)


def import_quietly(*names: str) -> None:
    """Imports modules; one that fails is left to the process that needs it, which can say so."""
    with without_collection():
        for name in names:
            with contextlib.suppress(Exception):
                importlib.import_module(name)


@contextlib.contextmanager
def without_collection() -> Iterator[None]:
    """Pauses Python's search for garbage: an import makes a million objects, nearly all of which stay."""
    paused = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if paused:
            gc.enable()
