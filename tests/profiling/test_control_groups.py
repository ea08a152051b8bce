"""Control groups as Linux writes them, of version 1 and 2: of this process, and those above it."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe.launch.world import cores
from grappe.profiling.control_groups import cpu_quota


def second(folder: Path, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.max").write_text(text + "\n")


def first(folder: Path, quota: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.cfs_quota_us").write_text(quota + "\n")
    (folder / "cpu.cfs_period_us").write_text("100000\n")


@pytest.mark.parametrize(
    ("text", "quota"), [("max 100000", None), ("200000 100000", 2), ("150000 100000", 1), ("50000 100000", 1)]
)
@pytest.mark.parametrize("where", ["", "system.slice", "system.slice/job_7"])
def test_a_quota_of_version_2(tmp_path: Path, own: Path, where: str, text: str, quota: int | None) -> None:
    second(tmp_path / "cgroup" / where, text)
    assert cpu_quota(tmp_path / "cgroup", own) == quota


@pytest.mark.parametrize(("text", "quota"), [("-1", None), ("400000", 4), ("10000", 1)])
@pytest.mark.parametrize("where", ["", "slurm", "slurm/job_8/step_1"])
def test_a_quota_of_version_1(tmp_path: Path, own: Path, where: str, text: str, quota: int | None) -> None:
    first(tmp_path / "cgroup/cpu" / where, text)
    assert cpu_quota(tmp_path / "cgroup", own) == quota


def test_the_least_quota_holds(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    second(root, "max 100000")
    second(root / "system.slice", "300000 100000")
    second(root / "system.slice/job_7", "600000 100000")
    second(root / "system.slice/job_8", "100000 100000")
    assert cpu_quota(root, own) == 3


def test_no_control_group(tmp_path: Path, own: Path) -> None:
    assert cpu_quota(tmp_path, own) is None
    assert cpu_quota(tmp_path, tmp_path / "none") is None
    assert cores() >= 1
