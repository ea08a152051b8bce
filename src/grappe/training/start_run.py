"""Starts a run: makes or checks its folder, takes its lease, finds or builds the checkpoint to start from."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grappe.checkpoint.commit import OLDER
from grappe.checkpoint.foreign_training import Begin
from grappe.checkpoint.format import Checkpoint, list_checkpoints
from grappe.checkpoint.initial import build
from grappe.checkpoint.lease import Lease
from grappe.data.batch import stored_in
from grappe.data.corpus.tokens import check_packed_data
from grappe.data.sampling import SampleOrder
from grappe.data.seeded import fingerprint
from grappe.errors import PlanError, RunError
from grappe.errors.user_code import naming_user_line
from grappe.finder import defaults
from grappe.launch import files
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.task import Task
from grappe.training.request import Request
from grappe.training.run import METRICS, Made, Run, new_folder, restarted, start_facts, taken
from grappe.training.task_reference import field_texts, same_task, source_hash, write_record

ORDER = ("batch_size", "seed")  # the order of samples depends on these, and on the dataset's length


@dataclasses.dataclass(frozen=True, kw_only=True)
class StartedRun:
    """A run that this process may write."""

    run: Run
    description: Mapping[str, Any]
    """The content of run.json at this start."""
    checkpoint: Checkpoint
    """The checkpoint from which training begins; of step 0 in a new run."""
    token: str
    """Identifies this start of the run."""
    notes: tuple[str, ...]
    """Notes for the user, one line each."""
    lease: Lease | None = None
    """Held by process 0."""

    def check_lease(self) -> None:
        """Raises RunError if this process may no longer write the run."""
        if self.lease is not None:
            self.lease.check()


class Data(NamedTuple):
    """The task's datasets."""

    train: Any
    validation: Any
    order: SampleOrder
    """Order of the training samples."""


@contextlib.contextmanager
def start_run(request: Request, task: Task, data: Data, world: World) -> Iterator[StartedRun]:
    """Context with a run that process 0 starts or resumes, for all processes; releases it at the end. Collective.

    A new run is taken back if the plan is refused before its first step.

    Raises:
        GrappeError: the run cannot be started; raised on every process.
    """
    lease = made = None
    refused = False

    def start() -> StartedRun:
        nonlocal lease, made
        with naming_user_line(task):
            started, lease, made = _start(request, task, data, world)
        return started

    try:
        started = dataclasses.replace(world.first(start), lease=lease)
        with started.run.noting_failure(started.token):
            yield started
    except PlanError:
        refused = True
        raise
    finally:
        if lease is not None:
            lease.release()
        if refused and made is not None and not files.kind(made.run / METRICS):
            made.undo()


def _start(request: Request, task: Task, data: Data, world: World) -> tuple[StartedRun, Lease, Made | None]:
    now = description(request, task, data, world)
    folder = request.run or new_folder(request.base, request.task.name)

    def refuse(before: Mapping[str, Any], _: Mapping[str, Any]) -> None:
        if not same_task(task, before):
            raise RunError(
                f"{folder} is a run of the task {before.get('task')}, not of {request.task.name}: "
                "give another folder with --run, or none for a new one"
            )

    begin = None
    if request.weights is not None:
        begin = Begin(
            source=request.weights,
            with_optimizer=request.with_optimizer,
            epochs_done=request.epochs_done,
            epochs=task.epochs,
            steps_per_epoch=data.order.steps_per_epoch,
            engine=request.plan.engine,
        )
    with taken(folder, now, refuse) as (run, before, lease, made):
        chosen = run.choose(description=before)
        described, checkpoint, notes = now, chosen.checkpoint, chosen.passed_over
        if checkpoint is None and any(OLDER in why for why in chosen.passed_over):
            raise RunError(
                f"{run.folder}: {chosen.passed_over[0]}. Go on with the grappe that wrote it, or start a new run"
            )
        if checkpoint is None:
            check = functools.partial(check_packed_data, task, data.train)
            kind = stored_in(request.plan)
            notes = (*notes, *build(task, run.checkpoints, begin, before.get("id", ""), kind, check))
            checkpoint = list_checkpoints(run.checkpoints)[0] if made else run.choose(description=before).checkpoint
            assert checkpoint is not None, "what was built just now verifies"
        step = checkpoint.step
        if made is None:
            changes = tuple(changed(before, now, defaults(type(task))))
            _refuse_another_order(run, before, now, step)
            described = restarted(before, now, step)
            place = f"restart {described['restarts']} at step {step}"
            described["changes"] = [*before.get("changes", []), *(f"{place}: {change}" for change in changes)]
            run.write_description(described)
            run.cut_back(step)
            notes = (f"resuming from step {step}" if step else "starting again from step 0", *notes)
            if step and (engine := checkpoint.read_values().get("engine_name")) != request.plan.engine:
                notes = (
                    *notes,
                    f"from engine {engine} to {request.plan.engine}: only the weights are restored, the optimizer "
                    "starts again",
                )
            if step and (broken := other_bits(before, now)):
                notes = (*notes, f"exact: other bits from here on than before ({', '.join(broken)})")
            notes = (*notes, *(f"changed since: {change}" for change in changes))
        notes = (*filter(None, [request.chosen]), *notes)
        module = type(task).__module__
        if module.partition(".")[0] != "grappe":  # the version says what a shipped task is
            run.keep_code(Path(str(getattr(sys.modules.get(module), "__file__", None))))
        unknown = write_record(str(described.get("id", "")), request.task.name)
        notes = (*notes, unknown) if unknown else notes
        started = StartedRun(run=run, description=described, checkpoint=checkpoint, token=lease.token, notes=notes)
        return started, lease, made


