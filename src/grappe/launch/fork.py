"""Calls a function in a forked process, whose memory is freed when it ends."""

from __future__ import annotations

import gc
import os
import sys
import traceback
from collections.abc import Callable

from grappe import errors
from grappe.errors import GrappeError, OutOfMemory, TaskError, user_code
from grappe.errors.refused_memory import is_out_of_memory
from grappe.launch.limits import Limits
from grappe.launch.orphan import end_with_forking_parent

DONE = "done"  # written by the child, as an exit code alone may be the task's own


def run_in_fork(work: Callable[[], str | None], limits: Limits | None = None) -> str:
    """Calls `work` in a forked process, under `limits`, and waits for the process.

    Returns:
        What `work` returned; "" for None.

    Raises:
        GrappeError: `work` raised an error, or the process died.
        LimitReached: the process took more than it may.
    """
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    # The child must not collect its parent's garbage: a process group of an earlier training, say, whose end waits
    # for threads that are not there.
    gc.freeze()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        gc.unfreeze()
    else:
        end_with_forking_parent(parent)
        os.close(reader)
        message = _message_of(work if limits is None else lambda: _limited(work, limits))
        os.write(writer, message.encode()[:60_000])
        os._exit(0 if message.startswith(DONE) else 1)
    os.close(writer)
    with os.fdopen(reader) as stream:
        killed = limits is not None and limits.watch(pid, reader)
        message = stream.read()
    exit_code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    name, _, text = message.partition("\n")
    if name == DONE:
        return text
    if not message and limits is not None and (reached := limits.reached(exit_code, killed)) is not None:
        raise reached
    if not text:
        text = (
            "the process that makes the model was killed, or ended itself: "
            "is the model larger than this machine's memory?"
        )
    raise getattr(errors, name, TaskError)(text)


def _limited(work: Callable[[], str | None], limits: Limits) -> str | None:
    limits.apply()
    return work()


def exit_code_in_fork(work: Callable[[], None]) -> int:
    """Calls `work` in a silent forked process; returns 0, 1 where `work` raised, or -N where signal N killed it."""
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        end_with_forking_parent(parent)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def _message_of(work: Callable[[], str | None]) -> str:
    """Calls `work`; returns DONE and what `work` returned, or the error's class and message."""
    try:
        message = f"{DONE}\n{work() or ''}"
    except GrappeError as error:
        message = f"{type(error).__name__}\n{error}"
    except BaseException as error:
        traceback.print_exc()
        sentence = user_code.sentence(error)
        if is_out_of_memory(error):
            made = OutOfMemory(f"the process that makes the model ran out of memory: {sentence}")
        else:
            made = TaskError(f"the model cannot be made: {sentence}")
        message = f"{type(made).__name__}\n{made}"
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
    return message
