"""First step: finds the user's line for faults that show where no line of the user's runs: in backward, or never."""

from __future__ import annotations

import contextlib
import re
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from grappe.data.loader import BatchLoader
from grappe.errors import TaskError
from grappe.errors.remedies import OVERWRITTEN, remedy
from grappe.errors.user_code import FRAME, Line, is_users_file
from grappe.plan import Plan
from grappe.step.loss import loss_of
from grappe.step.task_contract import model_of
from grappe.task import Task

ANOMALY = re.compile("Traceback of forward call")


@contextlib.contextmanager
def naming_overwritten(task: Task, loader: BatchLoader, plan: Plan) -> Iterator[None]:
    """Context in which the error of what was overwritten before backward names the line that made it.

    The forward is repeated for that, by this process alone, so only where the plan has the whole model on a process.
    """
    try:
        yield
    except RuntimeError as error:
        line = None
        if OVERWRITTEN.search(str(error)) and plan.replicate == plan.processes:
            with contextlib.suppress(Exception):  # without a line the message is what it was
                line = _line_overwritten(task, loader)
        if line is None:
            raise
        raise TaskError(
            f"backward needs the result of this line, which is changed in place afterwards ({line}). "
            f"{remedy(str(error))}"
        ) from error


def _line_overwritten(task: Task, loader: BatchLoader) -> Line | None:
    inputs, targets = loader.example_batch()
    model = model_of(task).cpu()
    with (
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        warnings.simplefilter("always")
        values = loss_of(task, task.forward(model, inputs), targets).values
        with contextlib.suppress(RuntimeError):
            values.sum().backward()
    text = next((str(warning.message) for warning in caught if ANOMALY.search(str(warning.message))), "")
    lines = [Line(file, int(number), name) for file, number, name in FRAME.findall(text)]
    return next((line for line in reversed(lines) if is_users_file(line.file)), None)


@contextlib.contextmanager
def refusing_late_parameters() -> Iterator[None]:
    """Context of a forward in which the user's code may make no parameter: no optimizer would know it, none save it."""

    def refuse(module: nn.Module, name: str, parameter: Any) -> None:
        stack = traceback.extract_stack()[:-1]
        made = next(
            (frame for frame in reversed(stack) if not frame.filename.endswith("modules/module.py")), None
        )
        if (
            parameter is None
            or name in dict(module.named_parameters(recurse=False))
            or made is None
            or not is_users_file(made.filename)
        ):
            return
        line = Line(made.filename, made.lineno or 0, made.name)
        raise TaskError(
            f"{type(module).__name__} makes the parameter '{name}' in its forward, where the optimizer does not learn "
            f"of it: make it in __init__() ({line})"
        )

    handle = register_module_parameter_registration_hook(refuse)
    try:
        yield
    finally:
        handle.remove()
