"""Says when /dev/shm, through which data workers hand over their samples, is full."""

from __future__ import annotations

import errno
import shutil

from grappe.errors import PlanError

FOLDER = "/dev/shm"
WORDS = ("No space left on device (28)", "out of shared memory")
"""In what torch raises: in a worker that allocates, and in the process whose worker was ended by SIGBUS."""


def explained(error: BaseException) -> BaseException:
    """Returns an error that says what to do, if `error` is that of a full /dev/shm; else `error` itself."""
    full = isinstance(error, OSError) and error.errno == errno.ENOSPC
    if not full and not any(word in str(error) for word in WORDS):
        return error
    return PlanError(
        f"{FOLDER} is full, through which data workers hand over their samples: take workers=0, or loading=threads, or "
        "fewer workers, or give the container more (docker --shm-size=1g, --ipc=host)"
    )


def is_half_free() -> bool:
    """Returns whether twice as many data workers would find room there, as far as can be known."""
    try:
        room = shutil.disk_usage(FOLDER)
    except OSError:
        return True
    return room.free >= room.total / 2
