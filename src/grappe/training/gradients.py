"""GradientsHook: calls watchers (callbacks) when a step's gradients are about to be used."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch

from grappe.profiling.chronometer import Chronometer
from grappe.training.watchers.watcher_list import WatcherList


class GradientsHook:
    """Context in which the engine's optimizer calls `gradients_ready` before each step.

    Without a watcher that overrides `gradients_ready` nothing is hooked, and steps have no cost.

    Args:
        steps_done: returns the number of steps taken.
        chronometer: has the engine's optimizer, and this process's parameters.
    """

    def __init__(
        self, watchers: WatcherList, steps_done: Callable[[], int], chronometer: Chronometer
    ) -> None:
        self._watchers, self._steps_done, self._chronometer = watchers, steps_done, chronometer
        self._hook: Any = None

    def __enter__(self) -> None:
        if self._watchers.wants_gradients:
            optimizer = self._chronometer.optimizer
            assert optimizer is not None, "an engine announces its optimizer when it is made"
            self._hook = optimizer.register_step_pre_hook(self._before_step)

    def __exit__(self, *_: object) -> None:
        if self._hook is not None:
            self._hook.remove()

    def _before_step(self, optimizer: object, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Calls the watchers now, or after the closure that computes gradients within the step (Lightning's)."""
        bound = inspect.signature(torch.optim.Optimizer.step).bind(*arguments, **options)
        closure = bound.arguments.get("closure")
        if closure is None:
            self._call()
            return None
        bound.arguments["closure"] = self._with_call_after(closure)
        return bound.args, bound.kwargs

    def _with_call_after(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        def computed() -> Any:
            value = closure()
            self._call()
            return value

        return computed

    def _call(self) -> None:
        self._watchers.gradients_ready(self._steps_done() + 1, self._chronometer.parameters)
