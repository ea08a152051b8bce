"""Preload torchmetrics, in a server whose processes evaluate: its import takes a second."""

from __future__ import annotations

from grappe.launch.preload import import_quietly

import_quietly("torchmetrics")
