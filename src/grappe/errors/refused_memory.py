"""Refused memory: recognises it in the errors of Python, of torch, and of C++ libraries."""

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


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether `error` is an out-of-memory error, of a CPU or a GPU."""
    import torch

    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    known = isinstance(error, RuntimeError | OSError) and not isinstance(error, GrappeError)
    # Without a limit of the address space, or of data, a thread's stack always has room: then it is threads that are
    # limited.
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    limited = any(limit != resource.RLIM_INFINITY for limit in limits)
    return known and any(one in str(error) for one in (*WORDS, *(WHERE_LIMITED if limited else ())))
