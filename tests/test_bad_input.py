"""Wrong input: one clear message on standard error, exit code 2, no traceback; and nothing is spoilt."""

from __future__ import annotations

import os
import pickle
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from grappe import cli
from grappe.run import Run
from tests.commands import GRAPPE

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
def complain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Complain:
    """Runs a grappe command in an empty folder; its one complaint, without the name in front."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str, code: int = 2) -> str:
        monkeypatch.setattr("sys.argv", ["grappe", *arguments])
        with pytest.raises(SystemExit) as end:
            cli.main()
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
        (["train", "digits", "--plan", "engine=textbook,shard=2"], "has no shard: engines that have: native"),
        (["train", "digits", "--plan", "pipeline=2"], "engine=native has no pipeline: "),
        (["train", "digits", "--plan", "backend=mpi,replicate=2"], "backend=mpi is not in this torch"),
        (["train", "digits", "--plan", "", "--evaluate-every", "0"], "--evaluate-every=0: it must be at least 1"),
        (["train", "digits", "--evry", "3"], 'Unknown option: --evry'),
        (["trian", "digits"], 'Unknown command "trian". Did you mean "train"?'),
        (["train"], "TASK requires an argument"),
        (["train", "digits", "--run", "/proc/no/run"], "/proc/no/run cannot be written: "),
        (["train", "digits", "--from", "nowhere"], "--from nowhere: "),
        (["evaluate", "runs/none"], "runs/none is no run: it has no run.json"),
        (["predict", "runs/none", "validation"], "runs/none is no run: it has no run.json"),
        (["tasks", "digts"], "there is no task 'digts': did you mean digits?"),
    ],
)
def test_wrong_words(complain: Complain, arguments: list[str], message: str) -> None:
    plan = () if "--plan" in arguments or arguments[0] != "train" else PLAN
    assert message in complain(*arguments, *plan)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        pytest.param("raise RuntimeError('out of luck')", "RuntimeError: out of luck (", id="raises at import"),
        pytest.param("exit(3)", "SystemExit: 3 (", id="ends itself"),
        pytest.param("def broken(:", "SyntaxError: invalid syntax (", id="syntax"),
        pytest.param("x = 1", "there is no class in it that derives from grappe.Task", id="no task"),
        pytest.param(TASK + TASK.partition("import grappe")[2].replace("Mine", "Other"),
            "several tasks, say which: task.py:Mine, task.py:Other", id="two tasks"),
        pytest.param(changed("    epochs: int = 1", "    loss: str = 'l1'"), "the field 'loss' hides the method",
            id="a field hides a method"),
        pytest.param(TASK.partition("    def optimizer")[0], "Mine has no optimizer(): write it", id="no optimizer"),
        pytest.param(changed("return nn.Linear(3, 2)", "return nn.Linear(3, 'two')"), "in model(): return nn.Linear",
            id="model raises"),
        pytest.param(changed("return nn.Linear(3, 2)", "return 5"), "Mine.model() returned int", id="no module"),
        pytest.param(changed(ARRAYS, "1 / 0"), "ZeroDivisionError: division by zero (", id="data raises"),
        pytest.param(changed(ARRAYS, "[]"), "Mine.data('train') is empty", id="no samples"),
        pytest.param(changed(ARRAYS, "Endless()") + SAMPLES, "is an IterableDataset: it cannot be", id="iterable"),
        pytest.param(changed(ARRAYS, "Samples()") + SAMPLES, "KeyError: 'no sample seven' (", id="a sample raises"),
        pytest.param(changed("(named_parameters, lr=0.1)", "([], lr=0.1)"), "in optimizer(): return torch.optim.SGD",
            id="optimizer raises"),
        pytest.param(changed(', reduction="none")', ")"), 'reduction="none"', id="the loss is a mean"),
        pytest.param(changed("nn.Linear(3, 2)", "nn.Linear(4, 2)"), "(32x3", id="shapes do not fit"),
    ],
)  # fmt: skip
def test_wrong_tasks(complain: Complain, tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "task.py").write_text(text)
    said = complain("train", "task.py", *PLAN)
    assert message in said
