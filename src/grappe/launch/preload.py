"""Preload: imports what local processes need in the server that they are forked from, and survives what is broken."""

from __future__ import annotations

import gc

from grappe.launch.imports import import_quietly

# torch._dynamo: the first optimizer that is made imports it, and all that FSDP2 needs.
PRELOADED = ("torch._dynamo", "grappe.engines.native", "grappe.training.worker")

import_quietly(*PRELOADED)
gc.freeze()  # processes share this memory until they write to it, as a search for garbage would
