"""Preload: imports what local processes need in the server that they are forked from, and survives what is broken."""

from __future__ import annotations

import contextlib
import importlib

# torch._dynamo: the first optimizer that is made imports it, and all that FSDP2 needs.
PRELOADED = ("torch._dynamo", "grappe.engines.native", "grappe.training.worker")


def import_quietly(*names: str) -> None:
    """Imports modules; one that fails is left to the process that needs it, which can say so."""
    for name in names:
        with contextlib.suppress(Exception):
            importlib.import_module(name)


import_quietly(*PRELOADED)
