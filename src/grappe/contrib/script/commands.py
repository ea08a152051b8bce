"""Defines the command launch, and what grappe verify shows of a script."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from grappe.cli import output
from grappe.cli.application import PlanText, RunsFolder, app, preflight
from grappe.cli.exit import show_facts, show_json
from grappe.cli.measuring import end_progress
from grappe.errors import EXIT_FAILURE, EXIT_INTERRUPTED, EXIT_OK, EXIT_USAGE
from grappe.fields import DurationOrNone
from grappe.launch import files
from grappe.launch.files import RUNS
from grappe.launch.terminal import complain, progress, say

if TYPE_CHECKING:
    from grappe.contrib.script.against import Agreement


@app.command
def launch(
    script: Path,
    /,
    *arguments: Annotated[str, Parameter(allow_leading_hyphen=True)],
    plan: PlanText = "",
    run: Path | None = None,
    runs: RunsFolder = RUNS,
    save_every: int | None = None,
    idle: DurationOrNone = 0.0,
) -> int:
    """Run a training script, as it is, on the processes of a plan.

    A script for one process runs on each, and its tensors hold a process's rows
    of every batch: lines and weights are those of one process. What cannot be
    is refused by name. A grappe.Loop() in the script trains under the plan. A script
    for several processes (torch.distributed, Accelerate) is started as it is.
    torchrun and srun may start the plan's processes, on several nodes too.
    Options come before the script; what follows it is its own.

        grappe launch --plan replicate=2 mnist.py --epochs 3
        srun -N 2 -n 8 grappe launch --plan replicate=8 mnist.py

    Args:
        script: A training script.
        arguments: The script's own arguments.
        run: The run's folder, of a script for one process; if there is a run, it is resumed.
        save_every: Steps between checkpoints of the script's state. Default: a minute.
        idle: Save and end, with exit code 75, when no process has computed anything for this time: 30m. Default: none.
    """
    preflight([plan], later=True)
    from grappe.contrib.script.launch import launch as verb
    from grappe.launch.start import interrupted

    code = verb(script, arguments, plan, run=run, base=runs, save_every=save_every, idle=idle)
    typed = {text.partition("=")[0] for text in arguments}
    for option in ("--plan", "--run", "--runs", "--save-every", "--idle"):
        if code == EXIT_USAGE and option in typed and option not in files.read_text(script):  # as argparse ends
            complain(f"grappe: {option} after the script was the script's own option: write grappe's before the script")
    return interrupted() if code == EXIT_INTERRUPTED else code


def verify_script(script: Sequence[str], plan: str, steps: int, out: Path | None, *, json: bool) -> int:
    """Compares a script under a plan with one process, and shows what was found; returns the exit code."""
    from grappe.contrib.script.verify import verify_script as verb

    agreement = verb(script[0], script[1:], plan, steps=steps, note=progress)
    same = f"{plan} learns what {script[0]} learns on one process"
    return _show_agreement("verify --script", agreement, same, {"script": script, "plan": plan}, out, json=json)


def verify_against(
    task: str,
    script: Sequence[str],
    steps: int,
    out: Path | None,
    *,
    fields: Mapping[str, str],
    data: Path | None,
    json: bool,
) -> int:
    """Compares a task with the script that it was ported from, and shows what was found; returns the exit code."""
    from grappe.contrib.script.against import verify_against as verb

    agreement = verb(task, script[0], script[1:], fields=fields, data=data, steps=steps, note=progress)
    same = f"{task} learns what {script[0]} does"
    return _show_agreement("verify --against", agreement, same, {"task": task, "script": script}, out, json=json)


def _show_agreement(
    kind: str, agreement: Agreement, same: str, compared: Mapping[str, object], out: Path | None, *, json: bool
) -> int:
    """Shows the first difference, or that there is none; returns the exit code."""
    end_progress()
    form = {**compared, **dataclasses.asdict(agreement)}
    if json:
        show_json(kind, **form)
    elif agreement.learns_the_same:
        say(f"same: {same}")
        show_facts([
            ("steps compared", str(agreement.step)),
            ("tensors", str(agreement.tensors)),
            ("largest difference", f"{agreement.largest:.1e}, of a tensor's norm, after any step"),
        ])  # fmt: skip
    else:
        say(f"different: {agreement.difference}" + (f" (step {agreement.step})" if agreement.step else ""))
    for line in () if json else agreement.notes:
        say(f"note: {line}")
    output.write_json(out, kind, **form)
    return EXIT_OK if agreement.learns_the_same else EXIT_FAILURE
