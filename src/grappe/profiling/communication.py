"""Counts torch.distributed's blocking waits as communication."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import COMMUNICATION, WATCHING


@contextlib.contextmanager
def waits_counted(chronometer: Chronometer) -> Iterator[None]:
    """Context in which a wait for other processes inside a step is `chronometer`'s COMMUNICATION.

    torch has no hook for waits, so the two functions in which Python code waits are replaced meanwhile: Work.wait, of
    collectives, sends and receives, and wait_tensor, of the functional collectives (FSDP2, tensor parallelism).
    """
    import torch.distributed as dist

    from grappe.private_api.torch import functional_collectives

    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    functional: Any = functional_collectives()
    wait, wait_tensor = dist.Work.wait, functional.wait_tensor
    dist.Work.wait = _counted(wait, chronometer)  # type: ignore[method-assign]
    functional.wait_tensor = _counted(wait_tensor, chronometer)
    try:
        yield
    finally:
        dist.Work.wait = wait  # type: ignore[method-assign]
        functional.wait_tensor = wait_tensor


def _counted(wait: Callable[..., Any], chronometer: Chronometer) -> Callable[..., Any]:
    def counted(*arguments: Any, **keywords: Any) -> Any:
        before = chronometer.phase
        if before > WATCHING or before == COMMUNICATION:
            return wait(*arguments, **keywords)
        chronometer.switch(COMMUNICATION)
        try:
            return wait(*arguments, **keywords)
        finally:
            chronometer.switch(before)

    return counted
