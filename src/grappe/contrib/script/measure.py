"""grappe measure --script: launches a script for one process under each plan for some steps."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

from grappe.contrib.script.launch import ScriptRequest, refuse_plan, request_for_one, start_server
from grappe.errors import UsageError
from grappe.launch.files import scratch
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.launch.start import start
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.profiling.phases import WARMUP
from grappe.training.run import Run
from grappe.verbs.measure.measure import measured_in_turns, not_all_failed, point_of_run
from grappe.verbs.measure.points import Measurement, Measurements, MeasureOptions


def measure_script(
    script: Path | str,
    arguments: Sequence[str] = (),
    plans: Sequence[AnyPlan] = ("",),
    *,
    options: MeasureOptions | None = None,
    note: Callable[[str], None] = lambda line: None,
    begun: Callable[[str], None] = lambda line: None,
) -> Measurements:
    """Launches a script for one process under each plan for some steps, as `measure` trains a task.

    Args:
        arguments: the script's own.
        options: of which scripts have steps and repeats.
        note, begun: as of `measure`.

    Raises:
        UsageError: the script is none for one process.
        GrappeError: no plan could be measured.
    """
    options = options or MeasureOptions()
    if rank_from_environment() is not None:
        raise UsageError("grappe measure --script starts its own processes: run it without torchrun or srun")
    for plan in plans:
        refuse_plan(as_plan(plan))
    seed = secrets.randbits(31)

    def train(plan: Plan, _: int, __: int, run: Path) -> Measurement:
        request = request_for_one(Path(script), arguments, plan, seed)
        if plan.processes > 1:
            start_server(Path(script), plan)
        request = dataclasses.replace(request, run=run, steps=options.steps + WARMUP)
        return start("grappe.contrib.script.measure:script_worker", request, plan, run=run)

    with scratch("measure") as folder:
        return not_all_failed(
            measured_in_turns(train, folder, [(as_plan(plan), 0) for plan in plans], options.repeats, note, begun)
        )


def script_worker(request: ScriptRequest, process: ProcessRank, rendezvous_folder: Path) -> Measurement | None:
    """Runs one process of a launched script for some steps; process 0 returns a point of one trial. Collective."""
    from grappe.contrib.script.recorded import run_recorded

    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        run_recorded(request, process, rendezvous_folder)
    if process.rank:
        return None
    assert request.run is not None
    steps = Run(request.run).read_description()["step"] if Run.is_run(request.run) else 0
    if steps <= WARMUP:
        raise UsageError(
            f"{request.script} takes {steps} steps of an optimizer, of which the first {WARMUP} warm up "
            "and are not counted: give it more, by its own arguments"
        )
    return point_of_run(Run(request.run))
