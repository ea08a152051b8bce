"""Unedited scripts on two nodes: one process's lines and weights, whatever happens to processes, jobs and nodes."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from grappe.contrib.slurm.jobs import wait
from grappe.errors import ProcessDied
from grappe.training.run import Run
from tests.commands import TORCHRUN, free_port
from tests.contrib.script.plainly import as_it_is
from tests.patience import PATIENCE_SECONDS
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import Job, grappe, submit

SCRIPT = """
import os, sys, tempfile, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

assert not {"RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS"} & os.environ.keys()
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
x, y = torch.randn(40, 8), torch.randint(0, 3, (40,))
loader = DataLoader(TensorDataset(x, y), 8, shuffle=True)
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 3))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
for epoch in range(4):
    total = 0.0
    for number, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), labels)
        loss.backward()
        optimizer.step()
        total += loss.item()
        print("step", epoch, number, f"{loss.item():.6f}", flush=True)
        time.sleep(float(sys.argv[1]))
    print(f"epoch {epoch}: {total / len(loader):.6f}", flush=True)
with tempfile.TemporaryDirectory() as folder:
    torch.save(model.state_dict(), os.path.join(folder, "best.pt"))
    model.load_state_dict(torch.load(os.path.join(folder, "best.pt")))
torch.save(model.state_dict(), "weights.pt")
print("saved", flush=True)
"""
STEPS = 20
PLAN = "replicate=4,device=cpu,threads=1"


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], dict[str, torch.Tensor]]:
    """Lines and weights of one process without grappe."""
    folder = tmp_path_factory.mktemp("plain")
    lines = as_it_is(SCRIPT, folder, "0").splitlines()
    torch.set_default_dtype(torch.float32)
    return lines, torch.load(folder / "weights.pt")


class ScriptJob(Job):
    """A job of the script on two nodes, with two processes each unless fewer are given."""

    def __init__(self, cluster: Cluster, folder: Path, *options: str, pause: float = 0.0, plan: str = PLAN) -> None:
        (folder / "train.py").write_text(SCRIPT)
        self.cluster, self.folder, self.run = cluster, folder, folder / "runs" / "mine"
        words = ("--plan", plan, "--run", str(self.run), "--save-every", "2", "train.py", str(pause))
        submit("--nodes", "2", *options, "--", "launch", *words, cwd=folder)
        self._read()

    def pid(self, rank: int) -> int:
        """Finds the process of a rank."""
        of_rank = {f"SLURM_JOB_ID={self.job}", f"SLURM_PROCID={rank}"}
        for folder in (Path("/proc") / str(pid) for pid in self.cluster.pids()):
            environment, words = ((folder / name).read_text(errors="replace") for name in ("environ", "cmdline"))
            if of_rank <= set(environment.split("\0")) and words.startswith(f"{sys.executable}\0-m\0grappe\0launch"):
                return int(folder.name)
        raise AssertionError(f"there is no process {rank}\n{self.said()}")

    def agrees(self, plain: tuple[list[str], dict[str, torch.Tensor]]) -> None:
        """Waits for the end, at which lines, weights and steps are one process's."""
        self.until((self.run / "done").exists, "it is finished")
        self.until(lambda: not self.cluster.run("squeue", "-h", "-j", self.job, check=False).strip(), "it has ended")
        same_weights(self.folder, plain[1])
        said = [line.partition(": ") for line in self.said().splitlines()]
        of_script = [(label, text) for label, _, text in said if text.startswith(("step", "epoch", "saved"))]
        assert {label for label, _ in of_script} == {"0"}, "process 0 alone has the terminal"
        assert list(dict.fromkeys(text for _, text in of_script)) == plain[0], self.said()
        run = Run(self.run)
        assert [record["step"] for record in run.records("step")] == list(range(1, STEPS + 1))
        assert {size["nodes"] for size in run.read_description()["sizes"]} == {2}
        assert not list(self.folder.rglob(f".launch-{self.job}-*")), "what killed processes have left is removed"


