"""queue, logs, wait, cancel, and the same from a notebook: on real jobs."""

import time
from pathlib import Path

import pytest

from grappe import slurm as notebook
from grappe.contrib.slurm.jobs import wait
from grappe.errors import GrappeError, ProcessDied
from grappe.training.run import Run
from tests.commands import SLOW
from tests.slurm.cluster import Cluster
from tests.slurm.jobs import PLAN, grappe, submit


@pytest.mark.slow
def test_from_the_queue_to_the_end_by_cancelling(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "runs" / "mine"
    train = ("train", SLOW, "epochs=50", "pause=0.2", "--run", "runs/mine", "--plan", PLAN)
    submit("--nodes", "2", "--", *train, cwd=tmp_path)
    trained: set[str] = set()
    while len(trained) < 2:  # both processes, the first word of whose lines is their rank
        time.sleep(0.1)
        lines = [line for file in (run / "logs").glob("job-*.out") for line in file.read_text().splitlines()]
        trained = {line.split()[0] for line in lines if "step in" in line}
    queue = grappe("queue", cwd=tmp_path)
    assert "runs/mine" in queue
    assert "RUNNING" in queue
    first, second = (grappe("logs", "runs/mine", "--rank", str(rank), cwd=tmp_path) for rank in range(2))
    assert "slow on 2 processes" in first
    assert "slow on" not in second
    assert second.count("step in") > 0
    grappe("cancel", "runs/mine", cwd=tmp_path)
    with pytest.raises(ProcessDied, match="was cancelled"):
        wait(run, query_every=1.0)
    assert grappe("queue", cwd=tmp_path) == "no job of yours is in the queue\n"
    assert not Run(run).is_finished()
    assert "back into the queue" not in grappe("logs", "runs/mine", cwd=tmp_path)


def test_a_time_limit_from_an_earlier_job(cluster: Cluster, tmp_path: Path) -> None:
    """A trial of some steps on the cluster, and then the whole training with the limit that follows from them."""
    plan = ("--plan", "device=cpu,threads=1,workers=0")
    submit("--", "train", "digits", "--steps", "40", "--run", "runs/trial", *plan, cwd=tmp_path)
    grappe("wait", "runs/trial", cwd=tmp_path)
    said = submit("--time", "auto", "--", "train", "digits", "epochs=3", "--run", "runs/all", *plan, cwd=tmp_path)
    assert "69 steps of " in said and "as measured in the run trial" in said
    grappe("wait", "runs/all", cwd=tmp_path)
    assert Run(tmp_path / "runs" / "all").is_finished()


def test_a_notebook_sweeps_over_numbers_of_gpus(cluster: Cluster, here: Path) -> None:
    command = f"{SLOW} epochs=1 pause=0 --plan threads=1,workers=0"
    jobs = notebook.submit(command, [1, 2], site="generic", time="5m", doctor=False)
    assert [job.wait() for job in jobs] == [0, 0]
    assert "slow on 1 process (cpu" in jobs[0].log()
    assert "slow on 2 processes (cpu" in jobs[1].log()
    assert notebook.queue(jobs, until_empty=True, every=0.5) == []
    assert "finished, 8 steps" in jobs[1].log(0)
    assert [file.name for file in notebook.logs(jobs[0])] == [f"job-{jobs[0].job}.out", "rank-0.log"]
    assert notebook.logs(f"job-{jobs[1].job}.") == [jobs[1].run / "logs" / f"job-{jobs[1].job}.out"]


def test_a_finished_run_is_not_submitted_again(cluster: Cluster, here: Path) -> None:
    (here / "run").mkdir()
    (here / "run" / "done").touch()
    with pytest.raises(GrappeError, match="is finished: nothing to submit"):
        notebook.submit(f"{SLOW} --run run", site="generic")
