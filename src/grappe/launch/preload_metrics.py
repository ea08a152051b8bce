"""Preload torchmetrics, in a server whose processes evaluate: its import takes a second."""

from __future__ import annotations

import gc

from grappe.launch.imports import import_quietly

import_quietly("torchmetrics")
gc.freeze()
