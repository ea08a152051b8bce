"""Tests of `grappe doctor --gpu`, on the CPU, and of its line where there is no GPU."""

import pytest
import torch

from grappe.contrib.doctor import on_device
from grappe.contrib.doctor.on_device import DeviceTrial
from grappe.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE
from grappe.profiling import energy
from tests.typed import ended

CPU = torch.device("cpu")


class Meter:
    """A GPU's counter that reads as it is told."""

    def __init__(self, watts: float) -> None:
        self._watts = watts

    def watts(self) -> float:
        return self._watts

    def limit_watts(self) -> float:
        return 700.0


@pytest.mark.slow
def test_draws_and_the_exact_pair_have_the_same_bits() -> None:
    trials = [*on_device.draws(CPU), on_device.exact_pair("cpu")]
    assert [one.verdict for one in trials] == ["passed"] * len(trials)
    assert len({one.what for one in trials}) == 14


def test_a_draw_that_differs_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("grappe.data.draw.draw", lambda keys, n: torch.rand(len(keys), n))
    first = next(on_device.draws(CPU))
    assert first.verdict == "FAILED"
    assert "0 of" not in first.text


def test_an_exact_pair_that_differs_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_device, "_trained", lambda plan, folder: plan)
    assert on_device.exact_pair("cpu").verdict == "FAILED"


def test_readings_of_a_gpu_are_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [one.verdict for one in on_device.readings(CPU)] == ["not tried"]
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (80e9, 85e9))
    for counters, verdict in (((Meter(110),), "passed"), ((Meter(0),), "FAILED"), ((), "not tried")):
        found = energy.EnergyCounters(counters=counters, missing="it is not told")  # type: ignore[arg-type]
        monkeypatch.setattr(energy, "gpu_counters", lambda index, found=found: found)
        memory, power = on_device.readings(torch.device("cuda", 0))
        assert (memory.verdict, power.verdict) == ("passed", verdict)
        assert memory.text == "80.0 of 85.0 GB free"


def test_without_a_gpu_it_says_so_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert ended("doctor", "--gpu") == EXIT_USAGE
    output = capsys.readouterr()
    assert output.err.count("\n") == 1
    assert "torch sees no GPU here" in output.err
    assert not output.out


def test_a_failed_trial_ends_with_a_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    for right, code in ((True, EXIT_OK), (False, EXIT_FAILURE)):
        trials = [DeviceTrial(what="power", right=None, text="none"), DeviceTrial(what="draws", right=right, text="0")]
        monkeypatch.setattr(on_device, "try_gpu", lambda trials=trials: iter(trials))
        assert ended("doctor", "--gpu") == code
    power, draws = "not tried  power: none", ("passed     draws: 0", "FAILED     draws: 0")
    assert capsys.readouterr().out.splitlines() == [power, draws[0], power, draws[1]]
