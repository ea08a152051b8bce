"""Each of the doctor's checks, with what it must find and what it must leave alone."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from torch import nn

from grappe.contrib.doctor import checks
from grappe.contrib.doctor.checks import Finding, Machine, gpus, host, job, python
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from tests.gpu_stand_in import gpu_stand_in
from tests.typed import stand_in


def machine(plan: str = "device=cpu", *, process: ProcessRank | None = None, **changes) -> Machine:
    known = {"folder": Path("/tmp"), "job": False, "environment": {}, **changes}
    return Machine(process=process or ProcessRank(), plan=Plan.parse(plan), **known)


def words(found) -> str:
    return "; ".join(f"{one.level}: {one.what}" for one in found)


@pytest.mark.parametrize(
    ("built", "capability", "fits"),
    [
        (["sm_80", "sm_90"], (8, 0), True),
        (["sm_80", "sm_90"], (8, 6), True),  # code of the same major version runs
        (["sm_80", "sm_90"], (7, 0), False),
        (["sm_80", "sm_90"], (10, 0), False),
        (["sm_80", "compute_90"], (10, 0), True),  # the driver translates
        (["sm_37", "sm_50"], (9, 0), False),
        (["gfx90a"], (9, 0), True),  # of another maker: not judged
    ],
)
def test_architectures(built: list[str], capability: tuple[int, int], fits: bool) -> None:
    found = [one for one in python.of_architectures(built, [capability], "2.11.0") if one.level == "error"]
    assert bool(found) is not fits
    assert all("no kernel image" in one.why for one in found)


def test_cores() -> None:
    assert not list(host.of_cores(8, 4, 4, 0, requested=None))
    assert "threads=8" in words(host.of_cores(8, 4, 8, 0, requested=None))
    assert "workers=6" in words(host.of_cores(8, 4, 1, 6, requested=None))
    assert "asked for 4 cores" in words(host.of_cores(1, 1, 1, 0, requested=4))
    assert "OMP_NUM_THREADS=999" in words(host.check_cores(machine(environment={"OMP_NUM_THREADS": "999"})))


def test_memory() -> None:
    assert "shared memory" in words(host.of_memory(64 << 20, None, None, 8))
    assert not list(host.of_memory(64 << 20, 0, None, 8))
    assert "may use 4.3 GB" in words(host.of_memory(None, None, 4 << 30, 8))


def test_gpus() -> None:
    assert not list(gpus.of_gpus(4, 4, 1, "srun"))
    assert "sees one GPU only" in words(gpus.of_gpus(1, 4, 1, "srun"))
    assert "error: 4 processes on this node need 4 GPUs, 2 are visible" in words(gpus.of_gpus(2, 4, 1, "grappe"))
    assert not list(gpus.of_gpus(1, 8, 8, "srun"))
    assert "note: 4 GPUs are visible, the plan uses 1" in words(gpus.of_gpus(4, 1, 1, "grappe"))


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("echo '0, 0'; echo '1, [N/A]'", ""),
        ("echo '0, 0'; echo '1, 3'", "warning: GPU 1 had 3 errors in its memory that ECC could not correct"),
        ("echo 'GPU is lost.' >&2; exit 15", "warning: a GPU of this node is lost"),
        ("echo 'no driver' >&2; exit 9", ""),
    ],
)
def test_what_the_driver_says_of_a_gpu(tmp_path: Path, monkeypatch, script: str, expected: str) -> None:
    """nvidia-smi is a stand-in, with the exit codes of its manual."""
    stand_in(tmp_path, monkeypatch, **{"nvidia-smi": script})
    found = list(gpus.of_driver())
    assert words(found) == expected
    assert all(one.of_node for one in found)


def test_a_gpu_that_does_not_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the stand-in for GPUs, whose every number is 1; then one that fails, or whose memory is taken."""
    with gpu_stand_in(monkeypatch) as gpu:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
        assert not list(gpus.check_gpus(machine("replicate=2")))
        assert len(gpu.waits) == 2, "each GPU is tried"
        second = ProcessRank(rank=1, size=2, local_rank=1, local_size=2, launcher="srun", job="7-0-0")
        for mistake, expected in (
            (RuntimeError("CUDA error: uncorrectable ECC error encountered"), "error: GPU 1 does not compute"),
            (torch.OutOfMemoryError("CUDA out of memory"), ""),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(torch, "ones", raises(mistake))
                found = list(gpus.check_gpus(machine("replicate=2", process=second)))
            assert words(found) == expected
            assert [one.why for one in found if one.of_node] == [str(mistake)] * bool(expected)


def raises(mistake: Exception) -> Callable[..., NoReturn]:
    def function(*_: object, **__: object) -> NoReturn:
        raise mistake

    return function


def test_a_folder(tmp_path: Path) -> None:
    assert not [one for one in host.check_run_folder(machine(folder=tmp_path / "not" / "yet")) if one.level == "error"]
    assert not list(tmp_path.iterdir())
    assert "takes 1.0 MB/s" in words(host.of_folder(tmp_path, 1e6, 10 << 30, None))
    assert "0.0 GB left" in words(host.of_folder(tmp_path, 1e9, 1000, None))
    assert "5 more files" in words(host.of_folder(tmp_path, 1e9, 10 << 30, 5))
    assert "error: /proc cannot be written" in words(host.check_run_folder(machine(folder=Path("/proc"))))


def test_a_quota_that_is_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, quota="echo 'Disk quotas for me (uid 1):'; echo '/home 1000* 900 950'; exit 1")
    assert "a disk quota is used up: /home 1000* 900 950" in words(host.of_quota())


