"""Searches a task's fields: trains trials side by side, each an ordinary run in the study's folder."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grappe.errors import UsageError, nearest
from grappe.fields import at_least
from grappe.launch.rank import rank_from_environment
from grappe.plan import Plan, as_plan
from grappe.task import Task
from grappe.tasks import defaults
from grappe.training.options import Options
from grappe.training.request import Request, data_folder
from grappe.training.run import new_folder
from grappe.training.task_reference import TaskReference, field_texts
from grappe.verbs.jobs import QUERY_SECONDS
from grappe.verbs.submission import JobOptions
from grappe.verbs.tune import sampler as samplers
from grappe.verbs.tune.coordinator import Coordinator, SearchProgress
from grappe.verbs.tune.local_trainings import LocalTrainings
from grappe.verbs.tune.schedule import fewest_trials
from grappe.verbs.tune.slurm_trainings import SlurmTrainings
from grappe.verbs.tune.space import PLAN, Choices, Space, as_texts, read
from grappe.verbs.tune.study import Search, Study, make_study
from grappe.verbs.tune.trial_task import with_fields

RUNGS = 3
MOST_RUNGS, MOST_HALVING = 20, 1_000  # beyond, no study is so large
TRIALS = 20
"""Of a search without an end of its own, as a grid has."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wanted:
    """A search, as the user asks for it."""

    metric: str = "loss"
    direction: Literal["minimize", "maximize"] | None = None
    """None: minimize, for the loss; another metric must say."""
    sampler: samplers.Name = "tpe"
    seed: int = 0
    trials: int | None = None
    """None: 20; of a grid all cells."""
    parallel: int = 1
    halving: int | None = None
    """Successive halving: of so many trials one goes on, at each rung. None: all are trained whole."""
    rungs: int | None = None
    """Number of times that a training stops to be compared, its end included. None: 3, with halving."""

    def __post_init__(self) -> None:
        at_least(self, 1, "trials", "parallel")
        at_least(self, 2, "halving", "rungs")
        for name, most in (("halving", MOST_HALVING), ("rungs", MOST_RUNGS)):
            if (value := getattr(self, name)) is not None and value > most:
                raise UsageError(f"--{name}: at most {most}")
        if self.rungs is not None and self.halving is None:
            raise UsageError(
                f"--rungs={self.rungs}: rungs are of successive halving: give --halving 3 as well"
            )
        if self.direction is None and self.metric != "loss":
            raise UsageError(f"--metric {self.metric}: say whether to --maximize or --minimize it")


def tune(
    task: Task | type[Task] | str,
    space: Mapping[str, str | Sequence[Any]],
    plan: Plan | str = "",
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
    fields: Mapping[str, str] | None = None,
    options: Options | None = None,
) -> Study:
    """Searches the fields of `task` in `space`, or goes on with the study in `study`.

    Each trial is an ordinary run in the study's folder. Whatever is killed, the study is the one that it would have
    been: its trials' fields are a function of the seed, the space, and the objectives of earlier trials.

    Args:
        task: a task, its class, or its name as on the command line.
        space: by field a range, "0.01..1" or "0.01..1:log", or a list of values.
        plan: of each trial; "" is one process.
        trials: how many in all; None: 20, of a grid all.
        parallel: how many trials are trained at a time.
        study: the study's folder; None makes a new one in `runs`.
        metric: the objective: loss, or one of the task's metrics, at the last evaluation.
        direction: needed for a metric other than the loss.
        sampler: "tpe" (by Optuna), "random" or "grid".
        halving: successive halving (ASHA): a trial is first trained in part, and of `halving` trials the best goes on
            from its checkpoint. None: all are trained whole.
        rungs: how often a training stops to be compared, its end included; None: 3, with halving.
        data: the folder of datasets; None: the environment's GRAPPE_DATA, or ./data.
        fields: texts for the task's other fields, if the task is given by name.

    Returns:
        The study: `trials` and `best`. After a signal some trials are still open.

    Raises:
        GrappeError: an argument is wrong, or differs from what the study has.
    """
    wanted = Wanted(
        metric=metric,
        direction=direction,
        sampler=sampler,
        seed=seed,
        trials=trials,
        parallel=parallel,
        halving=halving,
        rungs=rungs,
    )
    folder = Path(study) if study else None
    found, _ = search(
        task, {**(fields or {}), **as_texts(space)}, as_plan(plan), wanted, folder, data=data, options=options
    )
    return found


