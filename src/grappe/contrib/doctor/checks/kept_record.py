"""Check of the kept record: whether torch, driver, container or processor have changed since `doctor --record`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path

import torch

from grappe import sites
from grappe.contrib.doctor.checks import Finding, Machine, once, warning
from grappe.contrib.lab import record
from grappe.errors import UsageError
from grappe.launch.files import state_folder
from grappe.plan import Plan

TASK = "digits"
"""The shipped task that is recorded if none is given: its data comes with scikit-learn."""
LASTING = ("torch", "driver", "container", "processor", "instructions", "device")
"""Settings that an upgrade changes; the others belong to a training."""


def keep(task: str | None, plan: Plan, fields: Mapping[str, str]) -> Path:
    """Records what this machine computes, in the user's own folder: one file for each site and kind of device.

    Raises:
        UsageError: the user has no such folder.
        GrappeError: the task does not train.
    """
    if (file := _file(plan, make=True)) is None:
        raise UsageError("there is no folder to keep the record in: set XDG_STATE_HOME, or use grappe verify --record")
    record.write(record.record(task or TASK, plan, fields=fields), file)
    return file


@once
def check_kept_record(machine: Machine) -> Iterator[Finding]:
    """Compares this machine with the one of the record, outside of jobs; offers to compare what they compute."""
    file = _file(machine.plan, make=False)
    if machine.job or file is None or not file.exists():
        return
    then, device = record.read(file).header, _device(machine.plan)
    now = record.this_machine(torch.device(device), 1)
    if changed := record.changes(then.machine, {name: now[name] for name in LASTING}):
        command = record.comparison(then, file, device)
        day = f"{datetime.fromtimestamp(file.stat().st_mtime, UTC):%Y-%m-%d}"
        yield warning(
            f"since the record of {day}: {'; '.join(changed)}",
            why="the same training may compute something else now",
            do=f"{command} compares; then grappe doctor --record keeps a new one",
        )


def _device(plan: Plan) -> str:
    return "cuda" if plan.device != "cpu" and torch.cuda.is_available() else "cpu"


def _file(plan: Plan, *, make: bool) -> Path | None:
    folder = state_folder("machines", make=make)
    return None if folder is None else folder / f"{sites.current()}-{_device(plan)}.record"
