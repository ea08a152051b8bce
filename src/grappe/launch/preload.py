"""Preload: imports what local processes need in the server that they are forked from, and survives what is broken."""

from __future__ import annotations

import gc
import os

from grappe.launch.imports import import_quietly

import_quietly(*os.environ.pop("GRAPPE_PRELOADED", "").split())
gc.freeze()  # processes share this memory until they write to it, as a search for garbage would
