"""A process or thread that the system does not start is told from other errors."""

from __future__ import annotations

import errno
import os

import pytest

from grappe.errors.refused_process import refused_process


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)),
        RuntimeError("can't start new thread"),
        RuntimeError("Resource temporarily unavailable"),
    ],
)
def test_it_is_said_in_one_line(error: Exception) -> None:
    said = refused_process(error)
    assert said is not None and "ulimit -u" in said and "\n" not in said


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EAGAIN, os.strerror(errno.EAGAIN), "a file"),
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        RuntimeError("shapes differ"),
        ValueError("can't start new thread"),
    ],
)
def test_other_errors_are_none(error: Exception) -> None:
    assert refused_process(error) is None
