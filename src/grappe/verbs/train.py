"""grappe train: trains a task under a plan, or goes on with a run."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from grappe.errors import RunError, UsageError
from grappe.plan import Plan, as_plan
from grappe.run import Run, new_folder
from grappe.task import Task
from grappe.training import Options, Training
from grappe.verbs.session import TaskReference, blaming, field_texts, same_task, start, user_call
from grappe.world import Place, World

if TYPE_CHECKING:
    from grappe.outlet import Outlet

DATA_FOLDER = "GRAPPE_DATA"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """What the processes of a training are told."""

    task: TaskReference
    plan: Plan
    run: Path | None
    base: Path
    data: Path
    weights: Path | None
    options: Options
    quiet: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    """How a training ended."""

    run: Path
    status: str
    step: int


def train(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    folder: Path | str | None = None,
    *,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    weights: Path | str | None = None,
    options: Options | None = None,
    base: Path | str = "runs",
) -> Run:
    """Trains `task` under `plan`, or goes on with the run in `folder`.

    Args:
        task: a task, its class, or its name as on the command line.
        plan: a Plan or its text, "replicate=2"; "" is one process.
        folder: the run's folder; None makes a new one under `base`.
        data: where datasets are; None: the environment's GRAPPE_DATA, or ./data.
        fields: texts for the task's fields, when it is given by name.
        weights: a run or a safetensors file to start from.

    Raises:
        GrappeError: something is wrong with what was asked; the message says what to do.
    """
    return Run(run_training(request(task, plan, folder, data, fields, weights, options, base)).run)


def request(
    task: Task | type[Task] | str,
    plan: Plan | str = "",
    folder: Path | str | None = None,
    data: Path | str | None = None,
    fields: Mapping[str, str] | None = None,
    weights: Path | str | None = None,
    options: Options | None = None,
    base: Path | str = "runs",
) -> Request:
    """A Request with every default filled in."""
    return Request(
        task=TaskReference.of(task, fields),
        plan=as_plan(plan),
        run=Path(folder) if folder else None,
        base=Path(base),
        data=Path(data or os.environ.get(DATA_FOLDER, "data")),
        weights=Path(weights) if weights else None,
        options=options or Options(),
    )


def run_training(asked: Request) -> Result:
    """Trains on the plan's processes, started here or by torchrun or srun."""
    if asked.run is not None and Run.is_run(asked.run) and Run(asked.run).finished:
        finished = Run(asked.run)
        if not asked.options.steps:
            return Result(
                run=finished.folder, status="finished before", step=finished.description.get("step", 0)
            )
    return start("grappe.verbs.train:worker", asked, asked.plan, saves=True)


def worker(asked: Request, place: Place, meet: Path) -> Result:
    """One process of a training. Collective."""
    began = time.perf_counter()
    from grappe import engines, world
    from grappe.child import early_log, redirect
    from grappe.interrupt import Interrupt
    from grappe.outlet import outlet

    terminal = outlet(place)
    here = world.join(asked.plan, place, meet)
    interrupt = Interrupt()
    interrupt.install()  # not while the others are waited for: there is nothing to save yet
    engine = engines.check(asked.plan)
    task = asked.task.resolve()
    run = Run(_on_process_0(here, lambda: _open_run(asked, task, here)))
    if place.launcher == "grappe":
        redirect(run.folder / "logs" / f"rank-{place.rank}.log", place, early_log(meet, place))
    with blaming(task):
        training = _assemble(asked, task, here, run, engine, interrupt, terminal, began)
        outcome = training.run_to_end()
    if place.rank == 0:
        run.describe(step=outcome.step, status=outcome.status)
        if outcome.status in ("finished", "stopped"):
            run.finish()
    training.engine.close()
    here.barrier()
    here.leave()
    return Result(run=run.folder, status=outcome.status, step=outcome.step)


