"""Limits: control groups as Linux writes them, of version 1 and 2, RLIMIT_DATA, and the machine."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.launch.world import cores
from grappe.profiling import memory
from grappe.profiling.memory import ControlGroup, control_group, cpu_quota, free, has_room, killed


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


def test_what_is_damaged_or_absent_limits_nothing(tmp_path: Path, own: Path) -> None:
    assert cpu_quota(tmp_path, own) is None
    assert cpu_quota(tmp_path, tmp_path / "none") is None
    assert cores() >= 1
    write(tmp_path / "cgroup", V2, max="many")
    assert control_group(tmp_path / "cgroup", own) is None
    assert control_group(tmp_path / "none", own) is None


V2 = {"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 500\ninactive_file 30\nactive_file 20\n"}
V1 = {
    "memory.limit_in_bytes": "1000",
    "memory.usage_in_bytes": "700",
    "memory.stat": "inactive_file 1\nactive_file 2\ntotal_inactive_file 30\ntotal_active_file 20\n",
    "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n",
}


def write(folder: Path, files: dict[str, str], **changed: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(changed.get(name.partition(".")[2], text) + "\n")


def test_version_2_is_that_of_the_job_or_of_a_folder_above_it(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    assert control_group(root, own) is None
    write(root / "system.slice" / "job_7", V2)
    assert control_group(root, own) == ControlGroup(size=1000, free=350)
    write(root / "system.slice", V2, max="800")
    assert control_group(root, own) == ControlGroup(size=800, free=150)
    write(root / "system.slice", V2, max="max")
    assert control_group(root, own) == ControlGroup(size=1000, free=350)


def test_version_1_is_that_of_the_job(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    write(root / "memory" / "slurm" / "job_7" / "step_0", V1)
    write(root / "memory", V1, limit_in_bytes=str(2**63 - 4096))
    assert control_group(root, own) == ControlGroup(size=1000, free=350)


def test_kills_are_counted_wherever_they_are_noted(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    assert killed(root, own) == 0
    write(root / "memory" / "slurm" / "job_7" / "step_0", V1)  # of which the job's group above knows nothing
    write(root / "memory" / "slurm" / "job_7", V1, oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0")
    assert killed(root, own) == 3
    write(root / "system.slice" / "job_7", {"memory.events": "low 0\noom 2\noom_kill 1\n"})
    assert killed(root, own) == 4


def test_a_container_sees_its_own_group_as_the_root(tmp_path: Path, own: Path) -> None:
    root = tmp_path / "cgroup"
    write(root, V2)
    assert control_group(root, own) == ControlGroup(size=1000, free=350)
    own.write_text("0::/../../outside\n")
    assert control_group(root, own) == ControlGroup(size=1000, free=350)
    assert control_group(root, tmp_path / "none") == ControlGroup(size=1000, free=350)


def test_free_is_the_least_of_the_machine_and_the_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal:  9 kB\nMemAvailable:   2 kB\n")
    monkeypatch.setattr(memory, "control_group", lambda: None)
    assert free(machine) == 2048
    assert free(tmp_path / "none") is None
    monkeypatch.setattr(memory, "control_group", lambda: ControlGroup(size=3000, free=350))
    assert free(machine) == free(tmp_path / "none") == 350


def test_room_is_for_what_is_asked_and_for_the_highest_use_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "free", lambda: 1000)
    monkeypatch.setattr(memory, "below_peak", lambda: 300)
    assert has_room(700) and not has_room(701)
    assert has_room(200, 2) and not has_room(201, 2)
    assert has_room(20, peak_known=False) and not has_room(21, peak_known=False)
    monkeypatch.setattr(memory, "free", lambda: None)
    assert has_room(10**15)
    monkeypatch.setattr(memory, "data_size", lambda: 5000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (6000, resource.RLIM_INFINITY))
    assert has_room(700) and not has_room(701)


GIVEN_BACK = """
from grappe.profiling.memory import below_peak

before = below_peak()
block = b"1" * (64 << 20)
del block
print(below_peak() - before)
"""


def test_below_the_peak_is_what_was_given_back() -> None:
    """In a process of its own: this one's peak may be far above."""
    done = subprocess.run([sys.executable, "-c", GIVEN_BACK], capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 60 << 20
