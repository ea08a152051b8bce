"""Whatever Slurm does to a job, the run ends finished, with the samples and the curves of one that nobody disturbed."""

import os
import re
import signal
from pathlib import Path

import pytest

from grappe.contrib.slurm.jobs import nodes_to_leave_out
from grappe.training.run import Run
from tests.commands import SLOW
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PLAN, Job, grappe, submit
from tests.typed import stand_in

STUCK = Path(__file__).parents[1] / "faults" / "stuck.py"


@pytest.mark.slow
def test_preempted_by_a_higher_partition(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "preempted", "--queue", "low", pause=0.15)  # srun may take seconds to ask
    job.trains()
    cluster.run("srun", "-p", "high", "-N", "2", "--exclusive", "true")  # waits until the job made room
    job.ends()
    assert job.restarts() == 1
    assert "exit code 75" in job.said()


@pytest.mark.slow
def test_a_node_that_fails_twice_is_left_out(cluster: Cluster, tmp_path: Path) -> None:
    options = ("--nodes", "1")
    words = ("--", "train", SLOW, "epochs=8", "pause=0.05", "--save-every", "4", "--plan", PLAN, "--run")
    submit(*options, *words, "fails", cwd=tmp_path)
    job, nodes, run = Job.of(cluster, tmp_path, "fails"), list[str](), tmp_path / "fails"
    while len(nodes) < 3 and (not nodes or nodes.count(nodes[-1]) < 2):
        before = len(nodes)
        job.until(lambda: len(job.pids()) == 2 and job.restarts() == before, "it trains")
        nodes.append((run / "logs" / f"job-{job.job}.nodes").read_text().strip())
        os.kill(job.pids()[-1], signal.SIGKILL)
        job.until(
            lambda: f"noted against node {nodes[-1]}" in job.said() and job.restarts() > before, "it begins again"
        )
    bad = next(node for node in nodes if nodes.count(node) == 2)
    assert f"the next start leaves out {bad}, which was noted twice within a week or computed wrongly" in job.said()
    job.until((run / "done").exists, "it is finished")
    assert (run / "logs" / f"job-{job.job}.nodes").read_text().strip() == {"n0": "n1", "n1": "n0"}[bad]
    notes = nodes_to_leave_out(tmp_path)[bad]
    assert {(note.run, note.evidence) for note in notes} == {("fails", "a process was ended: Killed")}
    said = submit("--dry-run", *options, *words, "next", cwd=tmp_path)
    assert f"node {bad} is left out: it was noted twice within a week or computed wrongly, last in fails" in said
    assert f"#SBATCH --exclude={bad}" in said


def test_a_node_on_which_a_process_stands_still_is_noted(cluster: Cluster, tmp_path: Path) -> None:
    """The others wait for it, until the watchdog ends the training."""
    words = ("--", "train", f"{STUCK}:Sleepy", "--stall-limit", "3s", "--plan", PLAN, "--run", "stuck")
    submit("--nodes", "2", *words, cwd=tmp_path)
    job = Job.of(cluster, tmp_path, "stuck")
    job.until(lambda: job.said().count("makes no progress") > 1, "it goes on, and stands still again")
    cluster.run("scancel", job.job)
    job.until(lambda: not cluster.run("squeue", "-h", "-j", job.job, check=False).strip(), "it has ended")
    (note,) = (tmp_path / ".failed-nodes").read_text().splitlines()  # of srun's kills none
    pattern = rf"\d+ (n[01]) {job.job}\.0 stuck: process [01] stood still in step \d+, at .*time.sleep\(3600\)"
    assert (blamed := re.fullmatch(pattern, note)), note
    assert f"on {blamed[1]} makes no progress in step" in job.said()


@pytest.mark.nightly
def test_an_idle_job_ends_saved_and_does_not_go_back_into_the_queue(cluster: Cluster, tmp_path: Path) -> None:
    words = ("--", "train", f"{STUCK}:Sleepy", "--idle", "4s", "--save-every", "1", "--plan", PLAN, "--run", "idle")
    submit("--nodes", "2", *words, cwd=tmp_path)
    job = Job.of(cluster, tmp_path, "idle")
    job.until(lambda: not cluster.run("squeue", "-h", "-j", job.job, check=False).strip(), "it has ended")
    assert "grappe: --idle: no process has computed for 4 s: saving and ending" in job.said()
    assert "--idle has ended it: the same run, started again, resumes from its last checkpoint" in job.said()
    assert "back into the queue" not in job.said() and job.restarts() == 0
    assert (job.run / "logs" / f"job-{job.job}.end").read_text().strip() == "75"
    assert Run(job.run).latest().step > 0
    grappe("wait", "idle", cwd=tmp_path, code=75)


