"""The processes of a hand-written loop or of a launched script: their world, their streams and their end."""

from __future__ import annotations

import atexit
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import PlanError
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import end_as_programs_do
from grappe.launch.terminal import user_stream, write
from grappe.launch.world import World, join
from grappe.plan import Plan
from grappe.private_api.multiprocessing import run_exit_functions

if TYPE_CHECKING:
    from grappe.rows.context import RowsContext

PLAN = "GRAPPE_PLAN"
"""Variable with the plan that `grappe launch` was given."""
EXIT_SECONDS = 0.05  # ten times Python's switch interval


class Joined:
    """The world of this process's loops, which share it."""

    world: World | None = None
    plan: Plan | None = None
    process: ProcessRank | None = None
    folder = Path()
    context: RowsContext | None = None
    """Context of the loops' rows, which stay readable after a loop ends; None before the first loop."""
    until_left = contextlib.ExitStack()
    """Contexts that are left when no rows can be read any more."""


def leave() -> None:
    """Ends all communication of the script's loops, before Python takes itself apart.

    A thread of gloo's frees the tensors of a collective a little after its end, for which it needs the
    interpreter's lock; without a chance to take it the thread ends this process by SIGABRT (once in 15 times).
    """
    if Joined.world is not None:
        Joined.until_left.close()
        Joined.world.leave()
        Joined.world = Joined.context = None
        time.sleep(EXIT_SECONDS)


@contextlib.contextmanager
def as_a_program(process: ProcessRank, folder: Path) -> Iterator[None]:
    """Context of a user's program in one of a launch's processes: its terminal, its signals, its exit functions.

    Process 0 has the terminal.
    """
    Joined.process, Joined.folder = process, folder
    stream = user_stream(process)
    if stream is not None:
        write("", stream, end="")  # clears the line shown while processes start
        os.dup2(stream.fileno(), 1)
        os.dup2(stream.errors, 2)
    end_as_programs_do()
    try:
        yield
    finally:
        run_exit_functions()  # a forked process would leave them out, and one of a launcher's


def call_function(request: tuple[Callable[..., Any], Sequence[Any], str], process: ProcessRank, folder: Path) -> Any:
    """Calls a function with its arguments under a plan, as one of the launch's processes."""
    function, arguments, os.environ[PLAN] = request
    with as_a_program(process, folder):
        return function(*arguments)


def join_world(plan: Plan, process: ProcessRank, folder: Path) -> World:
    """Joins the other processes, once for all loops of a script. Collective.

    Raises:
        PlanError: another loop of this script has another plan.
    """
    if Joined.world is None:
        atexit.register(leave)  # after the loops' own ends, which are registered later
        Joined.world, Joined.plan = join(plan, process, folder if Joined.process is None else Joined.folder), plan
    elif plan != Joined.plan:
        raise PlanError(f"a script's loops share one plan: this one has {plan}, the one before {Joined.plan}")
    return Joined.world