def other_bits(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Lists reasons why a resumed exact training would not have the bits of an uninterrupted one, a few words each.

    The number of processes is no reason; docs/decisions/exact.md lists the reasons.
    """
    plans = [Plan.parse(str(of.get("plan", ""))) for of in (before, now)]
    if not plans[1].exact:
        return []
    pairs = {name: (getattr(plans[0], name), getattr(plans[1], name)) for name in ("exact", "engine", "precision")}
    pairs |= {name: (before.get(name), now[name]) for name in ("threads", "device", "processor")}
    pairs["torch"] = ((before.get("versions") or {}).get("torch"), now["versions"]["torch"])
    return [f"{name} {old} -> {new}" for name, (old, new) in pairs.items() if old not in (None, new)]


def changed(before: Mapping[str, Any], now: Mapping[str, Any], defaults_now: Mapping[str, Any]) -> list[str]:
    """Lists differences from the last start, one line each: `field lr: 0.1 -> 0.2`.

    Args:
        defaults_now: the task's defaults; a field that it did not have then, and has its default, is no difference.
    """
    added = {name: defaults_now[name] for name, value in now["fields"].items() if defaults_now.get(name) == value}
    before = {**before, "fields": {**added, **(before.get("fields") or {})}}
    lines = []
    for group, word in (("fields", "field "), ("versions", "")):
        old, new = before.get(group) or {}, now[group]
        for name in sorted({*old, *new}):
            if old.get(name) != new.get(name):
                lines.append(f"{word}{name}: {old.get(name)} -> {new.get(name)}")
    for name in ("plan", "processes", "threads", "device", "source", "dataset"):
        if name in before and before[name] != now[name]:
            lines.append(f"{name}: {before[name] or 'one process'} -> {now[name] or 'one process'}")
    return lines


def _refuse_another_order(run: Run, before: Mapping[str, Any], now: Mapping[str, Any], step: int) -> None:
    if step == 0:
        return
    old, new = before.get("fields") or {}, now["fields"]
    reasons = [f"{name} {old[name]} -> {new[name]}" for name in ORDER if old.get(name, new[name]) != new[name]]
    lengths = [str(of.get("dataset", "")).partition("-")[0] for of in (before, now)]
    if lengths[0] and lengths[0] != lengths[1]:
        reasons.append(f"training samples {lengths[0]} -> {lengths[1]}")
    if before.get("sampling", "") != now["sampling"]:
        reasons.append("another sampling()")
    if reasons:
        raise RunError(
            f"{run.folder} cannot resume at step {step} with {', '.join(reasons)}: the samples seen so far would not "
            f"be those of this order. Start a new run from its weights: --from {run.folder}"
        )


def description(request: Request, task: Task, data: Data, world: World) -> dict[str, Any]:
    """Returns the content of run.json."""
    sampling = data.order.sampling
    return {
        "task": request.task.name,
        "class": type(task).__qualname__,
        "fields": field_texts(task),
        "plan": str(request.plan),
        "seed": task.seed,
        "data": str(request.data.absolute()),
        "dataset": fingerprint(data.train),
        "sampling": "" if sampling is None else sampling.fingerprint,
        "source": source_hash(task),
        **start_facts(world),
        **({"chosen": request.chosen} if request.chosen else {}),
        **({"name": request.name} if request.name else {}),
        **({"tags": list(request.options.tag)} if request.options.tag else {}),
        **({"note": request.options.note} if request.options.note else {}),
    }
