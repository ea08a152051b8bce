"""Errors in C++: whether they arrive in Python as exceptions with a traceback, or end the process (c10::Error)."""

from __future__ import annotations

import os
from collections.abc import Iterator

from grappe.doctor.finding import Finding, Patient, error


def check(patient: Patient) -> Iterator[Finding]:
    """Provokes the page's own example in a process of its own: a convolution with the wrong number of channels."""
    if patient.place.rank:
        return
    import torch

    layer, wrong = torch.nn.Conv2d(1, 4, 3), torch.zeros(2, 10, 8, 8)
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        try:
            layer(wrong)
        except RuntimeError:
            os._exit(0)
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    yield from of_status(os.waitstatus_to_exitcode(status))


def of_status(code: int) -> Iterator[Finding]:
    """Findings for how that process ended."""
    if code < 0:
        yield error(
            "an error in torch's C++ ends the process (terminate called after throwing 'c10::Error')",
            "Python's traceback is lost: nothing says which line was wrong",
            "install another torch: 1.10 is known for it",
        )