def test_interfaces() -> None:
    world = ["lo", "eth0", "ib0"]
    assert not list(host.of_interfaces({"NCCL_SOCKET_IFNAME": "ib,eth"}, world))
    assert not list(host.of_interfaces({"NCCL_SOCKET_IFNAME": "^lo"}, world))
    assert "GLOO_SOCKET_IFNAME=hsn0" in words(host.of_interfaces({"GLOO_SOCKET_IFNAME": "hsn0"}, world))


def test_a_variable_that_nothing_reads() -> None:
    named = {"TORCH_NCCL_ASYNC_HANDLING": "1"}
    assert "torch reads no TORCH_NCCL_ASYNC_HANDLING" in words(host.check_network(machine(environment=named)))
    named = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    assert "torch reads no" not in words(host.check_network(machine(environment=named)))


def test_processes_that_share_a_gpu() -> None:
    assert not list(gpus.of_sharing(8, "auto", (2, 28), program=True))
    assert "there is no nvidia-cuda-mps-control" in words(gpus.of_sharing(8, "auto", (2, 28), program=False))
    assert "NCCL 2.28" in words(gpus.of_sharing(8, "nccl", (2, 28), program=True))
    assert not list(gpus.of_sharing(8, "nccl", (2, 30), program=True))
    assert "per_device=49" in words(gpus.of_sharing(49, "auto", (2, 30), program=True))


def test_sizes() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 5), nn.Linear(64, 10), nn.Linear(16, 8))
    assert "0 (6), 1 (10)" in words(gpus.of_sizes(model, 64))
    assert "12 samples at once" in words(gpus.of_sizes(nn.Linear(8, 8), 12))
    assert not list(gpus.of_sizes(nn.Linear(8, 8), 64))
    assert "did you mean epochs" in words(gpus.check_sizes(machine(task="digits", fields={"epocs": "3"})))
    assert not list(gpus.check_sizes(machine(task="digits")))  # fp32 uses no tensor cores


def test_stale_variables_and_processes_that_do_not_fit() -> None:
    process = ProcessRank(rank=0, size=4, local_rank=0, local_size=4, launcher="srun")
    found = job.check_allocation(
        machine("replicate=2,device=cpu", process=process, job=True, environment={"SLURM_JOB_ID": "1"})
    )
    assert "the plan has 2 processes, srun started 4" in words(found)
    told = {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "2"}
    assert "this is none of them" in words(job.check_allocation(machine("replicate=2", job=True, environment=told)))


def test_a_check_that_fails_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Machine):
        raise RuntimeError("its own mistake")

    monkeypatch.setattr(host, "check_cores", broken)
    found = list(checks.examine(machine(folder=Path("/proc"))))
    assert "the check cores failed: RuntimeError: its own mistake" in words(found)
    assert "/proc cannot be written" in words(found)


def test_a_file_of_checks_that_cannot_be_imported_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        checks, "importlib", SimpleNamespace(import_module=lambda name: host if "host" in name else 1 / 0)
    )
    found = words(checks.examine(machine(folder=Path("/proc"))))
    assert "the check python failed: ZeroDivisionError" in found
    assert "/proc cannot be written" in found


def test_this_machine_can_train() -> None:
    found = list(checks.examine(machine("device=cpu,threads=1,workers=0")))
    assert not [one for one in found if one.level == "error"], words(found)
    assert all(isinstance(one, Finding) for one in found)
    assert torch.get_num_threads() >= 1


@pytest.mark.parametrize(
    ("precision", "device", "level", "words"),
    [
        ("bf16", gpus.VisibleGpu("V100", 32, (7, 0)), "warning", "precision=bf16 on V100"),
        ("fp16", gpus.VisibleGpu("V100", 32, (7, 0)), "note", "0: V100, 32 GB, compute capability 7.0"),
    ],
)
def test_devices_and_their_generation(precision: str, device: gpus.VisibleGpu, level: str, words: str) -> None:
    found = list(gpus.of_devices([device], precision, None))
    assert found[-1].level == level
    assert words in found[-1].what


