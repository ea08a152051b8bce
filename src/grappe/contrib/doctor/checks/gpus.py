"""Checks of GPUs: their number, generation and health, MPS, and sizes that are slow on tensor cores."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from grappe import finder
from grappe.contrib.doctor.checks import Finding, Level, Machine, error, note, of_level, once, once_a_node, warning
from grappe.errors import GrappeError
from grappe.launch import command
from grappe.launch.mps import CLIENTS, PROGRAM
from grappe.launch.world import own_cores
from grappe.sites.advice import unfit_precision
from grappe.words import and_more, first_line

LOST = 15  # nvidia-smi's exit code: a GPU has fallen off the bus
FIRST_NCCL = (2, 30)  # that lets processes share a GPU
STEP = 8  # of tensor cores' sizes
SHOWN = 4


class VisibleGpu(NamedTuple):
    """A GPU that this process sees."""

    name: str
    gigabytes: float
    capability: tuple[int, int] | None
    """NVIDIA's compute capability; None of AMD's GPUs."""
    architecture: str = ""
    """AMD's name of the architecture: gfx90a."""


@once_a_node
def check_devices(machine: Machine) -> Iterator[Finding]:
    """Lists the devices that the plan would use, and the threads of torch."""
    import torch

    if machine.plan.device != "cpu" and torch.cuda.is_available():
        hip, devices = torch.version.hip, []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            architecture = "" if hip is None else facts.gcnArchName.partition(":")[0]
            capability = (facts.major, facts.minor) if hip is None else None
            devices.append(VisibleGpu(facts.name, facts.total_memory / 1e9, capability, architecture))
        yield from of_devices(devices, machine.plan.precision, hip)
    threads, between = machine.plan.threads or own_cores(machine.process), torch.get_num_interop_threads()
    yield note(f"threads of each process: {threads} within an operator, up to {between} between operators")


def of_devices(devices: Sequence[VisibleGpu], precision: str, hip: str | None) -> Iterator[Finding]:
    """Returns the list of devices, and findings for a precision that their generation has no units for.

    Args:
        hip: the version of HIP that torch is built for, with ROCm; None: CUDA.
    """
    shown = []
    for index, device in enumerate(devices):
        kind = device.architecture
        if device.capability is not None:
            kind = f"compute capability {device.capability[0]}.{device.capability[1]}"
        shown.append(f"{index}: {device.name}, {device.gigabytes:.0f} GB, {kind}")
    yield note(f"GPUs that torch sees{f' through ROCm (HIP {hip})' if hip else ''}: {'; '.join(shown)}")
    if hip and precision == "tf32":
        yield error(
            "precision=tf32 with ROCm", why="TF32 is a format of NVIDIA's GPUs", do="use precision=bf16, or fp32"
        )
    for name, capability in dict.fromkeys((device.name, device.capability) for device in devices):
        if unfit := unfit_precision(precision, name, capability):
            yield warning(unfit[0], why=unfit[1], do=unfit[2])


def check_gpus(machine: Machine) -> Iterator[Finding]:
    """Compares the number of processes on this node with the GPUs that this process sees, and tries its own."""
    import torch

    if machine.plan.device == "cpu":
        return
    if not machine.process.local_rank:
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
            yield _fault_of_node("warning", "a GPU of this node is lost", first_line(mistake))
        return
    for line in lines:
        index, _, errors = line.partition(", ")
        if errors.isdigit() and int(errors):  # "[N/A]" without ECC
            what = f"GPU {index} had {errors} errors in its memory that ECC could not correct"
            yield _fault_of_node("warning", what, "a training on it may end, or compute wrongly")


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
        yield _fault_of_node("error", f"GPU {device.index} does not compute", why)


def _fault_of_node(level: Level, what: str, why: str) -> Finding:
    finding = of_level(level, what, why=why, do="tell the site; a job notes it against the node")
    return dataclasses.replace(finding, of_node=True)


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


def check_mps(machine: Machine) -> Iterator[Finding]:
    """Checks plans with per_device > 1: NVIDIA's MPS, and the communication library."""
    import torch

    plan = machine.plan
    if torch.version.hip is not None:
        if plan.per_device > 1:
            yield note(
                "AMD's GPUs have no MPS: the processes on each share it as ROCm schedules them",
                why="it need not be quicker than one process on each",
                do="compare: grappe measure TASK --plan per_device=1 …",
            )
        return
    if plan.per_device == 1 or plan.device == "cpu" or not torch.cuda.is_available():
        return
    nccl = torch.cuda.nccl.version()[:2] if plan.backend == "nccl" else FIRST_NCCL
    yield from of_sharing(plan.per_device, plan.backend, nccl, program=shutil.which(PROGRAM) is not None)


def of_sharing(clients: int, backend: str, nccl: tuple[int, ...], *, program: bool) -> Iterator[Finding]:
    """Returns findings for `clients` processes on each GPU."""
    if not program:
        yield warning(
            f"there is no {PROGRAM} here",
            why="processes that share a GPU take turns on it instead of running together",
            do="load the site's CUDA module, or ask for nodes with MPS",
        )
    if clients > CLIENTS:
        yield error(f"per_device={clients}", why=f"MPS takes {CLIENTS} processes a GPU", do="use fewer")
    if backend == "nccl" and nccl < FIRST_NCCL:
        yield error(
            f"backend=nccl with per_device={clients}, and NCCL {'.'.join(map(str, nccl))}",
            why='before 2.30 it fails with "Duplicate GPU detected"',
            do="leave backend out: gloo carries them",
        )


@once
def check_sizes(machine: Machine) -> Iterator[Finding]:
    """Builds the task's model without memory, and checks its layers; a task that cannot be built is an error."""
    if machine.task is None:
        return
    import torch

    try:
        task = finder.make(finder.find(machine.task), machine.fields)
        with torch.device("meta"):
            model = task.model()
    except GrappeError as mistake:
        yield error(str(mistake), why="training would end at once")
        return
    except Exception as mistake:
        yield note(f"the task's model could not be built without memory ({type(mistake).__name__}): sizes not checked")
        return
    if machine.plan.precision != "fp32":
        slices = machine.plan.data_parallel * machine.plan.microbatches
        yield from of_sizes(model, -(-task.batch_size // slices))


def of_sizes(model: Any, rows: int) -> Iterator[Finding]:
    """Returns findings for layers that get `rows` samples at once. The course DLO-JZ recommends multiples of 8."""
    from torch import nn

    odd, why = list[str](), "tensor cores work on multiples of 8"
    for name, layer in model.named_modules():
        sizes: tuple[int, ...] = ()
        if isinstance(layer, nn.Linear):
            sizes = (layer.in_features, layer.out_features)
        elif isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            sizes = (layer.out_channels,)  # input channels of images are few, and padded
        odd += [f"{name} ({size})" for size in sizes if size % STEP]
    if odd:
        what = f"sizes that are no multiple of {STEP}: {and_more(odd, SHOWN)}"
        yield note(what, why=why, do="pad them, where the task allows it")
    if rows % STEP:
        what = f"each process sees {rows} samples at once, no multiple of {STEP}"
        yield note(what, why=why, do="choose batch_size so that each slice is one")
