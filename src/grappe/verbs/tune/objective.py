"""Objective: what a trial has come to, read from its run."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from grappe.errors import RunError
from grappe.training.options import Options
from grappe.training.run import Run
from grappe.verbs.tune.space import PLAN
from grappe.verbs.tune.study import Study, Trial


def reached(study: Study, trial: Trial, part: float) -> bool:
    """Returns whether the trial's training has come to `part` of its steps and was evaluated there; or has ended."""
    folder = study.run_folder(trial.number)
    if not Run.is_run(folder):
        return False
    run = Run(folder)
    if run.is_finished():
        return True
    found = run.read_description()
    step, target = found.get("step"), _target(study, found, part)
    if not isinstance(step, int) or target is None or step < target:
        return False
    return bool(_evaluations(run, step, target))


def missed(study: Study, trial: Trial, part: float) -> str:
    """Says where a training ended that was to come to `part` of its steps, and did not; "": it did.

    What ended was then the training of an earlier rung. One that patience has stopped is whole.
    """
    folder = study.run_folder(trial.number)
    if not Run.is_run(folder):
        return ""
    found = Run(folder).read_description()
    step, target = found.get("step"), _target(study, found, part)
    short = isinstance(step, int) and target is not None and step < target
    return f"it ended at step {step} of {target}" if short and found.get("status") != "stopped" else ""


def ended(study: Study, trial: Trial, rung: int = 0, part: float = 1.0) -> Trial:
    """The trial with the metric at the end of `part` of its training, a rung; failed, if that is no number."""
    run, name = Run(study.run_folder(trial.number)), study.search.metric
    found = run.read_description()
    step, target = found.get("step"), _target(study, found, part)
    # Patience may have ended the training before; an older run does not say how many steps there are.
    at = step if target is None or (isinstance(step, int) and step < target) else target
    evaluations = _evaluations(run, step, at)
    if not evaluations:
        return failed(trial, f"metrics.jsonl has no readable evaluation of the last step, {at}")
    value, at = evaluations[-1].get(name), evaluations[-1]["step"]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "not a finite number" if value is None else value
        return failed(trial, f"{name} is {shown} at step {at}")
    rungs, last = (*trial.rungs[:rung], float(value)), rung + 1 == study.search.rungs
    return dataclasses.replace(
        trial,
        state="complete" if last else "paused",
        value=rungs[-1] if last else None,
        step=at,
        rungs=rungs,
        reason="",
    )


def _evaluations(run: Run, step: object, at: object) -> list[dict[str, Any]]:
    """The evaluations at a step; of a training that somebody has taken further, those up to it, the last one last."""
    records = list(run.records("evaluation"))
    found = [one for one in records if one.get("step") == at]
    if found or not (isinstance(step, int) and isinstance(at, int) and step > at):
        return found
    before = [one for one in records if isinstance(one.get("step"), int) and one["step"] < at]
    return sorted(before, key=lambda one: one["step"])


def _target(study: Study, description: Mapping[str, Any], part: float) -> int | None:
    """The step at which `part` of a training ends."""
    total = description.get("total_steps")
    return Options(part=part, steps=study.search.steps).last_step(total) if isinstance(total, int) else None


def failed(trial: Trial, reason: str) -> Trial:
    """The trial, failed."""
    return dataclasses.replace(trial, state="failed", value=None, reason=reason)


def refuse_another(study: Study, trial: Trial) -> None:
    """Raises RunError where the trial's run was made with other fields than the trial has."""
    folder = study.run_folder(trial.number)
    if not Run.is_run(folder):
        return
    fields = Run(folder).read_description().get("fields")
    for name, text in trial.fields.items():
        if name == PLAN:
            continue  # a run's plan may change
        found = fields.get(name) if isinstance(fields, dict) else None
        if not _same(found, text):
            raise RunError(
                f"{folder} was trained with {name}={found}, and the study draws {name}={text} for it: "
                "was it copied from another study? Remove that folder to train it again"
            )


def _same(found: object, text: str) -> bool:
    if isinstance(found, int | float) and not isinstance(found, bool):
        try:
            return float(text.replace("_", "")) == found
        except ValueError:
            return False
    if isinstance(found, bool):
        return (text.lower() in ("true", "yes", "on", "1")) == found
    if found is None:
        return text.lower() in ("none", "auto", "null")
    return str(found) == text
