"""WatcherList: calls all watchers (callbacks) of a process, in their order."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch

from grappe.errors import GrappeError, TaskError
from grappe.errors.user_code import is_users, sentence
from grappe.profiling.chronometer import Chronometer
from grappe.step.closure import gradients_first
from grappe.training.watchers.base import Record, Watcher


class WatcherList:
    """A Watcher that calls several; an exception in a user's own watcher becomes one message that names its line."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self.prompt = any(watcher.prompt for watcher in watchers)
        """Whether one of them has to be called after each step."""
        self.wanting_gradients = [
            watcher for watcher in watchers if type(watcher).gradients_ready is not Watcher.gradients_ready
        ]
        """Those that override `gradients_ready`."""

    def stepped(self, records: Sequence[Record]) -> None:
        """Calls `stepped` of every watcher, once for each step."""
        for watcher in self._watchers:
            for record in records:
                _call(watcher, "stepped", record)

    def call(
        self,
        method: Literal["started", "checked", "noted", "evaluated", "saving", "failed_to_save", "ended"],
        *arguments: Any,
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


@contextlib.contextmanager
def gradients_hooked(watchers: WatcherList, steps_done: Callable[[], int], chronometer: Chronometer) -> Iterator[None]:
    """Context in which the engine's optimizer calls `gradients_ready` before each step.

    Without a watcher that overrides `gradients_ready` nothing is hooked, and steps have no cost.

    Args:
        steps_done: returns the number of steps taken.
        chronometer: has the engine's optimizer, and this process's parameters.
    """
    if not watchers.wanting_gradients:
        yield
        return

    def call() -> None:
        for watcher in watchers.wanting_gradients:
            _call(watcher, "gradients_ready", steps_done() + 1, chronometer.parameters)

    def before_step(optimizer: torch.optim.Optimizer, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Calls the watchers now, or after the first closure, which computes gradients within the step.

        SAM has the gradients before its step: its closure's are those of other weights.
        """
        bound = inspect.signature(torch.optim.Optimizer.step).bind(*arguments, **options)
        closure = bound.arguments.get("closure")
        if closure is None or gradients_first(optimizer):
            call()
            return None

        calls = 0

        def computed() -> Any:
            nonlocal calls
            value = closure()
            calls += 1
            if calls == 1:  # L-BFGS calls it several times a step
                call()
            return value

        bound.arguments["closure"] = computed
        return bound.args, bound.kwargs

    assert chronometer.optimizer is not None, "an engine announces its optimizer when it is made"
    hook = chronometer.optimizer.register_step_pre_hook(before_step)
    try:
        yield
    finally:
        hook.remove()
