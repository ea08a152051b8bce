"""WatcherList: calls all watchers (callbacks) of a process, in their order."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from grappe.errors import GrappeError, TaskError
from grappe.errors.user_code import is_users, sentence
from grappe.profiling.chronometer import Chronometer
from grappe.training.watchers.base import Record, Watcher


class WatcherList:
    """A Watcher that calls several; an exception in a user's own watcher becomes one message that names its line."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self.prompt = any(watcher.prompt for watcher in watchers)
        """Whether one of them has to be called after each step."""
        self._want_gradients = [
            watcher for watcher in watchers if type(watcher).gradients_ready is not Watcher.gradients_ready
        ]

    @property
    def wants_gradients(self) -> bool:
        """Returns whether a watcher overrides `gradients_ready`."""
        return bool(self._want_gradients)

    def stepped(self, records: Sequence[Record]) -> None:
        """Calls `stepped` of every watcher, once for each step."""
        for watcher in self._watchers:
            for record in records:
                _call(watcher, "stepped", record)

    def gradients_ready(self, step: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """Calls `gradients_ready` of every watcher that overrides it."""
        for watcher in self._want_gradients:
            _call(watcher, "gradients_ready", step, parameters)

    def call(
        self, method: Literal["started", "evaluated", "saving", "failed_to_save", "ended"], *arguments: Any
    ) -> None:
        """Calls another method of every watcher."""
        for watcher in self._watchers:
            _call(watcher, method, *arguments)


def _call(watcher: Watcher, method: str, *arguments: Any) -> None:
    try:
        getattr(watcher, method)(*arguments)
    except GrappeError:
        raise
    except Exception as error:
        if not is_users(error):
            raise
        raise TaskError(f"{type(watcher).__name__}.{method}() failed: {sentence(error)}") from error


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

        def computed() -> Any:
            value = closure()
            self._call()
            return value

        bound.arguments["closure"] = computed
        return bound.args, bound.kwargs

    def _call(self) -> None:
        self._watchers.gradients_ready(self._steps_done() + 1, self._chronometer.parameters)
