"""Searches a task's fields: trains trials side by side, each an ordinary run in the study's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grappe import engines
from grappe.contrib.tune import space as spaces
from grappe.contrib.tune.coordinator import Coordinator, with_fields
from grappe.contrib.tune.journal import find_optuna, grid
from grappe.contrib.tune.study import Study, make_study
from grappe.contrib.tune.trainings import LocalTrainings, SlurmTrainings
from grappe.errors import UsageError, nearest
from grappe.fields import text_of
from grappe.finder import defaults
from grappe.launch.files import RUNS
from grappe.launch.rank import rank_from_environment
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.sites.sbatch import JobOptions
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import new_folder
from grappe.training.task_reference import TaskReference, field_texts


def tune(
    task: Task | type[Task] | str,
    space: Mapping[str, str | Sequence[Any]],
    plan: AnyPlan = "",
    *,
    trials: int | None = None,
    parallel: int = 1,
    study: Path | str | None = None,
    metric: str = "loss",
    direction: Literal["minimize", "maximize"] | None = None,
    sampler: Literal["tpe", "random", "grid"] = "tpe",
    halving: int | None = None,
    rungs: int | None = None,
    seed: int = 0,
    data: Path | str | None = None,
    fields: Mapping[str, object] | None = None,
    options: Options | None = None,
) -> Study:
    """Searches the fields of `task` in `space`, or goes on with the study in `study`.

    Each trial is an ordinary run in the study's folder. Whatever is killed, the study goes on from there. A trial's
    fields are a function of the seed, the space, and what the other trials have come to when it is drawn.

    Args:
        task: a task, its class, or its name as on the command line.
        space: by field a range, "0.01..1" or "0.01..1:log", or a list of values.
        plan: of each trial; "" is one process.
        trials: how many in all; None: 20, of a grid all.
        parallel: how many trials are trained at a time.
        study: the study's folder; None makes a new one in `runs`.
        metric: the objective: loss, or one of the task's metrics, at the last evaluation.
        direction: needed for a metric other than the loss.
        sampler: "tpe", "random" or "grid".
        halving: successive halving (ASHA): a trial is first trained in part, and goes on from its checkpoint if it is
            among the best of `halving` so far. None: all are trained to the end.
        rungs: how often a training stops to be compared, its end included; None: 3, with halving.
        data: the folder of datasets; None: the environment's GRAPPE_DATA, or ./data.
        fields: texts for the task's other fields, if the task is given by name.

    Returns:
        The study: `trials` and `best`. After a signal some trials are still open.

    Raises:
        GrappeError: an argument is wrong, or differs from the study's.
    """
    search_options = spaces.SearchOptions(
        trials=trials,
        parallel=parallel,
        metric=metric,
        maximize=None if direction is None else direction == "maximize",
        sampler=sampler,
        halving=halving,
        rungs=rungs,
        seed=seed,
    )
    folder = Path(study) if study else None
    texts = {name: text_of(value) for name, value in (fields or {}).items()} | spaces.as_texts(space)
    return search(task, texts, as_plan(plan), search_options, folder, data=data, options=options)[0]


def search(
    task: Task | type[Task] | str,
    texts: Mapping[str, str],
    plan: Plan,
    search_options: spaces.SearchOptions,
    folder: Path | None,
    *,
    runs: Path = RUNS,
    data: Path | str | None = None,
    options: Options | None = None,
    jobs: JobOptions | None = None,
    watch: Callable[[Coordinator], None] = lambda progress: None,
) -> tuple[Study, bool]:
    """Does what `tune` does; returns whether all trials have ended, too.

    Args:
        texts: by field a range, values, or one text, which it has in all trials.
        runs: where a new study's folder is made, if `folder` is None.
        jobs: of each trial's Slurm job; None: trials are trained in processes of this machine.
    """
    options = options or Options()
    task_reference, plans, definition = checked_search(task, texts, plan, search_options, options, jobs)
    name = task_reference.name
    study = make_study(
        folder or new_folder(runs, f"{name}-study" if ":" in name else f"x:{Path(name).stem}-study"), definition
    )
    plan = dataclasses.replace(plan, threads=study.search.threads or plan.threads)
    request = Request(task=task_reference, plan=plan, data=data_folder(data), options=options, quiet=True)
    parallel = search_options.parallel
    if jobs is not None:
        trainings = SlurmTrainings(study.folder, jobs, parallel=parallel)
    else:
        trainings = LocalTrainings(parallel=parallel, limited=options.time_limit is not None, plans=plans)
    total = definition.trials
    parallel = total if jobs is not None and jobs.array else parallel  # Slurm holds back an array's tasks
    return study, Coordinator(study, request, trainings, parallel=parallel, total=total, watch=watch).run()


def checked_search(
    task: Task | type[Task] | str,
    texts: Mapping[str, str],
    plan: Plan,
    search_options: spaces.SearchOptions,
    options: Options,
    jobs: JobOptions | None = None,
) -> tuple[TaskReference, Sequence[Plan], spaces.SearchDefinition]:
    """Checks the arguments of `search`, and makes nothing; returns the plans of the trials, too.

    Raises:
        GrappeError: an argument is wrong.
    """
    _refuse_options(options, search_options, jobs)
    if search_options.sampler != "grid":
        find_optuna()
    task_reference = TaskReference.of(task)
    space, fixed = spaces.read_space(type(task_reference.resolve()), texts)
    task_reference = with_fields(task_reference, fixed)
    axis = space.get(spaces.PLAN)
    if jobs is not None and jobs.array and (search_options.sampler == "tpe" or search_options.halving or axis):
        raise UsageError(
            "--jobs array draws all trials before the first has a result, and has one plan: give --sampler random or "
            "grid, and neither --halving nor plan="
        )
    plans = [Plan.parse(text) for text in axis.texts] if isinstance(axis, spaces.Choices) else [plan]
    if plans != [plan] and str(plan):
        raise UsageError(f"--plan {plan}: the search varies the plan: leave --plan out, and write it into each")
    for each in plans:
        if each.per_device > 1 and each.device != "cpu":
            raise UsageError("per_device: a search places trials on GPUs itself, one process each: leave it out")
        engines.check(each)
    task_value = task_reference.resolve()
    metrics = ["loss", *task_value.metrics()]
    if search_options.metric not in metrics:
        raise UsageError(
            f"--metric {search_options.metric}: the task has no such metric: {nearest(search_options.metric, metrics)}"
        )
    total = search_options.trials
    if search_options.sampler == "grid":
        cells = len(grid(space))
        if total is not None and total > cells:
            raise UsageError(f"--trials={total}: the grid has {cells} cells; leave --trials out for all of them")
        total = total or cells
    if jobs is not None and task_reference.value is not None:
        raise UsageError("jobs start when this program may have ended: give the task by its file, task.py:Name")
    threads = None
    if jobs is None and plan.threads is None and not plan.exact:
        from grappe.launch.world import cores

        threads = max(1, cores() // (search_options.parallel * max(each.processes for each in plans)))
    other_fields = {name: value for name, value in field_texts(task_value).items() if name not in space}
    usual = defaults(type(task_value))
    changed = {name: value for name, value in other_fields.items() if value != usual.get(name)}
    chosen: dict[str, Any] = {
        **vars(search_options),
        "trials": total or spaces.TRIALS,
        "maximize": bool(search_options.maximize),
        "rungs": (search_options.rungs or spaces.RUNGS) if search_options.halving else None,
    }
    definition = spaces.SearchDefinition(
        **chosen,
        task=task_reference.name,
        fields=other_fields,
        fixed_fields={name: "none" if value is None else str(value) for name, value in changed.items()},
        space={name: str(axis) for name, axis in space.items()},
        plan=str(plan),
        threads=threads,
        steps=options.steps,
        patience=options.patience,
        evaluate_every=options.evaluate_every,
    )
    return task_reference, plans, definition


def _refuse_options(options: Options, search_options: spaces.SearchOptions, jobs: JobOptions | None) -> None:
    if rank_from_environment() is not None:
        raise UsageError("grappe tune starts its trials' processes itself: start it without torchrun or srun")
    if options.part is not None:
        raise UsageError("--part stops each training early, as --halving does by results: leave it out")
    if options.patience is not None and search_options.halving is not None:
        raise UsageError(
            "--patience with --halving: both stop trainings, and which would depend on the rungs: leave one out"
        )
    if options.steps_only:
        raise UsageError("--steps-only has no evaluation, which a search needs: leave it out")
    if jobs is None:
        return
    if options.time_limit is not None:
        raise UsageError(
            "--time-limit is for trainings on this machine: a trial's job has --job-time, and requeues itself"
        )
    if jobs.name is not None or jobs.gpus:
        which = "--name" if jobs.name is not None else "--gpus"
        raise UsageError(f"{which}: each trial's job has its own name, and what the plan needs: leave it out")
    if jobs.chain:
        raise UsageError("--chain: each trial's job is one, which requeues itself or is submitted again: leave it out")
