"""Objective: what a trial has come to, read from its run."""

from __future__ import annotations

import dataclasses
import math

from grappe.errors import RunError
from grappe.training.run import Run
from grappe.verbs.tune.study import Study, Trial


def ended(study: Study, trial: Trial) -> Trial:
    """The trial with its objective, the metric at its training's last evaluation; failed, if that is no number."""
    run, name = Run(study.run_folder(trial.number)), study.search.metric
    reached = run.read_description().get("step")
    evaluations = [one for one in run.records("evaluation") if one.get("step") == reached]
    if not evaluations:
        return failed(trial, f"metrics.jsonl has no readable evaluation of the last step, {reached}")
    value = evaluations[-1].get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        shown = "not a finite number" if value is None else value
        return failed(trial, f"{name} is {shown} at step {reached}")
    return dataclasses.replace(trial, state="complete", value=float(value), step=reached, reason="")


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