WASTEFUL = """
import time, torch
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(420):
    time.sleep(0.005)
    torch.nn.functional.mse_loss(model(torch.ones(5, 4)), torch.ones(5, 1)).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.nightly
def test_a_job_whose_cores_stand_idle_says_so_before_the_mail_comes(cluster: Cluster, tmp_path: Path) -> None:
    short = "import grappe.training.bottleneck\ngrappe.training.bottleneck.LEAST_SECONDS = 1\n"
    (tmp_path / "sitecustomize.py").write_text(short)
    (tmp_path / "train.py").write_text(WASTEFUL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
        submit("--nodes", "1", "--cores", "2", "--", "launch", "--run", "few", "train.py", cwd=tmp_path)
    job = Job.of(cluster, tmp_path, "few")
    job.until((job.run / "done").exists, "it is finished")
    words = r"0\.\d of the job's 2 cores computed, and jobstats warns below 65%"
    assert len(re.findall(words, job.said())) == 2, job.said()
    assert re.search(words, Run(job.run).read_description()["bottleneck"])
    (listed,) = (line for line in grappe("runs", "--runs", ".", cwd=tmp_path).splitlines() if "few" in line)
    assert re.search(r"0\.\d/\d+ cores", listed), listed


SLOW_NODE = """
import os
import sys
sys.path.insert(0, {folder!r})
from stuck import Quick


class Slow(Quick):
    pause: float = 0.06 if os.environ.get("SLURMD_NODENAME") == "n0" else 0.01
"""


def test_slow_processes_and_faults_of_a_gpu_are_noted_and_the_job_finishes(cluster: Cluster, tmp_path: Path) -> None:
    """nvidia-smi is a stand-in, and says it of one node."""
    (tmp_path / "slow.py").write_text(SLOW_NODE.format(folder=str(STUCK.parent)))
    stand_in(tmp_path, **{"nvidia-smi": "[ \"$SLURMD_NODENAME\" != n1 ] || echo '2, 3'"})
    options = ("--site", "generic", "--nodes", "2", "--time", "10m")
    words = ("--", "train", "slow.py:Slow", "epochs=15", "--plan", "replicate=2,threads=1,workers=0", "--run")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        for name in ("first", "second"):
            grappe("submit", *options, *words, name, cwd=tmp_path)
            job = Job.of(cluster, tmp_path, name)
            job.until((job.run / "done").exists, "it is finished")
            job.until(lambda: not cluster.run("squeue", "-h", "-j", job.job, check=False).strip(), "it has ended")
            assert job.restarts() == 0
    left_out = nodes_to_leave_out(tmp_path)
    assert set(left_out) == {"n0", "n1"}
    assert all({note.run for note in notes} == {"first", "second"} for notes in left_out.values())
    assert all(re.match(r"process [01] was slow: [\d.]+ ms of work a step", note.evidence) for note in left_out["n0"])
    assert {note.evidence for note in left_out["n1"]} == {
        "GPU 2 had 3 errors in its memory that ECC could not correct (doctor)"
    }


SCRIPT = """
import time
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(40, 3), torch.randn(40, 1)), 4, shuffle=True)
for epoch in range(3):
    for number, (x, y) in enumerate(loader):
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        print("step", epoch, number, flush=True)
        time.sleep(0.3)
"""


def test_a_script_that_is_preempted(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(SCRIPT)
    words = ("--plan", "device=cpu,threads=1", "--run", "preempted", "own.py")
    submit("--nodes", "1", "--queue", "low", "--", "launch", *words, cwd=tmp_path)
    job = Job.of(cluster, tmp_path, "preempted")
    job.trains()
    cluster.run("srun", "-p", "high", "-N", "2", "--exclusive", "true")
    job.until((job.run / "done").exists, "it is finished")
    assert job.restarts() == 1 and "exit code 75" in job.said()
    assert [record["step"] for record in Run(job.run).records("step")] == list(range(1, 31))
    lines = [line.partition("step ")[2] for line in job.said().splitlines() if "step " in line]
    assert lines == [f"{epoch} {number}" for epoch in range(3) for number in range(10)]


@pytest.mark.slow
def test_a_process_that_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "killed")
    job.trains()
    os.kill(job.pids()[-1], signal.SIGKILL)
    job.ends()
    assert job.restarts() == 1
    assert "exit code 137" in (job.run / "logs" / "killed").read_text()


def test_a_node_that_goes_down(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "down")
    job.trains()
    cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    # Refused where Slurm has returned it to service by itself.
    cluster.run("scontrol", "update", "nodename=n1", "state=resume", check=False)
    job.ends()
    assert job.restarts() == 1


@pytest.mark.soak
def test_cut_by_the_time_limit(cluster: Cluster, tmp_path: Path) -> None:
    job = Job(cluster, tmp_path, "limit", "--time", "1m", pause=1.0)
    job.ends()
    assert job.restarts() >= 1
