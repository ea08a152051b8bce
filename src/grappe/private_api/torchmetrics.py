"""Private names of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grappe.private_api import private_names

SEEN = "1.4 to 1.9"

NAMES = "_computed _defaults _forward_cache _reductions _to_sync _update_count"
USED = private_names(SEEN, {"torchmetrics.Metric": NAMES})


def default_states(metric: Any) -> dict[str, Any]:
    """Returns each state's value after `reset`, by name."""
    return metric._defaults


def set_default_states(metric: Any, defaults: dict[str, Any]) -> None:
    """Replaces each state's value after `reset`."""
    metric._defaults = defaults


def reductions(metric: Any) -> Mapping[str, Callable[[Any], Any] | None]:
    """Returns each state's reduction over processes, by name."""
    return metric._reductions


def never_synchronise(metric: Any) -> None:
    """Keeps `compute` from merging over processes; a metric reads `sync_on_compute` only when it is made."""
    metric.sync_on_compute = metric._to_sync = False


def states_were_set(metric: Any) -> None:
    """Marks the metric as updated, and as without a computed result."""
    metric._update_count = max(metric._update_count, 1)
    metric._computed = None


def last_batch_value(metric: Any) -> Any:
    """Returns the last call's result, which is of its batch alone; None: not called since the reset, only updated."""
    return metric._forward_cache
