"""A run's folder: the status of starts that live, that were killed, that have just begun; its curves and costs."""

import math
import multiprocessing
import os
import signal
from pathlib import Path

import pytest
from rich.console import Console

from grappe.checkpoint.lease import STALE_SECONDS, Lease
from grappe.errors import RunError, UsageError
from grappe.training.options import Options
from grappe.training.run import DESCRIPTION, METRICS, Run
from grappe.verbs.runs import facts, listing
from tests.training.test_training import train


def killed_before_its_first_step(folder: Path) -> None:
    """Begins a run as a start does, and dies."""
    run = Run.begin(folder, {"status": "running"})[0]
    Lease(run.folder).take()
    os.kill(os.getpid(), signal.SIGKILL)


def status(run: Run) -> str:
    return run.read_status(run.read_description())


def test_a_start_that_was_killed_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    process = multiprocessing.get_context("fork").Process(target=killed_before_its_first_step, args=[tmp_path / "run"])
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    run = Run(tmp_path / "run")
    assert status(run) == "ended unexpectedly"
    lease = Lease(run.folder)
    lease.take()
    assert status(run) == "running"
    lease.release()


def test_a_start_is_running_between_its_description_and_its_lease(tmp_path: Path) -> None:
    run = Run.begin(tmp_path / "run", {"status": "running"})[0]
    assert status(run) == "running"
    long_ago = (run.folder / DESCRIPTION).stat().st_mtime - STALE_SECONDS - 1
    os.utime(run.folder / DESCRIPTION, (long_ago, long_ago))
    assert status(run) == "ended unexpectedly"


def test_a_run_is_found_by_its_name(here: Path) -> None:
    train(here / "runs" / "a", name="wide net", tag=("base", "paper"), steps=1)
    train(here / "runs" / "a", steps=2)  # which keeps both
    Run.begin(Path("runs/b"), {"status": "running", "tags": ["base"]})
    run = Run("wide net")
    assert run.folder == Path("runs/a")
    assert [run.read_description()[name] for name in ("name", "tags")] == ["wide net", ["base", "paper"]]
    assert [entry["folder"] for entry in facts(Path("runs"), tag="paper")] == ["runs/a"]
    assert [len(facts(Path("runs"), tag=tag)) for tag in ("base", "none")] == [2, 0]
    console = Console(width=120, record=True)
    console.print(listing(Path("runs"), "paper"))
    row = console.export_text().splitlines()[1]
    assert "wide net" in row
    assert "base, paper" in row
    assert listing(Path("runs"), "none") == "no run in runs has the tag none"
    Run("runs/b").describe(name="wide net")
    with pytest.raises(RunError, match="2 runs have the name wide net"):
        Run("wide net")
    with pytest.raises(RunError, match="is not a run"):
        Run("wide")


@pytest.mark.parametrize("text", ["", " a", "a/b", "<b>", "\x1b[31m", "a" * 61])
def test_a_label_is_plain_text(text: str) -> None:
    with pytest.raises(UsageError, match="at most 60"):
        Options(tag=(text,))


STEPS = """{"kind":"step","step":1,"epoch":0,"samples":8,"loss":0.5,"lr":0.1,"seconds":0.02}
{"kind":"step","step":2,"epoch":0,"samples":16,"loss":null,"lr":0.1,"seconds":0.01}
"""
EVALUATION = '{"kind":"evaluation","step":2,"samples":4,"count":4.0,"loss":null,"accuracy":0.75,"each":[0.5,1.0]}\n'


def test_curves_scores_and_costs_are_tables(tmp_path: Path) -> None:
    cost = {"rank": 0, "host": "a", "device": "cpu", "peak": {"host": 5}, "held": {"parameters": 3}}
    timing = {"step": {"median": 0.5}, "phases": {"forward": {"median": 0.25}, "update": "damaged"}}
    run = Run.begin(tmp_path / "run", {"task": "<b>", "plan": "", "costs": [{**cost, "timing": timing}, {"held": 1}]})[
        0
    ]
    with pytest.raises(RunError, match="no evaluation yet"):
        run.scores()
    (run.folder / METRICS).write_text(STEPS + EVALUATION)
    assert list(run.curves()) == ["step", "epoch", "samples", "loss", "lr", "seconds"]
    assert list(run.curves()["step"]) == [1, 2]
    assert list(run.curves("evaluation")["accuracy"]) == [0.75]
    scores = run.scores()
    assert scores.metrics == {"accuracy": 0.75, "each": [0.5, 1.0]} and scores.samples == 4
    assert math.isnan(scores.loss)
    costs = run.costs()
    columns = ["peak", "parameters", "step", "forward", "update"]
    assert [costs[name][0] for name in columns] == [5, 3, 0.5, 0.25, 0.0]
    assert "&lt;b&gt;" in run._repr_html_() and "one process" in run._repr_html_() and "0.7500" in run._repr_html_()
