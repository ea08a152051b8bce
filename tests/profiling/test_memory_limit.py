"""The limits of memory: of a control group as Linux writes them, of RLIMIT_DATA, and of the machine."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

from grappe.profiling import memory, memory_limit
from grappe.profiling.memory_limit import ControlGroup, control_group, free, has_room, killed

V2 = {
    "memory.max": "1000",
    "memory.current": "700",
    "memory.stat": "anon 500\ninactive_file 30\nactive_file 20\n",
}
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


def test_what_is_damaged_or_absent_limits_nothing(tmp_path: Path, own: Path) -> None:
    write(tmp_path / "cgroup", V2, max="many")
    assert control_group(tmp_path / "cgroup", own) is None
    assert control_group(tmp_path / "none", own) is None


def test_free_is_the_least_of_the_machine_and_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = tmp_path / "meminfo"
    machine.write_text("MemTotal:  9 kB\nMemAvailable:   2 kB\n")
    monkeypatch.setattr(memory_limit, "control_group", lambda: None)
    assert free(machine) == 2048
    assert free(tmp_path / "none") is None
    monkeypatch.setattr(memory_limit, "control_group", lambda: ControlGroup(size=3000, free=350))
    assert free(machine) == free(tmp_path / "none") == 350


def test_room_is_for_what_is_asked_and_for_the_highest_use_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "free", lambda: 1000)
    monkeypatch.setattr(memory, "below_peak", lambda: 300)
    assert has_room(700) and not has_room(701)
    assert has_room(200, 2) and not has_room(201, 2)
    assert has_room(20, peak_known=False) and not has_room(21, peak_known=False)
    monkeypatch.setattr(memory_limit, "free", lambda: None)
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
