"""Joules from a fake powercap tree, and from a GPU where there is one."""

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from grappe.profiling import energy


def zone(root: Path, place: str, name: str, microjoules: int, reach: int = 1_000_000) -> Path:
    made = root / place
    made.mkdir(parents=True)
    (made / "name").write_text(f"{name}\n")
    (made / "energy_uj").write_text(f"{microjoules}\n")
    (made / "max_energy_range_uj").write_text(f"{reach}\n")
    return made / "energy_uj"


def test_packages_and_memories_add_up_and_what_is_inside_them_does_not(tmp_path: Path) -> None:
    first = zone(tmp_path, "intel-rapl:0", "package-0", 500_000)
    core = zone(tmp_path, "intel-rapl:0:0", "core", 1)
    memory = zone(tmp_path, "intel-rapl:0:1", "dram", 7)
    around = zone(tmp_path, "intel-rapl:1", "psys", 3)
    found = energy.processor_counters(tmp_path)
    assert [counter.name for counter in found.counters] == ["package-0", "dram"]
    assert not found.missing
    assert energy.total(found.counters) == 0.0
    first.write_text("750000\n")
    memory.write_text("250007\n")
    for other in (core, around):
        other.write_text("999999\n")
    assert energy.total(found.counters) == pytest.approx(0.5)


def test_a_counter_that_wraps_goes_on(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 900_000)
    counters = energy.processor_counters(tmp_path).counters
    file.write_text("100000\n")
    assert energy.total(counters) == pytest.approx(0.2)
    file.write_text("50000\n")
    assert energy.total(counters) == pytest.approx(0.2 + 0.95)


def test_what_cannot_be_measured_says_why(tmp_path: Path) -> None:
    assert "no powercap" in energy.processor_counters(tmp_path / "none").missing
    assert "no processor" in energy.processor_counters(tmp_path).missing
    assert energy.total(()) is None
    file = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    file.write_text("what?\n")
    assert "cannot be read" in energy.processor_counters(tmp_path).missing


def test_a_counter_for_root_only_says_what_to_do(tmp_path: Path, monkeypatch) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    read = Path.read_text

    def as_another(path: Path, *arguments) -> str:  # who runs the tests may be root, who reads everything
        if path == file:
            raise PermissionError
        return read(path, *arguments)

    monkeypatch.setattr(Path, "read_text", as_another)
    assert "root only" in energy.processor_counters(tmp_path).missing


def test_a_counter_that_goes_away_is_none(tmp_path: Path) -> None:
    file = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    counters = energy.processor_counters(tmp_path).counters
    file.unlink()
    assert energy.total(counters) is None


def test_a_gpu_that_tells_no_more_ends_no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver's library stands in: the GPU tells its energy once, and no utilisation."""
    lost = type("NVMLError", (Exception,), {})
    energies = iter([1000])

    def refuse(handle: object) -> None:
        raise lost("not supported")

    def consumed(handle: object) -> int:
        return next(energies, None) or refuse(handle)  # type: ignore[return-value]

    library = SimpleNamespace(
        NVMLError=lost,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByUUID=lambda identity: identity,
        nvmlDeviceGetName=lambda handle: "a GPU",
        nvmlDeviceGetTotalEnergyConsumption=consumed,
        nvmlDeviceGetUtilizationRates=refuse,
    )
    monkeypatch.setitem(sys.modules, "pynvml", library)  # type: ignore[arg-type]
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="a"))
    (gpu,) = energy.gpu_counters(0).counters
    assert isinstance(gpu, energy.Gpu) and gpu.utilisation() is None
    assert energy.total((gpu,)) is None


def test_a_gpu_tells_its_joules_or_why_not() -> None:
    found = energy.gpu_counters(0)
    if not torch.cuda.is_available():
        assert not found.counters
        assert found.missing
        return
    assert found.counters, found.missing
    work = torch.ones(4096, 4096, device="cuda")
    until = time.monotonic() + 0.5
    while time.monotonic() < until:
        (work @ work).sum().item()
    assert found.counters[0].joules() > 1
