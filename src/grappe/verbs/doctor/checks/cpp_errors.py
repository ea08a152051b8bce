"""Check of errors in C++: they become Python exceptions with a traceback, or else end the process (c10::Error)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from grappe.launch.fork import exit_code_in_fork
from grappe.verbs.doctor.checks import Finding, Machine, error


def check(machine: Machine) -> Iterator[Finding]:
    """Provokes an error in a forked process: a convolution with the wrong number of channels."""
    if machine.process.rank:
        return
    import torch

    layer, wrong = torch.nn.Conv2d(1, 4, 3), torch.zeros(2, 10, 8, 8)

    def provoke() -> None:
        with contextlib.suppress(RuntimeError):
            layer(wrong)

    yield from of_exit_code(exit_code_in_fork(provoke))


def of_exit_code(code: int) -> Iterator[Finding]:
    """Returns findings for the exit code of the forked process."""
    if code < 0:
        yield error(
            "an error in torch's C++ ends the process (terminate called after throwing 'c10::Error')",
            why="Python's traceback is lost: nothing says which line was wrong",
            do="install another torch: 1.10 is known for it",
        )
