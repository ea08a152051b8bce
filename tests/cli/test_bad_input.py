"""Wrong input: one clear message on standard error, exit code 2, no traceback; and nothing is spoilt.

Wrong tasks are in tests/tasks/error_corpus.py.
"""

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.commands import GRAPPE, ran
from tests.tasks.error_corpus import MODEL, SAMPLE, TASK
from tests.typed import ended

PLAN = ("--plan", "threads=1,device=cpu")
Complain = Callable[..., str]


@pytest.fixture
def complain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Complain:
    """Runs a grappe command in an empty folder; its one complaint, without the name in front."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> str:
        code, err = ended(*arguments), capfd.readouterr().err
        assert code == 2, err
        assert re.fullmatch(r"grappe: [^\n]+\n", err), err
        return err.removeprefix("grappe: ").rstrip()

    return run


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("train digts", "there is no task 'digts': did you mean digits?"),
        ("train my_task.py", "there is no task file my_task.py: is the path right"),
        ("train no.such.module", "the task no.such.module cannot be loaded: ModuleNotFoundError"),
        ("train digits epocs=3", "task Digits has no 'epocs': did you mean epochs?"),
        ("train digits epochs=many", "task Digits: epochs=many is not a whole number"),
        ("train digits epochs=1 epochs=2", "epochs is given twice: 1 and 2"),
        ("train digits --plan replicat=2", "plan has no 'replicat': did you mean replicate?"),
        ("train digits --plan engine=textbook,shard=2", "has no shard: engines that have: deepspeed, lightning, nati"),
        ("train digits --plan backend=mpi,replicate=2", "backend=mpi is not in this torch"),
        ("train digits --evaluate-every 0", "--evaluate-every=0: it must be at least 1"),
        ("train digits --evry 3", "there is no option --evry"),
        ("trian digits", "there is no command 'trian': grappe train does that"),
        ("train", "TASK is missing"),
        ("train digits --run /proc/no/run", "/proc/no/run cannot be written: "),
        ("train digits --from nowhere", "--from nowhere: "),
        ("evaluate runs/none", "runs/none is not a run (no run.json)"),
        ("predict runs/none validation", "runs/none is not a run (no run.json)"),
        ("predict runs/a --split test", "no option --split: give INPUTS without it: grappe predict"),
        ("tasks digts", "there is no task 'digts': did you mean digits?"),
    ],
)
def test_wrong_words(complain: Complain, arguments: str, message: str) -> None:
    plan = () if "--plan" in arguments or not arguments.startswith("train") else PLAN
    assert message in complain(*arguments.split(), *plan)
    assert not list(Path("runs").glob("*"))


def test_a_sample_that_raises_in_a_data_worker(complain: Complain, tmp_path: Path) -> None:
    raises = f"if index == 7:\n            raise KeyError('no sample seven')\n        {SAMPLE}"
    (tmp_path / "task.py").write_text(TASK.replace(SAMPLE, raises))
    said = complain("train", "task.py", "--plan", "threads=1,device=cpu,workers=1")
    assert "KeyError: 'no sample seven' (" in said
    assert "in __getitem__(): raise KeyError" in said


def test_a_run_of_another_task_or_of_nothing(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "other.py").write_text(TASK.replace("Mine", "Other"))
    (tmp_path / "file").touch()
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "thesis.tex").write_text("precious")
    assert ended("train", "task.py", "--run", "runs/mine", "--steps", "1", *PLAN) == 0
    before = sorted(path.name for path in (tmp_path / "runs" / "mine").iterdir())
    assert "runs/mine is a run of the task" in complain("train", "other.py", "--run", "runs/mine", *PLAN)
    assert sorted(path.name for path in (tmp_path / "runs" / "mine").iterdir()) == before
    said = complain("train", "task.py", "--run", "strangers", *PLAN)
    assert said == "strangers holds thesis.tex and is not a run: give an empty or a new folder"
    assert [path.name for path in (tmp_path / "strangers").iterdir()] == ["thesis.tex"]
    assert "file/run cannot be written: Not a directory" in complain("train", "task.py", "--run", "file/run", *PLAN)
    for name in ("runs/yours", "yours"):
        assert complain("evaluate", name) == f"{name} is not a run (no run.json); there is: runs/mine"


class Trap:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("trapped",)


def test_a_pickle_is_never_run(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    assert ended("train", "task.py", "--run", "run", "--steps", "1", *PLAN) == 0
    np.save(tmp_path / "objects.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Trap()))
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    np.save(tmp_path / "wide.npy", np.ones((2, 5)))
    for name, words in (
        ("objects.npy", "is not a plain array of numbers"),
        ("pickle.npy", "is not a plain array of numbers"),
        ("words.npy", "should hold an array of numbers"),
        ("wide.npy", "does not take inputs of shape ['N', 5]"),
        ("none.npy", "none.npy cannot be read: No such file"),
        ("inputs.txt", "give one of train, validation, test, a .npy or .csv file"),
    ):
        assert words in complain("predict", "run", name)

    cifar = tmp_path / "data" / "cifar-10-batches-py"
    cifar.mkdir(parents=True)
    train = ("train", "cifar10", "--data", "data", *PLAN)
    assert "not found in" in complain(*train)
    for number in range(1, 6):
        (cifar / f"data_batch_{number}").write_bytes(pickle.dumps({"data": Trap(), "labels": [1]}))
    said = complain(*train)
    assert "data_batch_1" in said and "mkdir" in said
    (cifar / "data_batch_1").write_bytes(pickle.dumps({"data": np.zeros((2, 9), np.uint8), "labels": [1, 2]}))
    assert "data_batch_1 is damaged" in complain(*train)
    assert not (tmp_path / "trapped").exists()


def test_a_plan_that_does_not_fit_torchruns_world(complain: Complain, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = complain("train", "digits", "--plan", "shard=4,replicate=2")
    assert said == "plan needs 8 processes (replicate=2 x shard=4), this job has 6: use shard=3, or ask for 8"
    monkeypatch.setenv("RANK", "1")
    assert ended("train", "digits") == 2
    assert capfd.readouterr().err == ""  # process 0 says it
    monkeypatch.setenv("WORLD_SIZE", "six")
    assert "unset RANK, WORLD_SIZE" in complain("train", "digits")


def test_from_a_shell(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK.replace(MODEL, "return nn.Linear(3, 'two')"))
    done = ran(GRAPPE, "train", "task.py", "--plan", "replicate=2,threads=1", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    pattern = r"grappe: [^\n]*TypeError: [^\n]*in model\(\): return nn.Linear\(3, 'two'\)\)\n"
    assert re.fullmatch(pattern, done.stderr), done.stderr


def test_debug_shows_where(capfd: pytest.CaptureFixture[str]) -> None:
    ended("--debug", "train", "digts")
    err = capfd.readouterr().err
    assert "Traceback" in err and "finder.py" in err
