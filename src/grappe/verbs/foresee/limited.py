"""Limited: traces a model in a forked process that may take neither long nor much memory."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

from grappe.errors import TaskError
from grappe.private_api.multiprocessing import forget_forkserver

SECONDS = 60  # for one call
COMPUTING_SECONDS = 600  # of all threads
MEMORY_BYTES = 4_000_000_000


def in_limited_process(work: Callable[[], str]) -> str:
    """Calls `work` in a process that may not take long, and whose output is not the command's; returns its text.

    Raises:
        TaskError: the process took longer, or more memory; and what `work` raises.
    """
    from grappe.foresight.search import too_slow
    from grappe.launch.fork import LimitReached, Limits, run_in_fork

    def too_long(*_: object) -> None:
        raise too_slow(SECONDS)

    def limited() -> str:
        forget_forkserver()
        os.dup2(2, 1)  # what the task prints is no part of a script
        sys.stdout = sys.stderr
        signal.signal(signal.SIGALRM, too_long)
        signal.alarm(SECONDS)
        return work()

    limits = Limits(memory=MEMORY_BYTES, mapped=1 << 40, seconds=COMPUTING_SECONDS)
    try:
        return run_in_fork(limited, limits)
    except LimitReached as error:
        raise TaskError(
            f"tracing the model takes more than {MEMORY_BYTES / 1e9:g} GB of memory here, which grappe foresee may take"
        ) from error