def test_devices_of_amd_and_threads_within_and_between_operators() -> None:
    one = gpus.VisibleGpu("MI250X", 64, None, "gfx90a")
    assert "through ROCm (HIP 6.4): 0: MI250X, 64 GB, gfx90a" in words(gpus.of_devices([one], "bf16", "6.4"))
    assert "error: precision=tf32 with ROCm" in words(gpus.of_devices([one], "tf32", "6.4"))
    assert "threads of each process" in words(gpus.check_devices(machine()))


def test_packages_of_other_pythons(tmp_path: Path) -> None:
    twice = words(python.of_user_site("/home/me/.local", {"torch", "rich", "mine"}, {"torch", "rich"}))
    assert twice == "warning: torch, rich: installed in this environment, and in /home/me/.local as well"
    assert words(python.of_user_site("/home/me/.local", {"mine"}, {"torch"})).startswith("note: 1 packages")
    for name in ("numpy/__init__.py", "sklearn/__init__.py", "typing_extensions.py", "my_own.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    installed = Path(torch.__file__).parents[1]
    path = {"PYTHONPATH": f"{tmp_path}:/no/such:{installed}"}
    hidden = words(python.check_python_paths(machine(environment=path)))
    assert f"warning: PYTHONPATH={tmp_path} hides installed modules: numpy, sklearn, typing_ext" in hidden
    assert "my_own" not in hidden and str(installed) not in hidden
    assert "/no/such, which is not a folder" in hidden
    for prefix, told in (
        ("/opt/conda", "warning: conda's environment base is active"),
        (sys.prefix, "note: this Python is conda's base"),
    ):
        base = {"CONDA_PREFIX": prefix, "CONDA_DEFAULT_ENV": "base"}
        assert words(python.check_conda(machine(environment=base))).startswith(told)
    assert not list(python.check_conda(machine()))


def test_a_script_is_not_stopped_by_a_package_that_it_does_not_import(tmp_path: Path, monkeypatch) -> None:
    script = tmp_path / "mine.py"
    (tmp_path / "near.py").write_text("import torchvision.models\n")
    monkeypatch.setattr(python.importlib, "import_module", lambda name: 1 / 0)
    monkeypatch.setattr(python.importlib.util, "find_spec", lambda name: name)
    tried = {
        "import torch": "",
        "import near": "torchvision",
        "import torchaudio": "torchaudio",
        "from lightning.pytorch import Trainer": "torchmetrics",
        "try:\n    import torchaudio\nexcept ImportError:\n    pass": "",
    }
    for text, name in tried.items():
        script.write_text(text)
        assert words(python.check_broken_packages(machine(script=script))).startswith(f"error: {name}" if name else "")
        assert len(list(python.check_broken_packages(machine(script=script)))) == bool(name)
    assert len(list(python.check_broken_packages(machine()))) == 3


def test_the_wheelhouse_is_listed(tmp_path: Path) -> None:
    (tmp_path / "torch-2.8.0-cp311-none-any.whl").touch()
    found = words(job.of_wheelhouse("narval", [str(tmp_path), "https://elsewhere.org"]))
    assert found == f"note: wheelhouse: {tmp_path} (1 wheels, torch 2.8.0)"
    assert "warning: jobs of narval are made of wheels" in words(job.of_wheelhouse("narval", ["/no/such"]))
    assert words(job.check_wheelhouse(machine())) == ""  # the generic site makes no environments


def test_where_files_should_lie(tmp_path: Path) -> None:
    places = {"HOME": str(tmp_path), "SCRATCH": str(tmp_path / "scratch"), "GRAPPE_DATA": str(tmp_path / "data")}
    (tmp_path / ".cache").mkdir()
    places["CC_CLUSTER"] = "narval"
    found = list(job.check_storage(machine(folder=tmp_path / "runs", environment=places)))
    assert [one.level for one in found] == ["warning", "warning", "note"]
    assert "in $HOME (50 GB" in found[0].what
    assert "$SCRATCH (20 TB" in found[0].why
    assert "--run" in found[0].do
    fine = {**places, "GRAPPE_DATA": str(tmp_path / "projects" / "d"), "XDG_CACHE_HOME": str(tmp_path / "scratch")}
    assert not list(job.check_storage(machine(folder=tmp_path / "scratch" / "runs", environment=fine)))


def test_a_gpu_of_amds_without_rocm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python, "AMD", tmp_path)
    monkeypatch.setattr(python, "NVIDIA", tmp_path / "none")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "error: there is a GPU of AMD's" in words(python.check_torch_build(machine("device=auto")))
    assert not list(python.check_torch_build(machine("device=cpu")))
