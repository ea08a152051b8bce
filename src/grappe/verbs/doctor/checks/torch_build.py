"""Check of torch's build against this machine: GPU architectures, driver, faulty versions, communication libraries."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from grappe.verbs.doctor.checks import Finding, Machine, error, note, warning

# From the Alliance's PyTorch page and its page on H100.
BAD_VERSIONS = (
    ((0, 0), (1, 0, 1), "leaks memory on CPUs with AVX512 until the job is killed"),
    ((1, 10), (1, 11), "loses Python's traceback of errors in C++ (c10::Error), and DDP fails at random"),
)
NVIDIA, AMD_DRIVER = Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version")
AMD = Path("/dev/kfd")
"""The files by which programs reach the GPUs of either maker."""
H100 = (9, 0)
FIRST_FOR_H100 = (2, 5, 1)


def check(machine: Machine) -> Iterator[Finding]:
    """Compares the targets of torch's build with this machine."""
    import torch
    import torch.distributed as dist

    yield from of_version(torch.__version__)
    if machine.plan.backend == "mpi" and not dist.is_mpi_available():
        yield error(
            "this torch has no MPI",
            why="pip's and conda's builds have none",
            do="use backend=gloo or nccl, or build torch from source against your MPI",
        )
    if torch.cuda.is_available():
        capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        yield from of_architectures(torch.cuda.get_arch_list(), capabilities, torch.__version__)
        if machine.plan.precision == "fp32" and torch.backends.cuda.matmul.allow_tf32:
            yield warning(
                "TF32 is switched on for matrix products",
                why="plan precision=fp32 rounds them to 10 bits then",
                do="unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, or use precision=tf32",
            )
        if machine.plan.per_device == 1 and machine.plan.processes > 1 and not dist.is_nccl_available():
            yield error(
                "this torch has no NCCL", why="GPUs cannot exchange gradients", do="use another build, or backend=gloo"
            )
        return
    if machine.plan.device == "cpu":
        return
    if NVIDIA.exists():
        built = torch.version.cuda or "no CUDA"
        yield error(
            f"there is a GPU, and torch {torch.__version__} (built for {built}) cannot use it",
            why=f"driver: {driver_version(NVIDIA.read_text())}",
            do="install a torch built for this driver, or check CUDA_VISIBLE_DEVICES; device=cpu does not need it",
        )
    elif AMD.exists() and torch.version.hip is None:
        yield error(
            f"there is a GPU of AMD's ({AMD}), and torch {torch.__version__} is not built for ROCm",
            why="it would train on CPU cores",
            do="install a torch for ROCm (pytorch.org, or the site's module); device=cpu does not need it",
        )
    elif machine.plan.device == "cuda":
        yield error("there is no GPU here", why="the plan says device=cuda", do="ask Slurm for GPUs, or use device=cpu")
    elif machine.environment.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
        yield warning(
            "Slurm gave this job GPUs, and no driver is here", why="training runs on CPU cores", do="tell the site"
        )
    else:
        yield note("no GPU here: training runs on CPU cores")


def of_version(version: str) -> Iterator[Finding]:
    """Returns findings about a version of torch."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
    for first, beyond, why in BAD_VERSIONS:
        if first <= numbers < beyond:
            yield error(f"torch {version} has known faults", why=why, do="install a newer one")


def of_architectures(built: Iterable[str], capabilities: Iterable[tuple[int, int]], version: str) -> Iterator[Finding]:
    """Returns findings for GPUs without code in torch: native (same major version), or translatable by the driver."""
    targets = list(built)
    parts = [re.fullmatch(r"(sm|compute)_(\d+)[af]?", part) for part in targets]  # another maker's are not judged
    numbers = [(part[1], int(part[2])) for part in parts if part]
    for major, minor in sorted(set(capabilities)):
        own = major * 10 + minor
        native = any(kind == "sm" and number // 10 == major and number <= own for kind, number in numbers)
        translated = any(kind == "compute" and number <= own for kind, number in numbers)
        if numbers and not native and not translated:
            yield error(
                f"torch {version} has no code for this GPU (sm_{own})",
                why='it fails with "no kernel image is available for execution on the device"; '
                f"it has {', '.join(targets)}",
                do="install a torch built for this GPU, or ask for another kind of GPU",
            )
        torch_version = tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0])[:3])
        if numbers and (major, minor) == H100 and torch_version < FIRST_FOR_H100:
            yield warning(
                f"torch {version} on an H100",
                why="wheels before 2.5.1 fail or are slow there",
                do="install a newer one",
            )


def driver_version(text: str) -> str:
    """Reads the version in a driver's file."""
    match = re.search(r"\d+\.\d+(\.\d+)?", text)
    return match[0] if match else "unknown"
