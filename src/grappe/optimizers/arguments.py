"""Checks the numbers that optimizers are made with."""

from __future__ import annotations

from grappe.errors import TaskError


def check(name: str, **numbers: float) -> None:
    """Raises TaskError where a number is not at least 0."""
    for key, value in numbers.items():
        if not value >= 0:
            raise TaskError(f"{name}({key}={value}): it must be at least 0")


def check_below_one(name: str, **numbers: float) -> None:
    """Raises TaskError where a number is not in [0, 1)."""
    for key, value in numbers.items():
        if not 0 <= value < 1:
            raise TaskError(f"{name}({key}={value}): it must be at least 0 and below 1")
