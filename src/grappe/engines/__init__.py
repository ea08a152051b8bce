"""Finds engines, which execute optimizer steps, by file name: to add one, add a file, or an extension's engine.py."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
from collections.abc import Iterator
from typing import TYPE_CHECKING

from grappe import extensions
from grappe.errors import PlanError, nearest
from grappe.plan import Plan

if TYPE_CHECKING:
    from grappe.engines.base import Engine, EngineSetup

NOT_ENGINES = frozenset({"base", "native_pipeline", "shared"})


def names() -> list[str]:
    """Lists the engines' names."""
    shipped = {module.name for module in pkgutil.iter_modules(__path__)} - NOT_ENGINES
    return sorted((*shipped, *extensions.having("engine")))


def check_name(name: str) -> None:
    """Raises PlanError if there is no such engine; imports no engine."""
    if name not in names():
        raise PlanError(f"there is no engine '{name}': {nearest(name, names())}")


def find(name: str) -> type[Engine]:
    """Finds the engine class of file `engines/NAME.py` or `contrib/NAME/engine.py`.

    Raises:
        PlanError: there is no such engine, or a package that it needs is not installed.
    """
    check_name(name)
    if name in extensions.having("engine"):
        return extensions.module(name, "engine").ENGINE
    return importlib.import_module(f"{__name__}.{name}").ENGINE


def check(plan: Plan) -> type[Engine]:
    """Returns the plan's engine if the engine supports every key of the plan. Pure: starts no process.

    Raises:
        PlanError: a key is not supported; the message names engines that support it.
    """
    engine = find(plan.engine)
    for key in sorted(plan.changed_keys() - {"engine"} - engine.supported_keys):
        able = [name for name in names() if key in find(name).supported_keys]
        others = f"engines that have: {', '.join(able)}" if able else "no engine has yet"
        raise PlanError(f"engine={plan.engine} has no {key}: {others}")
    reason = engine.unsupported_reason(plan)
    if reason:
        raise PlanError(reason)
    return engine


@contextlib.contextmanager
def running(setup: EngineSetup) -> Iterator[Engine]:
    """Context with the engine of `setup`; closes it, but not after an error. Raises like `check`. Collective."""
    if setup.plan.memory != "none":
        raise PlanError(f"memory={setup.plan.memory} chooses what a training recomputes: leave it out here")
    engine = check(setup.plan)(setup)
    yield engine
    engine.close()


def supported(plan: Plan) -> bool:
    """Returns whether the plan's engine supports the key."""
    try:
        check(plan)
    except PlanError:
        return False
    return True
