"""What the server that processes are forked from has imported before, so that they start at once."""

from __future__ import annotations

import torch._dynamo  # noqa: F401 (the first optimizer that is made imports it, and all that FSDP2 needs)

import grappe.engines.native
import grappe.verbs.worker  # noqa: F401
