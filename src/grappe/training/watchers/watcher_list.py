"""WatcherList: calls all watchers (callbacks) of a process, in their order."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from grappe.errors import GrappeError, TaskError
from grappe.errors.user_code import is_users, sentence
from grappe.step.scores import Scores
from grappe.training.watchers.base import Outcome, Record, RunInfo, Watcher


class WatcherList:
    """Has the methods of a Watcher; an exception in a user's own watcher becomes one message that names its line."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self._watchers = watchers
        self.prompt = any(watcher.prompt for watcher in watchers)
        """Whether one of them has to be called after each step."""
        self._want_gradients = [
            watcher for watcher in watchers if type(watcher).gradients_ready is not Watcher.gradients_ready
        ]

    @property
    def wants_gradients(self) -> bool:
        """Whether a watcher overrides `gradients_ready`."""
        return bool(self._want_gradients)

    def started(self, info: RunInfo) -> None:
        """The first step is about to be taken."""
        for watcher in self._watchers:
            _call(watcher, "started", info)

    def stepped(self, records: Sequence[Record]) -> None:
        """Steps are over; every watcher is called once for each of them."""
        for watcher in self._watchers:
            for record in records:
                _call(watcher, "stepped", record)

    def gradients_ready(self, step: int, parameters: Sequence[tuple[str, Tensor]]) -> None:
        """The gradients of `step` are there."""
        for watcher in self._want_gradients:
            _call(watcher, "gradients_ready", step, parameters)

    def evaluated(self, step: int, scores: Scores) -> None:
        """An evaluation after `step` is over."""
        for watcher in self._watchers:
            _call(watcher, "evaluated", step, scores)

    def saving(self, step: int) -> None:
        """A checkpoint of `step` is about to be written."""
        for watcher in self._watchers:
            _call(watcher, "saving", step)

    def failed_to_save(self, problem: str) -> None:
        """A checkpoint could not be written; the training goes on."""
        for watcher in self._watchers:
            _call(watcher, "failed_to_save", problem)

    def ended(self, outcome: Outcome | None) -> None:
        """The training is over; None: by an error."""
        for watcher in self._watchers:
            _call(watcher, "ended", outcome)


def _call(watcher: Watcher, method: str, *arguments: Any) -> None:
    try:
        getattr(watcher, method)(*arguments)
    except GrappeError:
        raise
    except Exception as error:
        if not is_users(error):
            raise
        raise TaskError(f"{type(watcher).__name__}.{method}() failed: {sentence(error)}") from error
