"""Measured step: runs five bare steps of a plan on this machine, as its time where nothing need be foreseen."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

from grappe.errors import PlanError
from grappe.foresight.forecast import MemoryForecast
from grappe.foresight.gpu_time import StepTime
from grappe.foresight.partition import threads_of
from grappe.launch.files import scratch
from grappe.launch.local import local
from grappe.launch.rank import ProcessRank
from grappe.launch.world import cores
from grappe.plan import Plan
from grappe.profiling.memory import free as free_memory
from grappe.profiling.phases import WARMUP
from grappe.training.options import Options
from grappe.training.request import Request
from grappe.training.run import Run
from grappe.training.short_run import short_training
from grappe.training.task_reference import TaskReference
from grappe.words import format_bytes

STEPS = 5  # in the median
SECONDS = 30.0  # for one plan's steps
MEMORY = 0.8  # of the free memory: libraries keep some of it
SPREAD, SPREAD_OF_FEW = 0.1, 0.25
"""Relative uncertainty: the same training is 5 to 10 % quicker or slower from start to start; of fewer steps more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocalGpus:
    """The GPUs of this machine that torch sees, of one kind."""

    name: str
    """Name of the GPU, as torch reports it."""
    memory: int
    """Bytes of each."""
    number: int

    @classmethod
    def find(cls) -> LocalGpus | None:
        """Asks torch in a process of its own: this one may fork others, which a process that uses a GPU must not."""
        import torch

        if not torch.cuda.is_available():
            return None
        return local("grappe.verbs.foresee.measured_step:describe_gpus", None, 1)


def describe_gpus(request: None, process: ProcessRank, rendezvous_folder: Path) -> LocalGpus:
    """Returns the name and memory of GPU 0, and how many there are."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return LocalGpus(name=properties.name, memory=properties.total_memory, number=torch.cuda.device_count())


def check_runs_here(plan: Plan, needs: MemoryForecast, gpus: LocalGpus | None = None) -> None:
    """Checks that a plan's steps can be run on this machine.

    Args:
        gpus: those that the plan takes; None: it takes cores.

    Raises:
        PlanError: there are too few cores or GPUs, or too little memory.
    """
    if gpus is not None:
        needed = -(-plan.processes // plan.per_device)
        if needed > gpus.number:
            here = "one GPU" if gpus.number == 1 else f"{gpus.number} GPUs"
            raise PlanError(f"its steps are not run: it takes {needed} GPUs, and torch sees {here} here")
        return
    if plan.device not in ("auto", "cpu"):
        raise PlanError(f"device={plan.device}: steps are run on this machine's cores; grappe measure runs any plan")
    if plan.processes * threads_of(plan) > cores():
        raise PlanError(
            f"its steps are not run: {plan.processes * threads_of(plan)} threads of {plan.processes} processes on "
            f"{cores()} cores"
        )
    most, free = needs.with_copies or needs.states.total, free_memory()
    if free is not None and plan.processes * most > free * MEMORY:
        raise PlanError(
            f"its steps are not run: they take {format_bytes(plan.processes * most)}, and {format_bytes(free)} are "
            "free here"
        )


def measured_step(
    task: TaskReference, plan: Plan, data: Path, *, seconds: float = SECONDS, device: Literal["cpu", "cuda"] = "cpu"
) -> StepTime:
    """Trains a few steps on this machine's cores or GPUs; returns the median step of the slowest process.

    Args:
        seconds: after which no further step begins.

    Raises:
        PlanError: no step ended in that time.
        GrappeError: the training failed.
    """
    with scratch("foresee") as folder:
        options = Options(steps=STEPS + WARMUP, steps_only=True, time_limit=seconds)
        request = Request(task=task, plan=dataclasses.replace(plan, device=device), data=data, options=options)
        short_training(request, folder / "run")
        timings = [cost["timing"] for cost in Run(folder / "run").read_description()["costs"]]
    if min(timing["steps"] for timing in timings) < 1:
        raise PlanError(f"none of its steps ended in {seconds:.0f} s")
    slowest = max(timings, key=lambda timing: timing["step"]["median"])
    phases = {name: quartiles["median"] for name, quartiles in slowest["phases"].items()}
    step = slowest["step"]
    least = SPREAD if slowest["steps"] >= STEPS else SPREAD_OF_FEW
    return StepTime(
        compute=step["median"] - phases["data"] - phases["communication"],
        communication=phases["communication"],
        data=phases["data"],
        spread=max(least, (step["high"] / step["low"] - 1) / 2),
        measured=True,
    )
