"""Trials that run at a time have GPUs of their own, as far as there are enough."""

from pathlib import Path

import pytest

from grappe.contrib.tune.trainings import gpu_variables, gpus_needed, visible_gpus
from grappe.plan import Plan


def test_what_is_visible(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia3", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ["0", "1"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "2, GPU-ab"}, tmp_path) == ["2", "GPU-ab"]
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


@pytest.mark.parametrize(
    ("plan", "place", "gpus", "found"),
    [
        ("", 0, "0123", "0"),
        ("", 5, "0123", "1"),
        ("replicate=2", 1, "0123", "2,3"),
        ("replicate=2", 2, "01234", "0,1"),
        ("replicate=4", 1, "0123", None),
        ("", 1, "0", None),
        ("", 1, "", None),
        ("device=cpu", 1, "0123", None),
    ],
)
def test_places(plan: str, place: int, gpus: str, found: str | None) -> None:
    one = Plan.parse(plan)
    assert gpu_variables(one, place, list(gpus), gpus_needed(one)).get("CUDA_VISIBLE_DEVICES") == found


def test_places_of_different_plans_have_no_gpu_in_common() -> None:
    small, large = Plan.parse(""), Plan.parse("replicate=2")
    found = [gpu_variables(one, place, list("0123"), 2) for place, one in enumerate((large, small))]
    assert [one["CUDA_VISIBLE_DEVICES"] for one in found] == ["0,1", "2"]
