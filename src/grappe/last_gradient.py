"""Last gradient: when a backward has computed all that it will, and only waits for other processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from grappe.phases import BACKWARD, COMMUNICATION

if TYPE_CHECKING:
    from grappe.chronometer import Chronometer


class LastGradient:
    """Which parameter's gradient comes last; from then on its arrival ends the backward's computing.

    Data-parallel engines then wait for sums that did not overlap with it.
    """

    def __init__(self, chronometer: Chronometer) -> None:
        self._chronometer = chronometer
        self._handles: list[Any] = []
        self._last: Any = None

    def look_for(self, parameters: Sequence[Any]) -> None:
        """Watches all of them for the first steps."""
        self._handles += [
            parameter.register_post_accumulate_grad_hook(self._came)
            for parameter in parameters
            if parameter.requires_grad
        ]

    def step_is_over(self, decided: bool) -> None:
        """Keeps one hook, on what came last, once that is `decided`."""
        if decided and self._handles:
            self.close()
            if self._last is not None:
                self._handles = [self._last.register_post_accumulate_grad_hook(self._all_came)]

    def _came(self, parameter: Any) -> None:
        self._last = parameter

    def _all_came(self, parameter: Any) -> None:
        if self._chronometer.phase == BACKWARD:
            self._chronometer.switch(COMMUNICATION)

    def close(self) -> None:
        """Takes the hooks back."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
