"""Ends the server that processes are forked from with its command: the first module that the server imports.

The server would notice on its own, but not while it imports torch, nor soon when its own end takes long.
"""

from __future__ import annotations

from grappe.launch.fork import end_with_starter

end_with_starter()

import sys  # noqa: E402 - nothing comes before
from types import TracebackType  # noqa: E402

from grappe.errors.causes import refused_process  # noqa: E402
from grappe.launch.terminal import complain  # noqa: E402


def tell(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Says what ends the server: in one line where the system refused a process."""
    if (sentence := refused_process(error)) is not None:
        complain(f"grappe: {sentence}")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = tell
