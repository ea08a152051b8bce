"""Wrong input: one clear message on standard error, exit code 2, no traceback; and nothing is spoilt."""

from __future__ import annotations

import os
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from grappe.cli import commands
from grappe.training.run import Run
from tests.commands import GRAPPE, Command

PLAN = ("--plan", "threads=1,device=cpu")
TASK = """
from pathlib import Path

import torch
from torch import nn

import grappe


class Mine(grappe.Task):
    epochs: int = 1
    batch_size: int = 4

    def model(self):
        return nn.Linear(3, 2)

    def data(self, split, folder):
        return grappe.Arrays(torch.ones(32, 3), torch.zeros(32, dtype=torch.long))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)
"""
ARRAYS = "grappe.Arrays(torch.ones(32, 3), torch.zeros(32, dtype=torch.long))"
SAMPLES = """

class Samples(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        if index == 7:
            raise KeyError("no sample seven")
        return torch.ones(3), torch.tensor(0)


class Endless(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield torch.ones(3), torch.tensor(0)
"""
Complain = Callable[..., str]


@pytest.fixture
def complain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Complain:
    """Runs a grappe command in an empty folder; its one complaint, without the name in front."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 2) -> str:
        monkeypatch.setattr("sys.argv", ["grappe", *arguments])
        with pytest.raises(SystemExit) as end:
            commands.main()
        err = capfd.readouterr().err
        assert end.value.code == code, err
        assert "Traceback" not in err
        assert re.fullmatch(r"grappe: [^\n]+\n", err), err
        return err.removeprefix("grappe: ").rstrip()

    return run


def changed(old: str, new: str) -> str:
    """The task's text with a part of it replaced."""
    assert old in TASK
    return TASK.replace(old, new)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "digts"], "there is no task 'digts': did you mean digits?"),
        (["train", "my_task.py"], "there is no task file my_task.py: is the path right"),
        (["train", "no.such.module"], "the task no.such.module cannot be loaded: ModuleNotFoundError"),
        (["train", "digits", "epocs=3"], "task Digits has no 'epocs': did you mean epochs?"),
        (["train", "digits", "epochs=many"], "task Digits: epochs=many is not a whole number"),
        (["train", "digits", "epochs=0"], "epochs=0: it must be a whole number, at least 1"),
        (["train", "digits", "epochs=1", "epochs=2"], "epochs is given twice: 1 and 2"),
        (["train", "digits", "--plan", "replicat=2"], "plan has no 'replicat': did you mean replicate?"),
        (["train", "digits", "--plan", "replicate=two"], "plan: replicate=two is not a whole number"),
        (["train", "digits", "--plan", "precision=fp8"], "precision=fp8 is not one of fp32, tf32, bf16, fp16"),
        (["train", "digits", "--plan", "engine=natve"], "there is no engine 'natve': did you mean native?"),
        (
            ["train", "digits", "--plan", "engine=textbook,shard=2"],
            "has no shard: engines that have: deepspeed, lightning, native",
        ),
        (["train", "digits", "--plan", "engine=textbook,pipeline=2"], "engine=textbook has no pipeline: "),
        (["train", "digits", "--plan", "backend=mpi,replicate=2"], "backend=mpi is not in this torch"),
        (["train", "digits", "--plan", "", "--evaluate-every", "0"], "--evaluate-every=0: it must be at least 1"),
        (["train", "digits", "--evry", "3"], "there is no option --evry"),
        (["trian", "digits"], "there is no command 'trian': grappe train does that"),
        (["train"], "TASK is missing"),
        (["train", "digits", "--run", "/proc/no/run"], "/proc/no/run cannot be written: "),
        (["train", "digits", "--from", "nowhere"], "--from nowhere: "),
        (["evaluate", "runs/none"], "runs/none is not a run (no run.json)"),
        (["predict", "runs/none", "validation"], "runs/none is not a run (no run.json)"),
        (["predict", "runs/a", "--split", "test"], "no option --split: give INPUTS without it: grappe predict"),
        (["tasks", "digts"], "there is no task 'digts': did you mean digits?"),
    ],
)
def test_wrong_words(complain: Complain, arguments: list[str], message: str) -> None:
    plan = () if "--plan" in arguments or arguments[0] != "train" else PLAN
    assert message in complain(*arguments, *plan)
    assert not list(Path("runs").glob("*"))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("raise RuntimeError('out of luck')", "RuntimeError: out of luck (", id="raises at import"),
        pytest.param("exit(3)", "SystemExit: 3 (", id="ends itself"),
        pytest.param("def broken(:", "SyntaxError: invalid syntax (", id="syntax"),
        pytest.param(TASK + "grappe.train(Mine())", "the task's file starts processes itself", id="trains itself"),
        pytest.param("x = 1", "derives from grappe.Task. A script runs as it is with grappe launch", id="no task"),
        pytest.param(TASK + TASK.partition("import grappe")[2].replace("Mine", "Other"),
            "has several tasks: Mine, Other. Say which, as in task.py:Mine", id="two tasks"),
        pytest.param(changed("    epochs: int = 1", "    loss: str = 'l1'"), "the field 'loss' hides the method",
            id="a field hides a method"),
        pytest.param(TASK.partition("    def optimizer")[0], "Mine has no optimizer(): write it", id="no optimizer"),
        pytest.param(changed("return nn.Linear(3, 2)", "return nn.Linear(3, 'two')"), "in model(): return nn.Linear",
            id="model raises"),
        pytest.param(changed("return nn.Linear(3, 2)", "return 5"), "Mine.model() returned int", id="no module"),
        pytest.param(changed(ARRAYS, "1 / 0"), "ZeroDivisionError: division by zero (", id="data raises"),
        pytest.param(changed(ARRAYS, "[]"), "Mine.data('train') is empty", id="no samples"),
        pytest.param(changed(ARRAYS, "Endless()") + SAMPLES, "is a stream: an evaluation sees", id="iterable"),
        pytest.param(changed(ARRAYS, "Samples()") + SAMPLES, "KeyError: 'no sample seven' (", id="a sample raises"),
        pytest.param(changed("(named_parameters, lr=0.1)", "([], lr=0.1)"), "in optimizer(): return torch.optim.SGD",
            id="optimizer raises"),
        pytest.param(changed(', reduction="none")', ")"), 'reduction="none"', id="the loss is a mean"),
        pytest.param(changed("nn.Linear(3, 2)", "nn.Linear(4, 2)"),
            "shapes cannot be multiplied (8x3 and 4x2) (Linear.forward(), ", id="shapes do not fit"),
    ],
)  # fmt: skip
def test_wrong_tasks(complain: Complain, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "task.py").write_text(text)
    said = complain("train", "task.py", *PLAN)
    assert message in said


