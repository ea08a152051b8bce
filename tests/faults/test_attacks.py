"""Attacks, and public reports of crashes: a training or a command ends with a message, or is done."""

import fcntl
import gzip
import json
import os
import pty
import shutil
import struct
import subprocess
import termios
import threading
from pathlib import Path

import pytest

from tests.commands import GRAPPE, free_port, ran

TASK = """
import sys, torch
from torch import nn
from grappe import Task
from grappe.data import Corpus

class Samples(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index):
        if index == 17: {end}
        return torch.ones(4) * index, index % 2

class Mine(Task):
    epochs: int = 1
    batch_size: int = 16
    def model(self): return nn.Linear(4, 2)
    def data(self, split, folder): return {data}
    def loss(self, output, target): return nn.functional.cross_entropy(output, target, reduction="none")
    def optimizer(self, named_parameters): return torch.optim.SGD(named_parameters, lr=0.001)
"""
SUBMIT = ("submit", "--site", "narval", "--account", "x", "--dry-run")
ONE_STEP = ("train", "digits", "epochs=1", "--steps", "1", "--run")


def run(folder: Path, *words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return ran(GRAPPE, *words, cwd=folder, **environment)


def under_torchrun(size: int = 1) -> dict[str, str]:
    """Variables that torchrun sets for the first process."""
    world, ranks = {"WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size)}, {"RANK": "0", "LOCAL_RANK": "0"}
    return {**world, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    run(folder, *ONE_STEP, "runs/good").check_returncode()
    return folder


@pytest.fixture
def runs(trained: Path, tmp_path: Path) -> Path:
    shutil.copytree(trained / "runs", tmp_path / "runs")
    shutil.copytree(trained / "runs/good", tmp_path / "runs/sent")
    return tmp_path


@pytest.mark.parametrize("end", ["sys.exit()", "sys.exit(0)", "raise StopIteration"])
def test_a_sample_that_ends_the_program_is_a_failure_under_a_launcher(tmp_path: Path, end: str) -> None:
    (tmp_path / "mine.py").write_text(TASK.format(end=end, data="Samples()"))
    done = run(tmp_path, "train", "mine.py", "--run", "r", "--plan", "workers=0", **under_torchrun())
    assert done.returncode in (1, 2)
    assert "mine.py, line 10" in done.stderr
    assert not (tmp_path / "r/done").exists()


def test_an_error_class_of_several_arguments_is_said_under_a_launcher(tmp_path: Path) -> None:
    (tmp_path / "c").mkdir()
    content = gzip.compress(b'{"x": 1, "y": 0}\n' * 200)
    (tmp_path / "c/rows.jsonl.gz").write_bytes(content[: len(content) // 2])
    (tmp_path / "mine.py").write_text(TASK.format(end="pass", data='Corpus("c", columns=["x", "y"])'))
    done = run(tmp_path, "train", "mine.py", "--run", "r", **under_torchrun())
    assert done.returncode == 2
    assert "rows.jsonl.gz" in done.stderr
    assert "a bug in grappe" not in done.stderr


def test_a_file_in_another_encoding_than_it_says_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("# coding: utf-16\nfrom grappe.tasks.digits import Digits\n")
    done = run(tmp_path, "train", "mine.py", "--run", "r")
    assert done.returncode == 2
    assert "mine.py cannot be read as Python" in done.stderr


def test_french_on_a_stream_without_accents(tmp_path: Path) -> None:
    locale = {"LANG": "fr_FR.ISO-8859-1", "LC_ALL": "fr_FR.ISO-8859-1", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    words, environment = [GRAPPE, *ONE_STEP, "r"], {**os.environ, **locale}  # cold: an interpreter reads them first
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert not done.returncode, done.stderr[-500:]


def test_a_loss_of_many_digits_is_left_out(runs: Path) -> None:
    with (runs / "runs/sent/metrics.jsonl").open("a") as stream:
        stream.write('{"kind": "step", "step": 1, "loss": ' + "9" * 400 + "}\n")
    assert not run(runs, "report", "runs/sent", "--out", "r.html").returncode


def test_a_damaged_run_hides_no_other(runs: Path) -> None:
    (runs / "runs/sent/run.json").write_text("")
    listed = json.loads(run(runs, "runs", "--json").stdout)["runs"]
    assert [Path(each["folder"]).name for each in listed] == ["good", "sent"]
    assert "cannot be read" in listed[1]["status"]
    assert "sent" in run(runs, "runs").stdout


@pytest.mark.parametrize("name", ["failed", "usage.jsonl", "code.txt"])
def test_a_file_without_end_takes_no_memory(runs: Path, name: str) -> None:
    file = runs / "runs/sent" / name
    file.unlink(missing_ok=True)
    (runs / "runs/sent/done").unlink(missing_ok=True)
    with file.open("wb") as stream:
        stream.truncate(1 << 40)
    assert "good" in run(runs, "runs").stdout
    done = run(runs, "report", "runs/sent", "--out", "r.html")
    assert done.returncode == 0 or (done.returncode == 2 and name in done.stderr)


def test_a_number_of_a_job_that_is_none_is_passed_over(tmp_path: Path) -> None:
    assert not run(tmp_path, *ONE_STEP, "r", GRAPPE_WAITED="9" * 5000).returncode


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("train", "digits", f"seed={2**64}"), "seed"),
        (("train", "digits", "--plan", "microbatches=1000000000000"), "microbatches"),
        (("train", "digits", "--plan", "replicate=100000"), "processes"),
        (("train", "digits", "--plan", "threads=100000000"), "threads"),
        (("train", "digits", "--plan", "memory=" + "9" * 320 + "TB"), "memory"),
        (("foresee", "digits", "--plan", "memory=" + "9" * 320 + "TB"), "memory"),
        (("train", "digits", "--plan", "engine=deepspeed,config=/dev/zero"), "config"),
        (
            (*SUBMIT, "--time", "30", "--", "train", "digits"),
            "--time",
        ),
        (
            (*SUBMIT, "--time", "9" * 5000, "--", "train", "digits"),
            "--time",
        ),
        (
            (*SUBMIT, "--time", "1h", "--gpus", "9" * 5000, "--", "train", "digits"),
            "--gpus",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused_by_name(tmp_path: Path, words: tuple[str, ...], named: str) -> None:
    done = run(tmp_path, *words)
    assert done.returncode == 2, done.stderr[-500:]
    assert named in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("variables", "named"),
    [
        ({"MASTER_ADDR": "no-such-node.invalid"}, "MASTER_ADDR=no-such-node.invalid"),
        ({"GLOO_SOCKET_IFNAME": "ib0"}, "GLOO_SOCKET_IFNAME=ib0"),
    ],
)
def test_surroundings_that_processes_cannot_meet_in_are_named(
    tmp_path: Path, variables: dict[str, str], named: str
) -> None:
    done = run(tmp_path, *ONE_STEP, "r", "--plan", "replicate=2", **{**under_torchrun(2), **variables})
    assert done.returncode == 2, done.stderr[-500:]
    assert named in done.stderr.splitlines()[-1]


def test_help_on_a_terminal_of_one_column_ends(tmp_path: Path) -> None:
    main, other = pty.openpty()
    fcntl.ioctl(other, termios.TIOCSWINSZ, struct.pack("HHHH", 1, 1, 0, 0))
    surroundings = {name: value for name, value in os.environ.items() if name != "COLUMNS"} | {"TERM": "xterm"}
    shown = subprocess.Popen([GRAPPE, "train", "--help"], stdin=other, stdout=other, stderr=other, env=surroundings)
    os.close(other)

    def drain() -> None:
        while True:
            try:
                if not os.read(main, 65536):
                    return
            except OSError:  # the other end is closed
                return

    reader = threading.Thread(target=drain, daemon=True)
    reader.start()
    assert shown.wait(300) == 0
