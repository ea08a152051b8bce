"""Preload what a script for one process needs under `grappe launch`; without torch._dynamo, a second of imports."""

from __future__ import annotations

import gc
import os

from grappe.launch.imports import import_quietly

# Also what local.LIBRARIES names: modules that the script imports.
import_quietly("grappe.verbs.launch.recorded", *os.environ.pop("GRAPPE_LIBRARIES", "").split())
gc.freeze()
