"""Commands after `grappe submit … --`: any command of grappe, or a script, read by the commands' own definitions."""

import dataclasses
import shlex
from pathlib import Path

import pytest

from grappe import sites
from grappe.cli.commands import app
from grappe.contrib.slurm.commands import read_submission
from grappe.contrib.slurm.packages import job_packages
from grappe.contrib.slurm.resources import jobs_of, laid_out, line_in_allocation
from grappe.contrib.slurm.script import Script, render
from grappe.contrib.slurm.submit import job_script
from grappe.errors import UsageError
from grappe.plan import Plan
from grappe.sites.sbatch import SCRIPT, JobOptions

JOB = JobOptions()


@pytest.mark.parametrize(
    ("words", "command", "task", "plans"),
    [
        ("train digits epochs=3 --plan replicate=2", "train", "digits", ("replicate=2",)),
        ("grappe train digits", "train", "digits", ("",)),
        ("verify digits --plan shard=2", "verify", "digits", ("shard=2",)),
        ("drill digits", "drill", "digits", ("",)),
        ("measure digits --plan replicate=1 --plan replicate=2", "measure", "digits", ("replicate=1", "replicate=2")),
        ("evaluate runs/one --split test", "evaluate", None, ("",)),
    ],
)
def test_commands(words: str, command: str, task: str | None, plans: tuple[str, ...]) -> None:
    found = read_submission(words.split(), JOB, app)
    assert (found.command, found.task, found.plans) == (command, task, plans)
    assert found.arguments == tuple(words.removeprefix("grappe ").split()[1:])


@pytest.mark.parametrize("python", [[], ["python"], ["python3"]])
def test_scripts(python: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").touch()
    found = read_submission([*python, "mine.py", "--lr", "0.1", "-x"], JOB, app)
    assert (found.command, found.script, found.arguments) == (SCRIPT, Path("mine.py"), ("mine.py", "--lr", "0.1", "-x"))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("python -c x", "python is followed by a script"),
        ("--show train digits", "grappe submit --dry-run -- train digits"),
        ("tune --study mine --dry-run", "needs no job"),
        ("fetch mnist", "login node"),
    ],
)
def test_what_is_no_job_is_refused(words: str, told: str) -> None:
    with pytest.raises(UsageError, match=told):
        read_submission(words.split(), JOB, app)


def test_short_options_and_the_folder_of_runs() -> None:
    found = read_submission(["train", "digits", "-p", "shard=2", "--runs", "mine"], JOB, app)
    assert (found.plans, found.job.runs, found.arguments[1]) == (("shard=2",), Path("mine"), "--plan")


def test_a_search_names_its_task() -> None:
    words = ["tune", "digits", "lr=0.1..1", "--parallel", "3", "--study", "mine", "--plan", "shard=2"]
    found = read_submission(words, JOB, app)
    assert (found.task, found.parallel, found.study, found.plans) == ("digits", 3, Path("mine"), ("shard=2",))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--gpus", "2"], "--ntasks-per-node=2 --cpus-per-task=12 --gpus-per-node=a100:2 --mem=248G --time=01:00:00"),
        (["--", "train", "digits", "--plan", "shard=4"], "--ntasks-per-node=4 --cpus-per-task=12"),
        (["--", "tune", "digits", "lr=0.1..1", "--parallel", "3"], "--cpus-per-task=36 --gpus-per-node=a100:3"),
        (["--gpus", "1", "--sbatch", "--comment=$(x)"], None),
        (["--gpus", "1", "--partition", "a;b"], None),
        (["--gpus", "1", "--env", "here"], None),
        (["--gpus", "1,2"], None),
    ],
)
def test_interactive_allocations(words: list[str], expected: str | None, capsys, monkeypatch) -> None:
    monkeypatch.setattr("os.execvp", lambda *given: pytest.fail(f"{given} is no --dry-run"))
    line = ["submit", "--interactive", "--dry-run", "--site", "narval", "--account", "def-me", "--time", "1h", *words]
    if expected is None:
        with pytest.raises(UsageError):
            app(line)
        return
    app(line)
    said = capsys.readouterr().out
    assert said.startswith("salloc --job-name=interactive --account=def-me ")
    assert expected in " ".join(said.split())


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--gpus 2 -- train digits", "srun --cpus-per-task=12 --gpu-bind=none grappe train digits --plan replicate=2"),
        (
            "--gpus 1 -- grappe train digits --plan shard=1",
            "srun --cpus-per-task=12 --gpu-bind=none grappe train digits --plan shard=1",
        ),
        ("-- measure digits --plan replicate=2", "grappe measure digits --plan replicate=2"),
    ],
)
def test_the_line_to_start_in_an_allocation(words: str, expected: str) -> None:
    options, _, command = words.partition("-- ")
    gpus = tuple(int(word) for word in options.split()[1:])
    submission = read_submission(command.split(), JobOptions(site="narval", account="def-me", gpus=gpus), app)
    assert " ".join(line_in_allocation(submission)) == expected


@pytest.mark.parametrize(("words", "wanted"), [(["tune", "digits", "lr=0.1|1"], True), (["train", "digits"], False)])
def test_a_search_needs_optuna(words: list[str], wanted: bool) -> None:
    submission = read_submission(words, JobOptions(site="narval", account="def-me"), app)
    site = sites.find("narval")
    packages, _ = job_packages(submission, site, Plan(), show=True)
    assert any(b"optuna" in one for one in packages.files.values()) == wanted


@pytest.mark.parametrize("command", ["predict run x.npy", "export run --out out"])
def test_what_computes_on_the_cpu_has_no_gpu(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    submission = read_submission(command.split(), JobOptions(site="narval", account="def-me"), app)
    layout, _, _ = laid_out(next(jobs_of(submission)))
    assert layout.gpus == 0


@pytest.mark.slow
@pytest.mark.parametrize("command", ["train digits", "verify digits", "train digits --plan threads=2"])
def test_a_site_of_cpu_nodes_supplies_the_device(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    job = ["--site", "jean-zay-cpu", "--account", "abc@cpu", "--dry-run", "--no-doctor", "--"]
    assert app(["submit", *job, *command.split()]) == 0
    text = capsys.readouterr().out
    assert "plan: device=cpu" in text and "--plan device=cpu" in text.replace("'", "") and "gpu:" not in text


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        "--site narval --account def-me --time 90m --gpus 2 -- train digits epochs=3 lr=0.2",
        "--site narval --account def-me --time 3h --no-doctor --mem 32G --sbatch=--exclude=n1 --sbatch=--comment=x "
        "--modules python/3.11,gcc --with einops --with timm==1.0 --restarts 3 -- train digits --run runs/mine",
        "--site jean-zay-a100 --account abc@a100 --chain 3 --name here -- verify digits --plan replicate=2",
    ],
)
def test_the_line_in_a_script_makes_it_again(words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    def script(words: list[str]) -> Script:
        _, bound, _ = app.parse_args(["submit", *words], exit_on_error=False, print_error=False)
        submission = read_submission(bound.args, bound.arguments["job"], app)
        return job_script(next(jobs_of(submission)), show=True)

    made = script(words.split())
    grappe, submit, *line = shlex.split(made.command)
    again = script(line)
    if made.kind != "train":  # whose folder has a random name
        again = dataclasses.replace(again, run=made.run)
    assert (grappe, submit) == ("grappe", "submit")
    assert render(again) == render(made)
