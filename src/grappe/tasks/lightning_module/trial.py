"""Tries a LightningModule's steps on a few samples: what they return and log, and whether those are means over rows."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.tasks.lightning_module import unsupported
from grappe.tasks.lightning_module.steps import (
    TEST,
    TRAINING,
    VALIDATION,
    ModuleSteps,
    Scoring,
    defines,
    loss_in,
)
from grappe.tasks.lightning_module.unsupported import Refusals

SPLIT = re.compile(r"^(val|valid|validation|test)(?=[_/])")


class Tried(NamedTuple):
    """Result of trying a module's steps."""

    validation: Scoring | None
    test: Scoring | None
    left_out: tuple[str, ...]
    """Names that the user leaves out, and that are there."""
    unkept: tuple[str, ...]
    """Names that training_step logs beside its loss."""


def tried(module: Any, train: Any, refusals: Refusals, without: Collection[str]) -> Tried:
    """Returns what evaluation keeps of validation_step and test_step, what is left out, and what is not kept.

    Values that are no means over rows are refused. A step that logs nothing and returns no loss reports nothing under
    Lightning's Trainer: None, and training_step scores in its place.
    """
    samples = [train.dataset[index] for index in range(min(len(train.dataset), unsupported.ROWS))]
    plain, batch = ModuleSteps(module).eval(), train.collate_fn(samples)
    left_out: set[str] = set()
    scorings: dict[str, Scoring | None] = {}
    with torch.no_grad():
        for step in (VALIDATION, TEST):
            scorings[step] = None
            if step in without and defines(module, step):
                left_out.add(step)
            elif defines(module, step):
                scorings[step] = _scoring(plain, batch, step, refusals, without, left_out)
        validation, test = scorings[VALIDATION], _aligned(scorings[TEST], scorings[VALIDATION], refusals)
        steps = ModuleSteps(module, validation, test).eval()
        unsupported.mean_over_rows(steps, samples, train.collate_fn, refusals)
        unkept = _unkept(steps, batch)
    left_out |= {name for name in unkept if name in without}
    return Tried(validation, test, tuple(left_out), tuple(name for name in unkept if name not in left_out))


def _scoring(
    plain: ModuleSteps,
    batch: Any,
    step: str,
    refusals: Refusals,
    without: Collection[str],
    left_out: set[str],
) -> Scoring | None:
    result = plain.run(batch, step)
    names = [name for name in plain.log.values if name not in without]
    left_out |= {name for name in plain.log.values if name in without}
    if loss_in(result) is not None:
        return Scoring(step, tuple(names), None)
    if not names:
        return None
    losses = [name for name in names if "loss" in name.lower()]
    if len(losses) != 1:
        refusals.add(step, "it neither returns its loss nor logs just one '…loss…'")
        return None
    return Scoring(step, tuple(name for name in names if name != losses[0]), losses[0])


def _aligned(test: Scoring | None, validation: Scoring | None, refusals: Refusals) -> Scoring | None:
    """Returns test_step's values in the order of validation_step's, whose names they have but for val_ and test_."""
    if test is None:
        return None
    tests = {SPLIT.sub("", name): name for name in test.logged}
    theirs = [SPLIT.sub("", name) for name in (validation.logged if validation is not None else ())]
    if set(tests) != set(theirs):
        refusals.add(
            TEST,
            f"it logs {_words(test.logged)}, and validation_step {_words(validation.logged if validation else ())}: "
            "the metrics of both must have the same names, but for val_ and test_",
        )
        return None
    return test._replace(logged=tuple(tests[name] for name in theirs))


def _unkept(steps: ModuleSteps, batch: Any) -> tuple[str, ...]:
    """Returns the names that training_step logs beside its loss: curves have the loss alone."""
    loss = loss_in(steps.run(batch, TRAINING))
    return tuple(name for name, value in steps.log.values.items() if not _is_loss(value, loss))


def _is_loss(value: Any, loss: Tensor | None) -> bool:
    if loss is None or not isinstance(value, Tensor | float):
        return False
    return bool(torch.isclose(torch.as_tensor(value).to(loss), loss.detach()).all())


def _words(names: Collection[str]) -> str:
    return ", ".join(names) or "nothing"