def same_weights(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """Compares the weights that the script has written in `folder`."""
    weights = torch.load(folder / "weights.pt")
    assert weights.keys() == expected.keys()
    for name, tensor in expected.items():
        apart = (tensor.double() - weights[name].double()).norm() / tensor.double().norm()
        assert apart < 1e-8, (name, apart)


def test_a_job_on_two_nodes(cluster: Cluster, tmp_path: Path, plain) -> None:
    job = ScriptJob(cluster, tmp_path, plan="replicate=2,device=cpu,threads=1")  # two each at night
    grappe("wait", str(job.run), cwd=tmp_path)
    job.agrees(plain)
    assert job.restarts() == 0
    assert "2 processes on 2 nodes" in (job.run / "logs" / "submit-1.sh").read_text()
    listed = grappe("runs", cwd=tmp_path)
    assert "mine" in listed and "finished" in listed
    said = grappe("logs", str(job.run), "--rank", "0", cwd=tmp_path).splitlines()
    assert [line for line in said if not line.startswith("grappe: ")] == plain[0]
    assert grappe("logs", str(job.run), "--rank", "1", cwd=tmp_path).splitlines() == plain[0]


def kills(*ranks: int) -> Callable[[ScriptJob], None]:
    def happens(job: ScriptJob) -> None:
        for turn, rank in enumerate(ranks):
            job.trains(5 + 6 * turn)
            os.kill(job.pid(rank), signal.SIGKILL)
            job.until(lambda turn=turn: job.said().count("this job goes on at once") > turn, "it goes on")

    return happens


def requeues(job: ScriptJob) -> None:
    job.trains()
    job.cluster.run("scontrol", "requeue", job.job)


def preempts(job: ScriptJob) -> None:
    job.trains()
    job.cluster.run("srun", "-p", "high", "-N", "2", "--exclusive", "true")


def takes_a_node_down(job: ScriptJob) -> None:
    job.trains()
    job.cluster.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    # Refused where Slurm has returned it to service by itself.
    job.cluster.run("scontrol", "update", "nodename=n1", "state=resume", check=False)


@pytest.mark.parametrize(
    ("happens", "options", "restarts", "at_once"),
    [
        pytest.param(kills(0, 3), (), 2, 2, id="processes 0 and 3 are killed"),
        pytest.param(kills(1, 2), (), 2, 2, id="processes 1 and 2 are killed"),
        pytest.param(requeues, (), 1, 0, id="requeued"),
        pytest.param(preempts, ("--queue", "low"), 1, 0, id="preempted"),
        pytest.param(takes_a_node_down, (), 1, 0, id="a node goes down"),
        pytest.param(takes_a_node_down, ("--spare", "1", "--partition", "wide"), 1, 1, id="a spare takes its place"),
    ],
)
def test_whatever_happens_to_it(
    happens: Callable[[ScriptJob], None],
    options: tuple[str, ...],
    restarts: int,
    at_once: int,
    cluster: Cluster,
    tmp_path: Path,
    plain,
) -> None:
    job = ScriptJob(cluster, tmp_path, *options, pause=0.6)
    happens(job)
    job.agrees(plain)
    assert job.restarts() == restarts
    assert job.said().count("this job goes on at once") == at_once, "without the queue"


def test_it_is_cancelled_and_submitted_again(cluster: Cluster, tmp_path: Path, plain) -> None:
    job = ScriptJob(cluster, tmp_path, pause=0.6)
    job.trains()
    grappe("cancel", "runs/mine", cwd=tmp_path)
    with pytest.raises(ProcessDied, match="was cancelled"):
        wait(job.run, query_every=1.0)
    assert not Run(job.run).is_finished() and "back into the queue" not in job.said()
    ScriptJob(cluster, tmp_path, pause=0.6).agrees(plain)


def test_srun_without_submit(cluster: Cluster, tmp_path: Path, plain) -> None:
    """Each node has a temporary folder of its own."""
    (tmp_path / "train.py").write_text(SCRIPT)
    command = shlex.join([sys.executable, "-m", "grappe", "launch", "--plan", PLAN, "train.py", "0"])
    own = f'mkdir -p "{tmp_path}/tmp-$SLURM_NODEID" && TMPDIR="{tmp_path}/tmp-$SLURM_NODEID" exec {command}'
    words = ["srun", "-N2", "-n4", "--ntasks-per-node=2", "-c1", "bash", "-c", own]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=PATIENCE_SECONDS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == plain[0]
    same_weights(tmp_path, plain[1])
    (run,) = (tmp_path / "runs").iterdir()
    assert Run(run).is_finished(), "the name that process 0 has drawn"


def test_two_agents_of_torchrun(tmp_path: Path, plain, start) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    port = free_port()
    agents = [
        start(
            TORCHRUN, "--nnodes=2", "--nproc-per-node=2", f"--node-rank={node}", "--master-addr=127.0.0.1",
            f"--master-port={port}", "-m", "grappe", "launch", "--plan", PLAN, "train.py", "0",
        )
        for node in range(2)
    ]  # fmt: skip
    ends = [agent.end() for agent in agents]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert ends[0][1].splitlines() == plain[0] and ends[1][1] == ""
    same_weights(tmp_path, plain[1])
    (run,) = (tmp_path / "runs").iterdir()
    assert Run(run).is_finished()


ERROR = """
import torch
from torch.utils.data import DataLoader, TensorDataset

print("looks for data")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number, (x,) in enumerate(DataLoader(TensorDataset(torch.ones(40, 3)), 4)):
    model(x).square().mean().backward()
    optimizer.step()
    if number == 2:
        raise ValueError("the disk is full")
"""


def test_its_own_error_is_shown_once_and_ends_the_job(cluster: Cluster, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(ERROR)
    submit("--nodes", "2", "--", "launch", "--plan", PLAN, "--run", "runs/mine", "train.py", cwd=tmp_path)
    job = Job.of(cluster, tmp_path, "runs/mine")
    said = grappe("wait", "runs/mine", cwd=tmp_path, code=1) + job.said()
    assert said.count("looks for data") == 1
    assert said.count("0: ValueError: the disk is full") == 1, said
    assert "goes on" not in said and "back into the queue" not in said


def test_a_loop_in_a_job_is_launched_and_what_spreads_itself_over_nodes_is_not(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text("import grappe\nwith grappe.Loop() as loop:\n    print('of', loop.world.size)")
    submit("--nodes", "2", "--name", "loop", "--", "launch", "--plan", PLAN, "loop.py", cwd=tmp_path)
    (run,) = (tmp_path / "runs").glob("loop-*")
    grappe("wait", str(run), cwd=tmp_path)
    assert sorted(grappe("logs", str(run), cwd=tmp_path).splitlines()) == [f"{rank}: of 4" for rank in range(4)]
    (tmp_path / "own.py").write_text("import torch.distributed")
    words = ("submit", "--site", "generic", "--nodes", "2", "--", "launch", "--plan", PLAN, "own.py")
    said = grappe(*words, cwd=tmp_path, code=2)
    assert "the script uses torch.distributed" in said and "grappe submit --processes 4 -- " in said
