"""--time auto: the limit of a job from an earlier run, a data sheet or a few steps; or one message on what to do."""

import os
from pathlib import Path

import pytest

from grappe.checkpoint.format import step_folder
from grappe.cli.commands import app
from grappe.contrib.slurm import commands, forecast, slurm
from grappe.contrib.slurm.commands import read_submission
from grappe.contrib.slurm.submit import Submitted, submit_all
from grappe.errors import UsageError
from grappe.sites.sbatch import JobOptions
from grappe.verbs.foresee.training_time import TimeEstimate
from tests.contrib.slurm.test_forecast import BIG
from tests.verbs.foresee.test_training_time import cost, made, with_evaluations

ACCOUNTS = {
    **dict.fromkeys(("fir", "narval", "narval-cpu"), "def-me"), "perlmutter": "m1_g", "leonardo": "me", None: None,
}  # fmt: skip
SINFO = f"cpu*|{os.cpu_count()}|16000|(null)|2:00:00|2|1-infinite"


@pytest.fixture(autouse=True)
def folder(here: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of its own, on a machine of a cluster of such machines."""
    monkeypatch.setattr(slurm, "sinfo", lambda _: SINFO)
    return here


def shown(words: str, site: str | None = "narval", **job: object) -> Submitted:
    options = JobOptions(site=site, account=ACCOUNTS.get(site), time="auto", **job)  # type: ignore[arg-type]
    (found,) = submit_all([read_submission(words.split(), options, app)], show=True)
    return found


def test_an_earlier_runs_steps(folder: Path) -> None:
    with_evaluations(made(folder / "runs"), 50, 100)
    found = shown("train digits epochs=2000 --evaluate-every 1000")
    # 100,000 steps of 12 ms, 100 evaluations of 2 s, 2,000 saves of 0.75 s, and an environment, and a fifth
    assert "#SBATCH --time=01:15:00" in found.text
    assert "# time limit 01:15:00: 100,000 steps of 12.0 ms and 100 evaluations, as measured in the run digits-1," in (
        found.text
    )
    assert found.time_note in found.text and found.cost.startswith("1 GPU for at most 01:15:00")


def test_a_training_behind_the_epochs_of_its_initial_weights_has_less_left(folder: Path) -> None:
    made(folder / "runs")
    begun = shown("train digits epochs=52 --from old.pt --epochs-done 2").time_note
    assert ": 2,500 steps of 12.0 ms" in begun
    step_folder(made(folder / "runs", "mine").checkpoints, 200).mkdir(parents=True)
    resumed = shown("train digits epochs=52 --from old.pt --epochs-done 2 --run runs/mine").time_note
    assert ": 2,400 steps of 12.0 ms" in resumed


def test_what_a_site_does_not_give_is_said_with_what_follows(folder: Path) -> None:
    made(folder / "runs", costs=[cost(timing=cost()["timing"] | {"means": {"forward": 9.0}})])
    found = shown("train digits epochs=2000")
    assert "#SBATCH --time=7-00:00:00" in found.text
    assert "narval gives at most that limit: the job saves before its end, goes back into the queue" in found.text
    found = shown("train digits epochs=2000", chain=4)
    assert "do not go back into the queue, so submit --chain 3" in found.text.replace("\n", " ")


def test_the_limit_is_of_the_queue_that_is_named(folder: Path) -> None:
    timing = cost()["timing"] | {"means": {"forward": 1.0}}
    made(folder / "runs", plan="replicate=4", costs=[cost(timing=timing)] * 4)
    for queue, limit in (("debug", "00:30:00"), (None, "2-00:00:00")):
        found = shown("train digits epochs=2000 --plan replicate=4", "perlmutter", queue=queue)
        assert f"#SBATCH --time={limit}" in found.text


@pytest.mark.slow
def test_a_data_sheet_and_the_memory_from_one_trace(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    (folder / "big.py").write_text(BIG)
    monkeypatch.setattr(forecast, "foreseen_warnings", lambda *_: pytest.fail("it was traced twice"))
    job = JobOptions(site="narval", account="def-me", time="auto")
    commands.submit("train", "big.py", "epochs=3", job=job, dry_run=True)
    out, err = capsys.readouterr()
    assert "3 steps of " in out and "from the data sheet of NVIDIA A100 SXM4, 40 GB, not measured" in out
    assert "it will run out of memory" in err and err.count("tracing the model") == 1


def test_a_few_steps_where_the_jobs_nodes_are_of_this_machines_kind() -> None:
    found = shown("train digits epochs=100 --plan device=cpu,threads=1", None)
    assert "2,300 steps of " in found.time_note and "as measured on this machine" in found.time_note
    assert found.time_note.index("at the slow end") < found.time_note.index(", with start-up")
    with pytest.raises(UsageError, match="other CPUs than this machine"):
        shown("train digits --plan device=cpu,threads=1", "narval-cpu")


def test_the_step_that_is_said_is_at_the_slow_end_that_the_limit_is_made_of(monkeypatch: pytest.MonkeyPatch) -> None:
    known = TimeEstimate(
        step=1.0, evaluation=0.0, save=0.0, start=60.0, spread=0.5, steps_per_epoch=23,
        origin="foreseen, at its slow end",
    )  # fmt: skip
    monkeypatch.setattr(forecast, "_foreseen", lambda *_: known)
    # 2,300 steps of 2 s, a start of 2 minutes and two minutes of examining the node, and a fifth
    note = shown("train digits epochs=100 --plan device=cpu,threads=1", None).time_note
    assert "time limit 01:40:00: 2,300 steps of 2.00 s and" in note


def test_several_numbers_of_gpus_have_limits_of_their_own(folder: Path) -> None:
    made(folder / "runs", costs=[cost(timing=cost()["timing"] | {"means": {"forward": 9.0}})])
    options = JobOptions(site="narval", account="def-me", time="auto", gpus=(1, 2))
    one, two = submit_all([read_submission(["train", "digits", "epochs=20"], options, app)], show=True)
    assert "as measured" in one.time_note and "data sheet" in two.time_note


@pytest.mark.parametrize(
    ("words", "site", "says"),
    [
        ("train digits --plan offload=cpu", "narval", "Give a limit, as --time 3h; or try some"),
        ("train digits lr=0.3", "leonardo", "no data sheet of leonardo's GPU"),
        ("train digits --plan replicate=8", "fir", "the rate of the network between nodes is not known"),
        ("train digits --plan offload=cpu", "narval", "-- train digits --plan offload=cpu --steps 100"),
        ("train nothing.py", "narval", "the task cannot be loaded here"),
        ("verify digits", "narval", "--time auto is for trainings"),
    ],
)
def test_what_is_not_known_is_one_message(words: str, site: str | None, says: str) -> None:
    with pytest.raises(UsageError, match="--time") as error:
        shown(words, site)
    assert says in str(error.value) and error.value.exit_code == 2
    assert not list(Path().glob("runs/*"))


def test_an_interactive_allocation_has_no_training() -> None:
    with pytest.raises(UsageError, match="whose time is yours"):
        commands.submit("train", "digits", job=JobOptions(time="auto"), interactive=True, dry_run=True)


def test_a_limit_that_is_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "placed", lambda *_: pytest.fail("it was looked for"))
    options = JobOptions(site="narval", account="def-me", time="3h")
    (found,) = submit_all([read_submission(["train", "digits"], options, app)], show=True)
    assert "#SBATCH --time=03:00:00" in found.text and not found.time_note