def search(
    task: Task | type[Task] | str,
    texts: Mapping[str, str],
    plan: Plan,
    wanted: Wanted,
    folder: Path | None,
    *,
    data: Path | str | None = None,
    options: Options | None = None,
    jobs: JobOptions | None = None,
    query_every: float = QUERY_SECONDS,
    watch: Callable[[SearchProgress], None] = lambda progress: None,
) -> tuple[Study, bool]:
    """Does what `tune` does; returns whether all trials have ended, too.

    Args:
        texts: by field a range, values, or one text, which it has in all trials.
        jobs: of each trial's Slurm job; None: trials are trained in processes of this machine.
        query_every: seconds between queries to Slurm.
    """
    options = options or Options()
    _refuse(options, wanted)
    if jobs is not None:
        _refuse_as_jobs(options, jobs)
    samplers.check(wanted.sampler)
    base = TaskReference.of(task)
    space, fixed = read(type(base.resolve()), texts)
    reference = with_fields(base, fixed)
    plans = _plans(space, plan)
    if plans != [plan] and str(plan):
        raise UsageError(
            f"--plan {plan}: the search varies the plan: leave --plan out, and write it into each"
        )
    _refuse_plans(plans)
    _check_metric(wanted.metric, reference.resolve())
    total = _total(wanted, space)
    if jobs is not None and reference.value is not None:
        raise UsageError(
            "jobs start when this program may have ended: give the task by its file, task.py:Name"
        )
    asked = _asked(reference, space, plan, wanted, options, own=jobs is None)
    found = make_study(folder or _new_folder(reference.name), asked)
    request = Request(
        task=reference,
        plan=dataclasses.replace(plan, threads=found.search.threads) if found.search.threads else plan,
        data=data_folder(data),
        options=options,
        quiet=True,
    )
    trainings = (
        LocalTrainings(parallel=wanted.parallel, limited=options.time_limit is not None, plans=plans)
        if jobs is None
        else SlurmTrainings(found.folder, jobs, parallel=wanted.parallel, query_every=query_every)
    )
    coordinator = Coordinator(
        found, space, request, trainings, parallel=wanted.parallel, total=total, watch=watch
    )
    return found, coordinator.run()


def _asked(
    reference: TaskReference, space: Space, plan: Plan, wanted: Wanted, options: Options, *, own: bool
) -> Search:
    from grappe.launch.world import cores

    made = reference.resolve()
    others = {name: value for name, value in field_texts(made).items() if name not in space}
    own_values = {name: value for name, value in others.items() if value != defaults(type(made)).get(name)}
    own = own and plan.threads is None and not plan.exact
    most = max(one.processes for one in _plans(space, plan))
    return Search(
        task=reference.name,
        fields=others,
        given={name: "none" if value is None else str(value) for name, value in own_values.items()},
        space={name: str(axis) for name, axis in space.items()},
        plan=str(plan),
        metric=wanted.metric,
        maximize=wanted.direction == "maximize",
        sampler=wanted.sampler,
        seed=wanted.seed,
        lag=wanted.parallel,
        threads=max(1, cores() // (wanted.parallel * most)) if own else None,
        steps=options.steps,
        patience=options.patience,
        evaluate_every=options.evaluate_every,
        halving=wanted.halving,
        rungs=_rungs(wanted),
    )


def _plans(space: Space, plan: Plan) -> list[Plan]:
    """The plans that trials have."""
    axis = space.get(PLAN)
    return [Plan.parse(one) for one in axis.texts] if isinstance(axis, Choices) else [plan]


def _rungs(wanted: Wanted) -> int:
    return (wanted.rungs or RUNGS) if wanted.halving else 1


def _refuse(options: Options, wanted: Wanted) -> None:
    if rank_from_environment() is not None:
        raise UsageError("grappe tune starts its trials' processes itself: start it without torchrun or srun")
    if options.part is not None:
        raise UsageError("--part stops each training early, as --halving does by results: leave it out")
    if options.patience is not None and wanted.halving is not None:
        raise UsageError(
            "--patience with --halving: both stop trainings, and which would depend on the rungs: leave one out"
        )
    if options.steps_only:
        raise UsageError("--steps-only has no evaluation, which a search needs: leave it out")


def _refuse_plans(plans: Sequence[Plan]) -> None:
    from grappe import engines

    for plan in plans:
        if plan.per_device > 1 and plan.device != "cpu":
            raise UsageError(
                "per_device: a search places trials on GPUs itself, one process each: leave it out"
            )
        engines.check(plan)


def _refuse_as_jobs(options: Options, jobs: JobOptions) -> None:
    if options.time_limit is not None:
        raise UsageError(
            "--time-limit is of this machine; each trial's job has its own, and requeues itself: --time"
        )
    if jobs.name is not None or jobs.gpus:
        which = "--name" if jobs.name is not None else "--gpus"
        raise UsageError(f"{which}: each trial's job has its own name, and what the plan needs: leave it out")
    if jobs.chain:
        raise UsageError(
            "--chain: each trial's job is one, which requeues itself or is submitted again: leave it out"
        )


def _check_metric(name: str, task: Task) -> None:
    known = ["loss", *task.metrics()]
    if name not in known:
        raise UsageError(f"--metric {name}: the task has no such metric: {nearest(name, known)}")


def _total(wanted: Wanted, space: Space) -> int:
    if wanted.sampler != "grid":
        total = wanted.trials or TRIALS
    else:
        cells = len(samplers.grid(space))
        if wanted.trials is not None and wanted.trials > cells:
            raise UsageError(
                f"--trials={wanted.trials}: the grid has {cells} cells; leave --trials out for all of them"
            )
        total = wanted.trials or cells
    fewest = fewest_trials(wanted.halving or 1, _rungs(wanted))
    if total < fewest:
        raise UsageError(
            f"--halving={wanted.halving} with {_rungs(wanted)} rungs takes {fewest} trials until one is trained to its "
            f"end, and these are {total}: more --trials, or fewer --rungs"
        )
    return total


def _new_folder(name: str) -> Path:
    return new_folder(Path("runs"), f"{name}-study" if ":" in name else f"x:{Path(name).stem}-study")
