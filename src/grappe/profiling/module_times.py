"""Module times: seconds of each module's own forward, its children's left out, by hooks that cost a microsecond."""

from __future__ import annotations

import statistics
from collections import defaultdict
from typing import Any

from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import FORWARD

OUTSIDE = 0
"""Stands for what no module runs: the loss, say."""


class ModuleTimes:
    """Hooks on every module of this process, from `start` to `stop`.

    A trace of operators makes each take microseconds longer; these seconds are of steps that nothing traced.
    """

    def __init__(self, chronometer: Chronometer) -> None:
        self._chronometer = chronometer
        self._stack: list[int] = []
        self._mark = 0.0
        """The step's seconds of forward when a module was last entered or left: waits for processes are not in them."""
        self._step = defaultdict[int, float](float)
        self._steps: list[dict[int, float]] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """Registers the hooks."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks, self._stack = [], []

    def end_step(self) -> None:
        """Ends a step."""
        self._steps.append(self._step)
        self._step = defaultdict(float)

    @property
    def current(self) -> int | None:
        """Returns the number of the module that runs in forward, or OUTSIDE; None: it is no forward."""
        if self._chronometer.phase != FORWARD:
            return None
        return self._stack[-1] if self._stack else OUTSIDE

    def seconds(self, forward: float) -> dict[int | None, float]:
        """Returns the median seconds of a step by module.

        Args:
            forward: seconds of a step's whole forward; what modules do not take of them is OUTSIDE's.
        """
        found = {
            module: statistics.median(step.get(module, 0.0) for step in self._steps)
            for module in set().union(*self._steps)
        }
        return {**found, OUTSIDE: max(0.0, forward - sum(found.values()))}

    def _enter(self, module: Any, inputs: Any) -> None:
        self._charge()
        self._stack.append(id(module))

    def _leave(self, module: Any, inputs: Any, output: Any) -> None:
        self._charge()
        if self._stack:
            self._stack.pop()

    def _charge(self) -> None:
        now = self._chronometer.so_far(FORWARD)
        if self._stack and now > self._mark:  # not in backward, nor in an evaluation
            self._step[self._stack[-1]] += now - self._mark
        self._mark = now
