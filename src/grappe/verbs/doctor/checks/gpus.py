"""Check of GPUs: number and visibility to each process, whether they compute, memory errors that were not corrected."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from grappe.launch import command
from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning
from grappe.words import first_line

LOST = 15  # nvidia-smi's exit code: a GPU has fallen off the bus


def check(machine: Machine) -> Iterator[Finding]:
    """Compares the number of processes on this node with the GPUs that this process sees, and tries its own."""
    import torch

    if machine.plan.device == "cpu":
        return
    if machine.is_node_leader:
        yield from of_driver()
    if not torch.cuda.is_available():
        return
    visible, per_device, process = torch.cuda.device_count(), machine.plan.per_device, machine.process
    local = process.local_size if process.size > 1 else machine.plan.processes
    yield from of_gpus(visible, local, per_device, process.launcher)
    own = [process.local_rank // per_device % visible] if process.size > 1 else range(min(visible, local))
    for index in own:
        yield from of_computing(torch.device("cuda", index))


def of_driver() -> Iterator[Finding]:
    """Returns what NVIDIA's driver says: a GPU of this node is lost, or ECC could not correct errors of its memory."""
    query = "--query-gpu=index,ecc.errors.uncorrected.volatile.total"
    try:
        lines = command.run("nvidia-smi", query, "--format=csv,noheader,nounits").splitlines()
    except command.Missing:
        return
    except command.Failed as mistake:
        if mistake.code == LOST:
            yield _of_node(warning("a GPU of this node is lost", why=first_line(mistake)))
        return
    for line in lines:
        index, _, errors = line.partition(", ")
        if errors.isdigit() and int(errors):  # "[N/A]" without ECC
            what = f"GPU {index} had {errors} errors in its memory that ECC could not correct"
            yield _of_node(warning(what, why="a training on it may end, or compute wrongly"))


def of_computing(device: Any) -> Iterator[Finding]:
    """Returns a finding if a GPU does not compute; one whose memory others hold is not broken."""
    import torch

    try:
        mean = torch.ones(1024, device=device).square().mean().item()
        why = "" if mean == 1 else f"the mean of ones is {mean:g} there"
    except torch.OutOfMemoryError:
        return
    except RuntimeError as mistake:
        why = first_line(mistake)
    if why:
        yield _of_node(error(f"GPU {device.index} does not compute", why=why))


def _of_node(finding: Finding) -> Finding:
    return dataclasses.replace(finding, do="tell the site; a job notes it against the node", of_node=True)


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
