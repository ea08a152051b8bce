"""Ends the server that processes are forked from with its command: the first module that the server imports.

The server would notice by itself, but not while it imports torch, nor soon when its own end takes long.
"""

from __future__ import annotations

from grappe.launch.orphan import end_with_writer
from grappe.private_api.multiprocessing import alive_pipe_of_this_server

if (_pipe := alive_pipe_of_this_server()) is not None:  # None: imported by another process
    end_with_writer(_pipe)
