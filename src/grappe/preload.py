"""What the server that processes are forked from has imported before, so that they start at once."""

from __future__ import annotations

import torchmetrics  # noqa: F401

import grappe.engines.native
import grappe.verbs.worker  # noqa: F401
