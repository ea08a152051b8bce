"""Private names of torchmetrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from grappe.private_api.name import PrivateName

SEEN = "1.4 to 1.9"

USED = tuple(
    PrivateName("torchmetrics.Metric", name, SEEN)
    for name in ("_computed", "_defaults", "_forward_cache", "_reductions", "_to_sync", "_update_count")
)


def default_states(metric: Any) -> dict[str, Any]:
    """What `reset` gives each state, by name."""
    return metric._defaults


def set_default_states(metric: Any, defaults: dict[str, Any]) -> None:
    """Replaces what `reset` gives each state."""
    metric._defaults = defaults


def reductions(metric: Any) -> Mapping[str, Callable[[Any], Any] | None]:
    """How each state is merged over processes, by name."""
    return metric._reductions


def never_synchronise(metric: Any) -> None:
    """Keeps `compute` from merging over processes; the metric looks at `sync_on_compute` only when it is made."""
    metric.sync_on_compute = metric._to_sync = False


def states_were_set(metric: Any) -> None:
    """Says that the states are not those of a metric that was never updated, and that no result is known."""
    metric._update_count = max(metric._update_count, 1)
    metric._computed = None


def last_batch_value(metric: Any) -> Any:
    """What the last call returned, of its batch alone; None: not called since it was reset, only updated."""
    return metric._forward_cache
