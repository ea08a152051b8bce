"""A job that takes as many nodes as Slurm has: other sizes, the same samples, and under exact the same bits."""

import collections
import math
import os
import random
import signal
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from grappe.checkpoint.format import list_checkpoints
from grappe.contrib.slurm.jobs import FAILED_NODES, nodes_to_leave_out
from grappe.training.run import Run
from tests.commands import GRAPPE, SLOW, ran
from tests.faults.resume_cell import hashes
from tests.slurm.cluster import Cluster
from tests.slurm.configuration import NODES
from tests.slurm.jobs import EPOCHS, Job, grappe, submit

PLAN = "device=cpu,exact=4,threads=1,workers=0"
WORDS = ("--save-every", "2", "--log-samples")


@pytest.fixture
def wide(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster, with all its nodes in service again afterwards."""
    yield cluster
    in_service(cluster, len(NODES))


def in_service(cluster: Cluster, count: int) -> None:
    """Leaves the first `count` nodes to jobs that start from now on."""
    for number, node in enumerate(NODES):
        state = ("state=resume",) if number < count else ("state=drain", "reason=test")
        cluster.run("scontrol", "update", f"nodename={node}", *state, check=False)


def submitted(cluster: Cluster, folder: Path, name: str, plan: str, *options: str, epochs: int = EPOCHS) -> Job:
    asked = ("--partition", "wide", "--restarts", "500", *options)
    words = (SLOW, f"epochs={epochs}", "pause=0.02", *WORDS, "--plan", plan, "--run", name)
    submit(*asked, "--", "train", *words, cwd=folder)
    job = Job.of(cluster, folder, name)
    job.total = epochs * 8
    return job


def disturbed(
    cluster: Cluster,
    job: Job,
    events: int,
    seed: int,
    kinds: Sequence[str] = ("requeue", "notice"),
    minutes: float = math.inf,
    fewest: int = 1,
) -> list[int]:
    """Kills, requeues and preempts the job at random, with other nodes in service each time; returns its sizes.

    With notice no step is lost; else at most those since the last save. `fewest` nodes stay in service.
    """
    chance, since = random.Random(seed), list[tuple[int, str, int]]()
    kills, deadline = 0, time.monotonic() + 60 * minutes
    for number in range(events):
        if time.monotonic() > deadline:
            break
        job.until(lambda: job.restarts() >= number, "it has begun again")
        job.until(lambda: job.steps() and job.pids(), "it trains")
        in_service(cluster, chance.randint(fewest, len(NODES)))
        (job.folder / FAILED_NODES).unlink(missing_ok=True)  # the test is no reason to leave nodes out
        what = chance.choice(["kill", *kinds] if kills < 3 else kinds)
        kills += what == "kill"
        kept = job.steps() if what == "notice" else list_checkpoints(Run(job.run).checkpoints)[0].step
        since.append((job.restarts(), what, kept))
        if what == "kill":
            os.kill(chance.choice(job.pids()), signal.SIGKILL)
        elif what == "requeue":
            cluster.run("scontrol", "requeue", job.job)
        elif what == "node":
            held = cluster.run("squeue", "-h", "-j", job.job, "-o", "%N").strip()
            node = chance.choice(cluster.run("scontrol", "show", "hostnames", held).split())
            cluster.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
            time.sleep(2)  # Slurm takes it out of the job
            in_service(cluster, chance.randint(fewest, len(NODES)))
        else:
            cluster.run("scancel", "--signal=USR2", "--batch", job.job)
        job.until(lambda: job.restarts() > number or (job.run / "done").exists(), f"it begins again after {what}")
        if (job.run / "done").exists():
            break
    job.ends()
    sizes = Run(job.run).read_description()["sizes"]
    begins = [size["step"] for size in sizes[1:]]
    assert all(begins[number] >= step for number, _, step in since[: len(begins)]), (begins, since)
    print(f"{len(begins)} restarts after {collections.Counter(what for _, what, _ in since)}")
    return [size["processes"] for size in sizes]


@pytest.mark.slow
def test_other_sizes_and_the_same_bits(wide: Cluster, tmp_path: Path) -> None:
    in_service(wide, 2)
    words = ("--partition", "wide", "--nodes", "1-4", "--", "train", SLOW, "--plan", PLAN)
    said = submit("--dry-run", *words, cwd=tmp_path)
    assert "#SBATCH --nodes=1-4" in said and "of 3 some would idle" in said
    job = submitted(wide, tmp_path, "any", PLAN, "--nodes", "1-4")
    sizes = disturbed(wide, job, 4, seed=1)
    assert len(set(sizes)) > 1 and sizes[0] == 2, sizes
    same_bits(job)
    grappe("report", "any", cwd=tmp_path)
    page = (job.run / "report.html").read_text()
    assert "2 processes on 2 nodes, after " in page and '"hours in the queue":' in page


def same_bits(job: Job) -> None:
    """The run ended with the bits of one that nobody disturbed."""
    words = (f"epochs={job.total // 8}", "pause=0", *WORDS, "--plan", PLAN, "--run", "plain")
    plain = ran(GRAPPE, "train", SLOW, *words, cwd=job.folder)
    assert plain.returncode == 0, plain.stderr
    bits, bits_undisturbed = (hashes(run, job.total) for run in (job.run, job.folder / "plain"))
    del bits["json"], bits_undisturbed["json"]  # which has the number of processes
    assert bits == bits_undisturbed


def begins_again(job: Job, number: int) -> None:
    job.until(lambda: job.restarts() == number and job.pids(), f"start {number + 1} trains")


def in_the_same_job(job: Job, *sizes: int) -> None:
    """The run was started with these numbers of processes, and never went back into the queue."""
    said, description = job.said(), Run(job.run).read_description()
    assert "back into the queue" not in said, said
    assert [size["processes"] for size in description["sizes"]] == [*sizes]
    assert ["waited" in size for size in description["sizes"]] == [True, *[False] * (len(sizes) - 1)]
    grappe("report", job.run.name, cwd=job.folder)
    assert (job.run / "report.html").read_text().count(", in the same job") == len(sizes) - 1


@pytest.mark.slow
def test_a_kill_and_a_node_that_is_gone_do_not_end_the_job(wide: Cluster, tmp_path: Path) -> None:
    in_service(wide, len(NODES))
    job = submitted(wide, tmp_path, "left", PLAN, "--nodes", "1-2", "--spare", "2", epochs=8)
    job.trains()
    os.kill(job.pids()[-1], signal.SIGKILL)
    begins_again(job, 1)
    try:
        wide.stop_node("n2")
        job.ends()
    finally:
        wide.start_node("n2")
    in_the_same_job(job, 2, 2, 2)
    assert "noted against node n2, in " in job.said()
    same_bits(job)


def test_a_spare_takes_the_place_of_a_node_that_goes_down(wide: Cluster, tmp_path: Path) -> None:
    in_service(wide, len(NODES))
    job = submitted(wide, tmp_path, "spare", f"{PLAN},replicate=2", "--nodes", "2", "--spare", "1")
    job.trains()
    wide.run("scontrol", "update", "nodename=n1", "state=down", "reason=test")
    job.ends()
    in_the_same_job(job, 2, 2)
    said = job.said()
    assert "noted against node n1, in " in said and "this job goes on at once, without the queue, on n[0,2]\n" in said
    assert "nodes: 3, 1 idle; processes: 2; plan: " in said
    assert [size["idle_nodes"] for size in Run(job.run).read_description()["sizes"]] == [1, 0]
    same_bits(job)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize(
    "plan",
    [
        PLAN,
        "device=cpu,threads=1,workers=0",
        "device=cpu,shard=2,threads=1,workers=0",
        "engine=lightning,device=cpu,threads=1,workers=0",
        "engine=horovod,device=cpu,threads=1,workers=0",
    ],
)
def test_many_sizes(wide: Cluster, tmp_path: Path, plan: str) -> None:
    """GRAPPE_RESIZES events drawn by GRAPPE_SEED, or as many as GRAPPE_MINUTES allow; it says how many there were."""
    events, minutes = int(os.environ.get("GRAPPE_RESIZES", "20")), float(os.environ.get("GRAPPE_MINUTES", "inf"))
    in_service(wide, len(NODES))
    fewest, seed = 2 if "shard" in plan else 1, int(os.environ.get("GRAPPE_SEED", "1"))
    job = submitted(wide, tmp_path, "many", plan, "--nodes", f"{fewest}-4", epochs=3 * events)
    sizes = disturbed(wide, job, events, seed, ("requeue", "notice", "node"), minutes, fewest)
    print(f"{plan}: {len(sizes) - 1} restarts, of {sizes} processes")
    assert len(set(sizes)) > 1, sizes
    if "exact" in plan:
        same_bits(job)


FAULTY = """
import os
import torch
from torch import nn
from grappe.tasks.digits import Digits


class Faulty(Digits):
    def model(self):
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        calls = []

        def spoil(module, inputs, output):
            calls.append(module.training)
            if not calls[-1] or sum(calls) <= 20 or os.environ.get("SLURMD_NODENAME") != "n1":
                return output
            values = output.detach().clone()
            values[:, 3] = 0.5
            return output + (values - output.detach())

        model[1].register_forward_hook(spoil)
        return model
"""


@pytest.mark.slow
def test_a_node_that_computes_wrongly_is_left_out(wide: Cluster, tmp_path: Path) -> None:
    in_service(wide, len(NODES))
    (tmp_path / "faulty.py").write_text(FAULTY)
    words = ("train", "faulty.py", "epochs=3", "--save-every", "5", "--run", "wrong")
    plan = ("--plan", "device=cpu,threads=1,exact=4,replicate=2,check=10")
    submit("--partition", "wide", "--nodes", "2-4", "--", *words, *plan, cwd=tmp_path)
    job = Job.of(wide, tmp_path, "wrong")
    job.until((job.run / "done").exists, "it is finished")
    (notes,) = nodes_to_leave_out(tmp_path).values()
    assert [note.node for note in notes] == ["n1"] and notes[0].evidence.startswith("proven: process 1, step ")
    assert job.restarts() == 1 and "the next start leaves out n1, which was noted twice" in job.said()
    assert (job.run / "logs" / f"job-{job.job}.nodes").read_text().strip() == "n[0,2-3]"