def test_a_sample_that_raises_in_a_data_worker(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(changed(ARRAYS, "Samples()") + SAMPLES)
    said = complain("train", "task.py", "--plan", "threads=1,device=cpu,workers=1")
    assert "KeyError: 'no sample seven' (" in said
    assert "in __getitem__(): raise KeyError" in said


def test_a_loss_that_is_no_number(complain: Complain, tmp_path: Path) -> None:
    inputs = "torch.ones(32, 3).index_fill(0, torch.tensor(20), float('nan'))"
    (tmp_path / "task.py").write_text(changed("torch.ones(32, 3)", inputs))
    said = complain("train", "task.py", "epochs=3", "--run", "run", "--log-samples", "--save-every", "1", *PLAN)
    found = re.match(
        r"the loss is nan in epoch 1, step (\d+) \(sample ids ([\d, ]+)\)\. No checkpoint was overwritten", said
    )
    assert found, said
    step = int(found[1])
    assert "20" in found[2].split(", ")
    run = Run(tmp_path / "run")
    newest = run.latest()
    assert newest is not None
    assert newest.step == step - 1
    assert not run.is_finished()
    assert all(one["loss"] is not None for one in run.records("step"))


def test_a_run_of_another_task_or_of_nothing(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "other.py").write_text(TASK.replace("Mine", "Other"))
    (tmp_path / "file").touch()
    (tmp_path / "strangers").mkdir()
    (tmp_path / "strangers" / "thesis.tex").write_text("precious")
    run_quietly("train", "task.py", "--run", "runs/mine", "--steps", "1", *PLAN)
    before = sorted(path.name for path in (tmp_path / "runs" / "mine").iterdir())
    said = complain("train", "other.py", "--run", "runs/mine", *PLAN)
    assert "runs/mine is a run of the task" in said
    assert sorted(path.name for path in (tmp_path / "runs" / "mine").iterdir()) == before
    said = complain("train", "task.py", "--run", "strangers", *PLAN)
    assert said == "strangers holds thesis.tex and is not a run: give an empty or a new folder"
    assert [path.name for path in (tmp_path / "strangers").iterdir()] == ["thesis.tex"]
    assert "file/run cannot be written: Not a directory" in complain("train", "task.py", "--run", "file/run", *PLAN)
    said = complain("evaluate", "runs/yours")
    assert said == "runs/yours is not a run (no run.json); there is: runs/mine"
    assert complain("evaluate", "yours") == "yours is not a run (no run.json); there is: runs/mine"


class Trap:
    """Leaves a trace where it is unpickled."""

    def __reduce__(self) -> tuple:
        return os.mkdir, ("trapped",)


def test_a_pickle_is_never_run(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(TASK)
    run_quietly("train", "task.py", "--run", "run", "--steps", "1", *PLAN)
    np.save(tmp_path / "objects.npy", np.array([Trap()], dtype=object), allow_pickle=True)
    (tmp_path / "pickle.npy").write_bytes(pickle.dumps(Trap()))
    np.save(tmp_path / "words.npy", np.array(["a", "b"]))
    np.save(tmp_path / "wide.npy", np.ones((2, 5)))
    for name in ("objects.npy", "pickle.npy"):
        assert "is not a plain array of numbers" in complain("predict", "run", name)
    assert "should hold an array of numbers" in complain("predict", "run", "words.npy")
    assert "does not take inputs of shape ['N', 5]" in complain("predict", "run", "wide.npy")
    assert "none.npy cannot be read: No such file" in complain("predict", "run", "none.npy")
    assert "give one of train, validation, test, a .npy file" in complain("predict", "run", "inputs.csv")

    cifar = tmp_path / "data" / "cifar-10-batches-py"
    cifar.mkdir(parents=True)
    assert "not found in" in complain("train", "cifar10", "--data", "data", *PLAN)
    for number in range(1, 6):
        (cifar / f"data_batch_{number}").write_bytes(pickle.dumps({"data": Trap(), "labels": [1]}))
    said = complain("train", "cifar10", "--data", "data", *PLAN)
    assert "data_batch_1" in said
    assert "mkdir" in said
    (cifar / "data_batch_1").write_bytes(pickle.dumps({"data": np.zeros((2, 9), np.uint8), "labels": [1, 2]}))
    assert "data_batch_1 is damaged" in complain("train", "cifar10", "--data", "data", *PLAN)
    assert not (tmp_path / "trapped").exists()


def test_a_plan_that_does_not_fit_torchruns_world(
    complain: Complain, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    variables = {"RANK": "0", "WORLD_SIZE": "6", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    said = complain("train", "digits", "--plan", "shard=4,replicate=2")
    assert said == "plan needs 8 processes (replicate=2 x shard=4), this job has 6: use shard=3, or ask for 8"
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("sys.argv", ["grappe", "train", "digits"])
    with pytest.raises(SystemExit) as end:
        commands.main()
    assert end.value.code == 2
    assert capfd.readouterr().err == ""  # process 0 says it
    monkeypatch.setenv("WORLD_SIZE", "six")
    assert "unset RANK, WORLD_SIZE" in complain("train", "digits")


def test_a_mistake_in_several_processes_is_told_once(complain: Complain, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(changed(', reduction="none")', ")"))
    said = complain("train", "task.py", "--plan", "replicate=3,threads=1,device=cpu")
    assert said.startswith("Mine.loss() returned one number")


def test_from_a_shell(tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(changed("return nn.Linear(3, 2)", "return nn.Linear(3, 'two')"))
    command = Command(GRAPPE, "train", "task.py", "--plan", "replicate=2,threads=1", cwd=tmp_path)
    code, out, err = command.end()
    assert (code, out) == (2, "")
    assert re.fullmatch(r"grappe: [^\n]*TypeError: [^\n]*in model\(\): return nn.Linear\(3, 'two'\)\)\n", err), err
    command.close()


def test_debug_shows_where(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["grappe", "--debug", "train", "digts"])
    with pytest.raises(SystemExit):
        commands.main()
    err = capfd.readouterr().err
    assert "Traceback" in err
    assert "tasks/__init__.py" in err


def run_quietly(*arguments: str) -> None:
    """Runs a command that works."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as end:
        patch.setattr("sys.argv", ["grappe", *arguments])
        commands.main()
    assert end.value.code == 0
