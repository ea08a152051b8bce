"""Ends the server that processes are forked from with its command: the first module that the server imports.

The server would notice by itself, but not while it imports torch, nor soon when its own end takes long.
"""

from __future__ import annotations

from grappe.launch.orphan import end_with_starter

end_with_starter()