def _assemble(
    asked: Request,
    task: Task,
    here: World,
    run: Run,
    engine: Any,
    interrupt: Any,
    terminal: Outlet | None,
    began: float,
) -> Training:
    from grappe.checkpoint.initial import initial_weights
    from grappe.data import feed
    from grappe.engines.base import Setting
    from grappe.watchers.console import Console
    from grappe.watchers.curves import Curves

    train_data = user_call(task, "data", "train", asked.data)
    held_out = user_call(task, "data", "validation", asked.data)
    for split, dataset in (("train", train_data), ("validation", held_out)):
        feed.check(dataset, split, task)
    training_feed = feed.training_feed(task, train_data, asked.plan, here)
    validation = feed.evaluation_feed(task, held_out, asked.plan, here)
    total = task.epochs * training_feed.ledger.steps_per_epoch
    if terminal is not None:
        _announce(terminal, asked, task, here, run, len(train_data))
    found = run.latest()
    weights = initial_weights(task, run.checkpoints, found, asked.weights, here)
    setting = Setting(
        task=task, plan=asked.plan, world=here, weights=weights, total_steps=total, flag=interrupt.flag
    )
    watchers = [Curves(), *([Console(terminal, _samples_word(train_data))] if terminal else [])]
    training = Training(
        engine=engine(setting),
        world=here,
        run=run,
        options=asked.options,
        feed=training_feed,
        validation=validation,
        total_steps=total,
        watchers=watchers if here.rank == 0 else [],
        interrupt=interrupt,
        started=began,
    )
    if found is not None:
        training.resume(found)
        if here.rank == 0:
            run.cut_back(found.step)
    return training


def _open_run(asked: Request, task: Task, here: World) -> Path:
    """The run's folder, made or checked by process 0."""
    if asked.run is None or not Run.is_run(asked.run):
        folder = asked.run or new_folder(asked.base, asked.task.name)
        return Run.create(folder, description(asked, task, here)).folder
    run = Run(asked.run)
    known = run.description
    if not same_task(task, known):
        raise RunError(
            f"{run.folder} is a run of the task {known.get('task')}, not of {asked.task.name}: "
            "give another folder with --run, or none for a new one"
        )
    restarts = int(known.get("restarts", 0)) + 1
    run.describe(fields=field_texts(task), plan=str(asked.plan), restarts=restarts, status="running")
    return run.folder


def description(asked: Request, task: Task, here: World) -> dict[str, Any]:
    """What run.json says of a new run."""
    import platform

    import torch

    import grappe

    return {
        "task": asked.task.name,
        "class": type(task).__qualname__,
        "fields": field_texts(task),
        "plan": str(asked.plan),
        "seed": task.seed,
        "data": str(asked.data.absolute()),
        "processes": here.size,
        "threads": here.threads,
        "device": str(here.device),
        "host": platform.node(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "versions": {
            "grappe": grappe.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "restarts": 0,
        "status": "running",
    }


def _on_process_0(here: World, make: Any) -> Any:
    """What process 0 makes, or its error, on every process. Collective."""
    answer: tuple[Any, Exception | None] = (None, None)
    if here.rank == 0:
        try:
            answer = (make(), None)
        except UsageError as error:
            answer = (None, error)
    made, error = here.share(answer)
    if error is not None:
        raise error
    return made


def _announce(terminal: Outlet, asked: Request, task: Task, here: World, run: Run, samples: int) -> None:
    slices = here.data_size
    micro = asked.plan.microbatches
    each = -(-task.batch_size // slices)
    sizes = f"batch {task.batch_size} over all processes"
    if slices > 1 or micro > 1:
        sizes += f" = {slices} x {each}" + (f", each in {micro} microbatches" if micro > 1 else "")
    terminal.write(
        f"{type(task).__name__} on {here.size} process{'es' if here.size > 1 else ''} ({here.device.type}, "
        f"{here.threads} thread{'s' if here.threads > 1 else ''} each), plan: {asked.plan or 'one process'}\n"
        f"{samples:,} training samples, {sizes}; run {run.folder}\n"
    )
    terminal.flush()


def _samples_word(dataset: Any) -> str:
    inputs = dataset[0][0]
    return "images" if getattr(inputs, "ndim", 0) == 3 and inputs.shape[0] in (1, 3) else "samples"
