"""Checks of Python's packages: torch's build for this machine, broken packages, and packages of other Pythons."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import re
import site
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Set
from pathlib import Path

from grappe.contrib.doctor.checks import Finding, Machine, error, note, once_a_node, warning
from grappe.contrib.slurm.packages import modules_of_file
from grappe.errors.causes import WATCHED, broken_package, hidden_modules
from grappe.words import NVIDIA, and_more, driver_version

AMD = Path("/dev/kfd")
"""The files by which programs reach the GPUs of either maker."""
IMPORTED = ("torchvision", "torchaudio", "torchmetrics")
"""Modules that grappe or its libraries import where they are installed."""
USING_METRICS = {"grappe", "lightning", "pytorch_lightning"}
"""Modules that import torchmetrics."""
SHOWN = 5


def check_torch_build(machine: Machine) -> Iterator[Finding]:
    """Compares the targets of torch's build with this machine."""
    import torch
    import torch.distributed as dist

    plan = machine.plan
    if plan.backend == "mpi" and not dist.is_mpi_available():
        yield error(
            "this torch has no MPI",
            why="pip's and conda's builds have none",
            do="use backend=gloo or nccl, or build torch from source against your MPI",
        )
    if torch.cuda.is_available():
        capabilities = [torch.cuda.get_device_capability(index) for index in range(torch.cuda.device_count())]
        yield from of_architectures(torch.cuda.get_arch_list(), capabilities, torch.__version__)
        if plan.precision == "fp32" and torch.backends.cuda.matmul.allow_tf32:
            yield warning(
                "TF32 is switched on for matrix products",
                why="plan precision=fp32 rounds them to 10 bits then",
                do="unset TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, or use precision=tf32",
            )
        if plan.per_device == 1 and plan.processes > 1 and not dist.is_nccl_available():
            yield error(
                "this torch has no NCCL", why="GPUs cannot exchange gradients", do="use another build, or backend=gloo"
            )
    elif plan.device == "cpu":
        return
    elif NVIDIA.exists():
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
    elif plan.device == "cuda":
        yield error("there is no GPU here", why="the plan says device=cuda", do="ask Slurm for GPUs, or use device=cpu")
    elif machine.environment.get("SLURM_GPUS_ON_NODE", "0") not in ("", "0"):
        yield warning(
            "Slurm gave this job GPUs, and no driver is here", why="training runs on CPU cores", do="tell the site"
        )
    else:
        yield note("no GPU here: training runs on CPU cores")


def of_architectures(built: Iterable[str], capabilities: Iterable[tuple[int, int]], version: str) -> Iterator[Finding]:
    """Returns findings for GPUs without code in torch: native (same major version), or translatable by the driver."""
    targets = list(built)
    parts = [re.fullmatch(r"(sm|compute)_(\d+)[af]?", part) for part in targets]  # another maker's are not judged
    numbers = [(part[1], int(part[2])) for part in parts if part]
    for major, minor in sorted(set(capabilities)) if numbers else ():
        own = major * 10 + minor
        native = any(kind == "sm" and number // 10 == major and number <= own for kind, number in numbers)
        if not native and not any(kind == "compute" and number <= own for kind, number in numbers):
            yield error(
                f"torch {version} has no code for this GPU (sm_{own})",
                why='it fails with "no kernel image is available for execution on the device"; '
                f"it has {', '.join(targets)}",
                do="install a torch built for this GPU, or ask for another kind of GPU",
            )


def check_broken_packages(machine: Machine) -> Iterator[Finding]:
    """Imports each of IMPORTED that is used: a torchvision made for another torch stops torchmetrics."""
    used, why = {*IMPORTED}, "torchmetrics imports it, so nothing can be evaluated"
    if machine.script is not None:
        used, why = modules_of_file(machine.script), "the script imports it"
        used |= {"torchmetrics"} if used & USING_METRICS else set()
    named = set[str]()
    for name in IMPORTED:
        if name not in used or importlib.util.find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as problem:
            what, _, do = (broken_package(problem) or f"{name} cannot be imported: {problem}").partition("; ")
            if what not in named:
                yield error(what, why=why, do=do)
            named.add(what)


@once_a_node
def check_python_paths(machine: Machine) -> Iterator[Finding]:
    """Compares the packages of the folders that Python looks in."""
    own = packages_in({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")})
    user = site.getusersitepackages()
    if site.ENABLE_USER_SITE and user in sys.path:
        yield from of_user_site(user, packages_in({user}), own)
    path = machine.environment.get("PYTHONPATH", "")
    for entry in filter(None, path.split(":")):
        if not Path(entry).is_dir():
            yield note(f"PYTHONPATH names {entry}, which is not a folder")
    for entry, names in hidden_modules(path).items():
        yield warning(
            f"PYTHONPATH={entry} hides installed modules: {and_more(names, SHOWN)}",
            why="Python imports from there first, whatever is installed",
            do="unset PYTHONPATH (a module may have set it: module list)",
        )


@once_a_node
def check_conda(machine: Machine) -> Iterator[Finding]:
    """Compares the active conda environment with this Python's; conda's base should not be used."""
    prefix, active = sys.prefix, machine.environment.get("CONDA_PREFIX", "")
    name = machine.environment.get("CONDA_DEFAULT_ENV", "")
    if active and Path(prefix).resolve() != Path(active).resolve():
        yield warning(
            f"conda's environment {name or active} is active, and this Python is another ({prefix})",
            why="programs and libraries of both are mixed",
            do="conda deactivate; and once: conda config --set auto_activate_base false",
        )
    elif active and name == "base":
        yield note(
            "this Python is conda's base",
            why="updating conda changes it",
            do="conda create --name grappe, and submit with --env conda:grappe",
        )


def packages_in(folders: Set[str]) -> set[str]:
    """Lists the names of the packages that are installed in folders."""
    names = (package.metadata["Name"] for package in importlib.metadata.distributions(path=sorted(folders)))
    return {str(name).lower().replace("_", "-") for name in names if name}


def of_user_site(folder: str, user: Set[str], own: Set[str]) -> Iterator[Finding]:
    """Returns findings for packages that the user installed for all of their Pythons of this version."""
    if twice := user & own:
        some = and_more(sorted(twice, key=lambda name: (name not in WATCHED, name)), SHOWN)
        yield warning(
            f"{some}: installed in this environment, and in {folder} as well",
            why="Python takes the user's own where it looks there first, and the two need not fit each other",
            do="export PYTHONNOUSERSITE=1 (jobs of grappe submit have it), or pip uninstall them there",
        )
    elif user:
        yield note(f"{len(user)} packages come from {folder}, which all of your Pythons of this version share")
