"""grappe train: trains a task under a plan, or resumes a run; --smoke tries both in two steps."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from grappe.errors import UsageError
from grappe.errors.foreign_text import number
from grappe.launch.files import scratch
from grappe.launch.start import start
from grappe.plan import AnyPlan, as_plan
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.plot import Plot
from grappe.training.request import Request, Result, checked_watchers, data_folder
from grappe.training.run import METRICS, Run, new_folder
from grappe.training.task_reference import TaskReference
from grappe.training.watchers.base import Watcher
from grappe.training.watchers.logger import check as check_logger
from grappe.words import count_of, format_number, plan_name


def train(
    task: Task | type[Task] | str,
    plan: AnyPlan = "",
    run: Path | str | None = None,
    *,
    data: Path | str | None = None,
    fields: Mapping[str, object] | None = None,
    from_: Path | str | None = None,
    with_optimizer: bool = False,
    epochs_done: int | None = None,
    options: Options | None = None,
    name: str = "",
    base: Path | str = "runs",
    watchers: Sequence[Watcher | str] = (),
    **values: object,
) -> Run:
    """Trains `task` under `plan`, or resumes the run in the folder `run`: `train("digits", "replicate=2", epochs=3)`.

    Args:
        task: a task, its class, or its name as on the command line.
        plan: a Plan, its text, "replicate=2", or its keys, {"replicate": 2}; "" is one process.
        run: the run's folder; None makes a new one under `base`.
        data: the folder of datasets; None: the environment's GRAPPE_DATA, or ./data.
        fields: values of the task's fields, {"epochs": 3}; also those that are named as an argument here is.
        from_: a run, or a .safetensors, .ckpt or .pt file to start from.
        with_optimizer: take over the optimizer's state and the number of epochs done in the file `from_`, too.
        epochs_done: epochs that the training of `from_` has done: the run begins after them. None: what the file says
            if `with_optimizer`, else 0.
        name: a name for the run, which `grappe.Run` and the commands take in place of its folder in ./runs.
        watchers: callbacks of your own: instances of classes derived from grappe.Watcher, or their names,
            "file.py:MyWatcher". Watchers run on process 0, which gets copies of instances.
        **values: further values of the task's fields: epochs=3.

    Raises:
        GrappeError: an argument is wrong or the training failed; the message says what to do.
    """
    request = Request(
        task=TaskReference.of(task, {**(fields or {}), **values}),
        plan=as_plan(plan),
        run=Path(run) if run else None,
        name=name,
        base=Path(base),
        data=data_folder(data),
        weights=Path(from_) if from_ else None,
        with_optimizer=with_optimizer,
        epochs_done=epochs_done,
        options=options or Options(),
        watchers=checked_watchers(watchers),
    )
    return Run(shown_training(request).run)


def shown_training(request: Request) -> Result:
    """Trains as `run_training` does, and in a notebook draws the curves in the cell."""
    ipython = sys.modules.get("IPython")  # imported in a notebook already
    if ipython is None or not hasattr(ipython.get_ipython(), "kernel"):
        return run_training(request)
    folder = request.run or new_folder(request.base, request.task.name)
    curves = LiveCurves(folder, request.plan.processes)
    try:
        return run_training(dataclasses.replace(request, run=folder), curves)
    finally:
        curves.draw(ended=True)


def run_training(request: Request, meanwhile: Callable[[], None] | None = None) -> Result:
    """Trains on the plan's processes, started here or by torchrun or srun; calls `meanwhile` as `local` does."""
    for rank in request.options.profile:
        if rank >= request.plan.processes:
            raise UsageError(f"--profile={rank}: there are process 0 to {request.plan.processes - 1}")
    for name in request.options.log:
        check_logger(name)
    if not request.options.steps and request.run and Run.is_run(request.run) and Run(request.run).is_finished():
        step = Run(request.run).read_description().get("step", 0)
        return Result(run=Run(request.run).folder, status="finished before", step=step)
    if request.run is None and request.options.restarts:  # all starts are of one run
        request = dataclasses.replace(request, run=new_folder(request.base, request.task.name))
    return start(
        "grappe.training.worker:worker",
        request,
        request.plan,
        run=request.run,
        saves=True,
        restarts=request.options.restarts,
        meanwhile=meanwhile,
    )


def smoke(request: Request) -> str:
    """Takes one step and saves, then resumes for a second step, in a temporary folder.

    Returns:
        A line that lists the successful parts.

    Raises:
        GrappeError: a part failed.
        UsageError: the request begins after step 0.
    """
    if request.with_optimizer or request.epochs_done:
        raise UsageError("--smoke takes steps 1 and 2: leave --with-optimizer and --epochs-done out")
    with scratch("smoke") as folder:
        first = dataclasses.replace(request, run=folder / "run", options=Options(steps=1))
        run_training(first)
        second = run_training(dataclasses.replace(first, weights=None, options=Options(steps=2)))
    return f"smoke: step, evaluation, save and resume work under {plan_name(request.plan)} ({second.step} steps)"


class LiveCurves:
    """The picture in the cell, which each call draws again if a second has passed."""

    def __init__(self, folder: Path, processes: int) -> None:
        from IPython.display import display  # pyrefly: ignore

        from grappe.verbs.follow import Tail  # and rich

        self._tail, self._plot = Tail(folder / METRICS), Plot()
        self._plot.caption = f"starting {count_of(processes, 'process')} …"
        self._drawn = time.monotonic()
        self._handle: Any = display(self._plot, display_id=True)

    def __call__(self) -> None:
        if time.monotonic() - self._drawn >= 1.0:  # second
            self._drawn = time.monotonic()
            self.draw()

    def draw(self, *, ended: bool = False) -> None:
        """Draws what is new; at the end the last picture, without words."""
        with contextlib.suppress(Exception):  # a file that cannot be read now, a notebook that was closed
            records = list(self._tail.new())
            for record in records:
                self._plot.add(record)
                if record.get("kind") == "step":
                    epoch, loss = number(record.get("epoch")) + 1, format_number(number(record.get("loss")))
                    self._plot.caption = f"epoch {epoch:.0f}, step {record.get('step')}, loss {loss}"
            if ended:
                self._plot.caption = ""
            if records or ended:
                self._handle.update(self._plot)
