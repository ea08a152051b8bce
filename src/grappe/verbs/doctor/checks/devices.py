"""Check of the devices: lists them with their generation, and judges the plan's precision by it; lists the threads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from grappe.launch.world import own_cores
from grappe.sites.advice import unfit_precision
from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning


class VisibleGpu(NamedTuple):
    """A GPU that this process sees."""

    name: str
    gigabytes: float
    capability: tuple[int, int] | None
    """NVIDIA's compute capability; None of AMD's GPUs."""
    architecture: str = ""
    """AMD's name of the architecture: gfx90a."""


def check(machine: Machine) -> Iterator[Finding]:
    """Lists the devices that the plan would use, on each node once, and the threads of torch."""
    if not machine.is_node_leader:
        return
    import torch

    if machine.plan.device != "cpu" and torch.cuda.is_available():
        hip, devices = torch.version.hip, []
        for index in range(torch.cuda.device_count()):
            facts = torch.cuda.get_device_properties(index)
            architecture = "" if hip is None else facts.gcnArchName.partition(":")[0]
            capability = (facts.major, facts.minor) if hip is None else None
            devices.append(VisibleGpu(facts.name, facts.total_memory / 1e9, capability, architecture))
        yield from of_devices(devices, machine.plan.precision, hip)
    threads = machine.plan.threads or own_cores(machine.process)
    yield from of_threads(threads, torch.get_num_interop_threads())


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


def of_threads(threads: int, between: int) -> Iterator[Finding]:
    """Returns the threads of torch: within an operator, and between operators (TorchScript's fork, mostly)."""
    yield note(f"threads of each process: {threads} within an operator, up to {between} between operators")
