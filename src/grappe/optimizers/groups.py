"""Parameter groups by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from grappe.errors import TaskError, nearest


def by_name(
    named_parameters: Iterable[tuple[str, nn.Parameter]], rules: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Sorts parameters into groups for any optimizer: one for each rule, and first one for all that no rule matches.

    Args:
        rules: by pattern of names (`*.bias`, `blocks.0.*`), the options of the group. The first that matches decides.

    Raises:
        TaskError: a pattern matches no parameter that is trained.
    """
    rest: dict[str, Any] = {"params": []}
    groups = {pattern: {"params": [], **options} for pattern, options in rules.items()}
    matched, names = set(), []
    for name, parameter in named_parameters:
        patterns = [pattern for pattern in rules if fnmatchcase(name, pattern)]
        matched.update(patterns)
        names.append(name)
        (groups[patterns[0]] if patterns else rest)["params"].append((name, parameter))
    for pattern in rules:
        if pattern not in matched:
            raise TaskError(f"by_name: no trained parameter is called {pattern!r}: {nearest(pattern, names)}")
    return [group for group in (rest, *groups.values()) if group["params"]]
