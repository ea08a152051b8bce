"""Private names of Python's multiprocessing."""

from __future__ import annotations

from multiprocessing import forkserver

from grappe.private_api.name import PrivateName

SEEN = "Python 3.11"

USED = (
    PrivateName("multiprocessing.forkserver", "_forkserver", SEEN),
    PrivateName("multiprocessing.forkserver.ForkServer", "_forkserver_pid", SEEN),
)


def forkserver_is_running() -> bool:
    """Returns whether this process has started the fork server; ensure_running() starts it."""
    return getattr(forkserver._forkserver, "_forkserver_pid", None) is not None  # type: ignore[attr-defined]
