"""Refused memory: recognises it in errors of Python, torch and C++ libraries, and lists the limits that are set."""

from __future__ import annotations

import resource

from grappe.errors import GrappeError

WORDS = (
    "can't allocate memory",
    "not enough memory",
    "out of memory",
    "Cannot allocate memory",
    "bad_alloc",
)
WHERE_LIMITED = ("can't start new thread", "could not create a primitive")
"""Python's words and oneDNN's, for which there are other reasons where memory is not limited."""
LIMITS = {resource.RLIMIT_DATA: "`ulimit -d`", resource.RLIMIT_AS: "`ulimit -v`"}
"""Limits of a process's memory, and the shell's words that set them."""


def limits_set() -> list[str]:
    """Returns the shell's words for the limits that this process's memory has."""
    return [words for kind, words in LIMITS.items() if resource.getrlimit(kind)[0] != resource.RLIM_INFINITY]


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` is an out-of-memory error, of a CPU or a GPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    is_candidate = isinstance(error, RuntimeError | OSError) and not isinstance(error, GrappeError)
    # Without a limit of the address space, or of data, a thread's stack always has room: then it is threads that are
    # limited.
    words = (*WORDS, *WHERE_LIMITED) if limits_set() else WORDS
    return is_candidate and any(word in str(error) for word in words)
