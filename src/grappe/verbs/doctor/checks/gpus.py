"""Check of GPUs: their number against the processes', and their visibility to each process."""

from __future__ import annotations

from collections.abc import Iterator

from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning


def check(machine: Machine) -> Iterator[Finding]:
    """Compares the number of processes on this node with the GPUs that this process sees."""
    import torch

    if machine.plan.device == "cpu" or not torch.cuda.is_available():
        return
    local = machine.process.local_size if machine.process.size > 1 else machine.plan.processes
    yield from of_gpus(torch.cuda.device_count(), local, machine.plan.per_device, machine.process.launcher)


def of_gpus(visible: int, local: int, per_device: int, launcher: str) -> Iterator[Finding]:
    """Returns findings for `local` processes on a node that see `visible` GPUs each."""
    needed = -(-local // per_device)
    if launcher == "srun" and visible == 1 and needed > 1:
        yield warning(
            f"each of the {local} processes of this node sees one GPU only",
            why="--gpus-per-task or --gpu-bind hides the others: no direct transfers between GPUs",
            do="use --gpus-per-node and srun --gpu-bind=none, as grappe submit does",
        )
    elif needed > visible:
        yield error(
            f"{local} processes on this node need {needed} GPUs, {visible} are visible",
            why="training would end at its first step",
            do=f"ask for {needed} GPUs a node, use fewer processes, or per_device={-(-local // visible)}",
        )
    elif needed < visible:
        yield note(
            f"{visible} GPUs are visible, the plan uses {needed}",
            why="the others are paid for and idle",
            do=f"use replicate={visible * per_device}, or ask for fewer",
        )
