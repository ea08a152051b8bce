"""grappe doctor as its processes run it: what it says of several nodes, and of one that never comes."""

import dataclasses
import importlib.metadata
import time
from pathlib import Path

import pytest

from grappe.contrib.doctor import doctor
from grappe.contrib.doctor.checks import error, note, warning
from grappe.launch.child import doubt
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.words import host_name
from tests.processes import Pool

PLAN = "replicate=2,threads=1,workers=0,device=cpu"


def examined(process: ProcessRank, rendezvous_folder: Path, folder: Path) -> list:
    return doctor.worker(
        doctor.DoctorRequest(plan=Plan.parse(PLAN), folder=folder, job=True), process, rendezvous_folder
    )


def test_two_processes_are_well(pool: Pool, tmp_path: Path) -> None:
    for found in pool.run("tests.contrib.doctor.test_doctor:examined", 2, tmp_path):
        assert not doctor.failed(found), doctor.text(found)


def test_a_process_that_never_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "PATIENCE_SECONDS", 1.0)
    alone = ProcessRank(rank=0, size=2, local_rank=0, local_size=1, launcher="srun", job="7-0-0")
    request = doctor.DoctorRequest(plan=Plan.parse(PLAN), folder=tmp_path, job=True)
    with pytest.raises(doctor.Unfit, match="the 2 processes did not all meet in 1 s"):
        doctor.worker(request, alone, tmp_path)


def test_faults_of_a_node_are_left_to_the_job_beside_what_was_left_before(tmp_path: Path, monkeypatch) -> None:
    faults = [dataclasses.replace(warning(text), of_node=True) for text in ("GPU 1 had 3 errors", "GPU 2 is gone")]
    monkeypatch.setattr(doctor, "examine", lambda machine: [*faults, warning("slow")])
    monkeypatch.setenv("GRAPPE_FAILURE", str(tmp_path / "job-5.failed"))
    request = doctor.DoctorRequest(plan=Plan(), folder=tmp_path, job=True)
    assert len(doctor.worker(request, ProcessRank(), tmp_path)) == 3
    doubt("n7", "process 3 was slow:\n9 ms", "training")
    (left,) = tmp_path.iterdir()
    assert left.name == f"job-5.doubt-{host_name()}", "by one node alone: others may append at the same time"
    lines = [line.split(" ", 2) for line in left.read_text().splitlines()]
    assert all(time.time() - 60 < int(at) <= time.time() for at, _, _ in lines)
    assert [line[1:] for line in lines] == [
        [host_name(), "GPU 1 had 3 errors (doctor)"],
        [host_name(), "GPU 2 is gone (doctor)"],
        ["n7", "process 3 was slow: 9 ms (training)"],
    ]


def test_the_same_of_several_nodes_is_said_once() -> None:
    slow, full, idle = warning("slow", why="why", do="do"), error("full"), note("idle")
    found = doctor._ordered([[slow, full], [slow, idle], [slow]], ["n0", "n1", "n0"])
    assert [(one.what, one.host) for one in found] == [("full", "n0"), ("slow", ""), ("idle", "n1")]
    assert doctor.text(found) == "ERROR: full (on n0)\nwarning: slow\n  why: why\n  do:  do\nnote: idle (on n1)"
    assert doctor.failed(found)
    assert doctor.summary(found).endswith(": 2 problems")
    assert f"torch {importlib.metadata.version('torch')}, Python 3." in doctor.summary([idle])
    assert doctor.summary([idle]).endswith(": nothing is wrong here")
