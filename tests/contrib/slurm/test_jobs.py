"""A run's jobs and logs, from what lies in its folder alone."""

import time
from pathlib import Path

import pytest
from rich.console import Console

from grappe.contrib.slurm import jobs, slurm
from grappe.errors import RunError
from grappe.verbs import catalogue, runs


def shown(table: object) -> str:
    console = Console(width=300, record=True, file=open("/dev/null", "w"))  # noqa: PTH123, SIM115
    console.print(table)
    return console.export_text()


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "runs" / "mine"
    (folder / "logs").mkdir(parents=True)
    return folder


def test_what_is_remembered_is_found(run: Path) -> None:
    jobs.record_job(run, "12", "generic", "nothing")
    with (run / "logs" / jobs.JOBS).open("a") as stream:
        stream.write('half a li\n[]\n{"job": "$(x)"}\n')
    jobs.record_job(run, "13", "generic", "nothing")
    assert [one["job"] for one in jobs.submitted(run)] == ["12", "13"]
    assert jobs.newest_job(run) == "13"
    assert jobs.runs_of(run.parent) == {"12": run, "13": run}
    assert "submitted, job 13" in shown(runs.listing(run.parent))


def test_a_run_that_was_never_submitted(run: Path) -> None:
    for ask in (jobs.newest_job, lambda folder: jobs.cancel([folder])):
        with pytest.raises(RunError, match="was never submitted: grappe submit"):
            ask(run)


def test_the_end_that_the_script_wrote_is_believed(run: Path) -> None:
    jobs.record_job(run, "12", "generic", "nothing")
    (run / "logs" / "job-12.end").write_text("3\n")
    assert jobs.wait(run) == 3
    (run / "done").touch()
    assert jobs.wait(run) == 0


def test_logs_of_jobs_and_of_processes(run: Path) -> None:
    with pytest.raises(RunError, match="has no log"):
        jobs.log_files(run)
    (run / "logs" / "job-9.out").write_text("older\n")
    (run / "logs" / "job-10.out").write_text("hello\n 0: step 1\n10: 0: mine\n 0: \n 0: step 2")
    assert "".join(jobs.lines(run)) == "hello\n 0: step 1\n10: 0: mine\n 0: \n 0: step 2"
    assert "".join(jobs.lines(run, 0)) == "step 1\n\nstep 2"
    assert "".join(jobs.lines(run, 10)) == "0: mine\n"
    with pytest.raises(RunError, match="has no line of process 3"):
        list(jobs.lines(run, 3))
    (run / "logs" / "rank-3.log").write_text("own\n")
    assert "".join(jobs.lines(run, 3)) == "own\n"


def test_a_log_is_followed_until_the_job_ends(run: Path) -> None:
    jobs.record_job(run, "12", "generic", "nothing")
    log, end = run / "logs" / "job-12.out", run / "logs" / "job-12.end"
    log.write_text("0: first\n0: sec")
    seen = []
    for line in jobs.lines(run, follow=True):
        seen.append(line)
        if line == "0: first\n":
            with log.open("a") as stream:
                stream.write("ond\n0: third")
        if line == "0: second\n":
            end.touch()
    assert seen == ["0: first\n", "0: second\n", "0: third"]


def test_squeue_is_read_whatever_jobs_are_called() -> None:
    text = "12|a|b|RUNNING|None|2026-11-21T05:00:00|1:00|2\n13_[2-3%1]|chain|PENDING|JobArrayTaskLimit|N/A|10:00|1\n"
    found = slurm.entries(text)
    assert [(one.job, one.name, one.state) for one in found] == [
        ("12", "a|b", "RUNNING"),
        ("13_[2-3%1]", "chain", "PENDING"),
    ]


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("Invalid account or account/partition combination specified", "sacctmgr show assoc"),
        ("Requested time limit is invalid (missing or exceeds some limit)", "--time"),
        ("Requested node configuration is not available", "use more --nodes"),
        ("Invalid qos specification", "--queue"),
        ("something new", ""),
    ],
)
def test_refusals_say_what_to_change(said: str, advice: str) -> None:
    assert advice in slurm.remedy(said)
    assert bool(slurm.remedy(said)) is bool(advice)


def test_sites_are_listed_with_the_source_of_each_fact() -> None:
    assert "retired: closed on 2025-09-12; its successor is fir" in shown(catalogue.site_list())
    said = shown(catalogue.site_facts("jean-zay-a100")).splitlines()
    assert any("node.cores " in line and "UNCONFIRMED, seen in users' scripts only" in line for line in said)
    assert len([line for line in said if "slurm_partitions_gpu" in line]) == 1  # the site's own page
    assert any("storage.$HOME " in line and "espaces-disques" in line for line in said)


def test_gpus_are_listed_with_the_sites_that_have_them() -> None:
    lines = shown(catalogue.gpu_list()).splitlines()
    (row,) = (line.split() for line in lines if "A100 SXM4, 40 GB" in line)
    assert {"Ampere,", "8.0", "19.5", "156", "312", "1555", "300", "400", "narval,"} <= {*row}
    assert "peak TFLOP/s without sparsity" in lines[-1]


def test_nodes_that_failed_in_two_starts_within_a_week_are_left_out_the_last_four_of_them(tmp_path: Path) -> None:
    now = int(time.time())
    lines = [
        f"{now - 8 * 86400} old 1.0 a: a process was ended: Killed",
        f"{now - 8 * 86400} old 2.0 a: a process was ended: Killed",
        f"{now - 50} once 3.0 a: a process was ended: Killed",
        f"{now - 50} same 3.0 a: a process was ended: Killed",
        f"{now - 49} same 3.0 a: a process was ended: Killed",
        f"{now - 45} wrong 5.0 a: proven: process 2, step 25, gradient of 0.weight, unlike process 1 and process 3",
        "damaged",
        f"{now} ../x 3.0 a: not a node",
        *(f"{now - 40 + s} n{node} {s}.{node} b: Slurm: down, n{node}" for node in range(1, 5) for s in (1, node + 2)),
    ]
    (tmp_path / ".failed-nodes").write_text("\n".join(lines))
    found = jobs.nodes_to_leave_out(tmp_path)
    assert list(found) == ["n4", "n3", "n2", "n1"]
    (tmp_path / ".failed-nodes").write_text("\n".join(lines[:6]))
    assert list(jobs.nodes_to_leave_out(tmp_path)) == ["wrong"]
    assert [(note.run, note.evidence) for note in found["n4"]] == [("b", "Slurm: down, n4")] * 2
    assert jobs.nodes_to_leave_out(tmp_path / "none") == {}
