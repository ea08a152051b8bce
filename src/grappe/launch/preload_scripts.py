"""Preload what a script for one process needs under `grappe launch`; without torch._dynamo, a second of imports."""

from __future__ import annotations

import gc

from grappe.launch.imports import import_quietly

import_quietly("grappe.verbs.launch.recorded")
gc.freeze()
