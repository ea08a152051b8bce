"""Detection of the last gradient in backward: after the last gradient a process only waits for other processes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class LastGradient:
    """Finds the parameter whose gradient comes last, in the first steps; then calls `arrived` with that gradient.

    DistributedDataParallel waits for its all-reduces in C++, invisible to Python code. The time after the last
    gradient is this wait.
    """

    def __init__(self, arrived: Callable[[Any], None]) -> None:
        self._arrived = arrived
        self._handles: list[Any] = []
        self._last: Any = None

    def look_for(self, parameters: Sequence[Any]) -> None:
        """Hooks all parameters, to find the one whose gradient comes last."""
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self._came)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def decide(self) -> None:
        """Keeps one hook: on the parameter whose gradient came last."""
        if not self._handles:
            return
        self.close()
        if self._last is not None:
            self._handles = [self._last.register_post_accumulate_grad_hook(self._arrived)]

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _came(self, parameter: Any) -> None:
        self._last = parameter
