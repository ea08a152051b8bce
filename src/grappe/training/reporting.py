"""Reports a training to its user: what it is at its start, and the watchers that show its course."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from grappe.launch.output import UserStream
from grappe.launch.terminal import say
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.task import Task
from grappe.training.facts import lines
from grappe.training.opening import Opened
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.training.watchers.base import RunInfo, Watcher
from grappe.training.watchers.console import Console, sample_word
from grappe.training.watchers.curves import Curves
from grappe.training.watchers.expected_end import ExpectedEnd
from grappe.training.watchers.logger import find as find_logger
from grappe.training.watchers.profile import Profile


def reporting(
    options: Options,
    terminal: UserStream | None,
    samples: Any,
    world: World,
    info: RunInfo,
    deadline: float | None,
) -> list[Watcher]:
    """Makes the watchers that report to the user: curves, console and loggers on process 0, and requested profiles.

    Args:
        samples: the training dataset.
        deadline: the end of the time limit or of the job, as time.time has it; None: there is none.
    """
    watchers = list[Watcher]()
    if world.rank == 0:
        watchers.append(Curves())
        if terminal is not None:
            every = options.evaluations_every(info.steps_per_epoch)
            end = ExpectedEnd(every, stops_early=options.patience is not None, deadline=deadline)
            watchers.append(Console(terminal, sample_word(samples), options.print_every, end=end))
        watchers += [find_logger(name)() for name in options.log]
    if world.rank in options.profile:
        watchers.append(Profile(world.rank, options.profile_steps, terminal))
    return watchers


def announce(
    terminal: UserStream, task: Task, info: RunInfo, plan: Plan, opened: Opened, world: World
) -> None:
    """Shows the task, its plan, batch and run, and what is to be noted about them."""
    slices, micro = world.data_size, plan.microbatches
    each = -(-task.batch_size // slices)
    sizes = f"batch {task.batch_size} over all processes"
    if slices > 1 or micro > 1:
        sizes += f" = {slices} x {each}" + (f", each in {micro} microbatches" if micro > 1 else "")
    say(
        f"{type(task).__name__} on {world.size} process{'es' if world.size > 1 else ''} ({world.device.type}, "
        f"{world.threads} thread{'s' if world.threads > 1 else ''} each), plan: {str(plan) or 'one process'}\n"
        f"{info.samples:,} training samples, {sizes}; run {info.folder}\n"
        + "".join(f"{note}\n" for note in (*opened.notes, *task.notes())),
        terminal,
        end="",
    )


def report(facts: Mapping[str, Any], run: Run, terminal: UserStream | None, world: World) -> None:
    """Writes the facts of this start to run.json, and shows them."""
    if world.rank == 0:
        run.describe(start=facts)
    if terminal is not None:
        say("".join(f"{line}\n" for line in lines(facts)), terminal, end="")
