"""The Alliance's own scripts (CPU, DDP, Lightning) from a fresh account, one after the other; commands; allocations."""

import os
import pty
import shutil
import sys
from pathlib import Path

import pytest
from benchmarks import cifar_files

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import grappe, submit, waited
from tests.slurm.test_run import MINE, PLAIN
from tests.wheelhouse import wheel, wheelhouse

SCRIPTS = Path(__file__).parents[2] / "benchmarks" / "scripts"
# torchvision's wheels do not load beside a torch for CPUs: what the scripts use of it, on files of random pixels.
DATASETS = """
import pickle
from pathlib import Path
from PIL import Image


class CIFAR10:
    def __init__(self, root, train, download, transform):
        batch = pickle.loads((Path(root) / "cifar-10-batches-py" / "data_batch_1").read_bytes())
        self._images = batch["data"].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        self._labels, self._transform = batch["labels"], transform

    def __len__(self):
        return len(self._labels)

    def __getitem__(self, index):
        return self._transform(Image.fromarray(self._images[index])), self._labels[index]
"""
TRANSFORMS = """
import numpy
import torch


class Compose:
    def __init__(self, steps):
        self._steps = steps

    def __call__(self, value):
        for step in self._steps:
            value = step(value)
        return value


class ToTensor:
    def __call__(self, image):
        return torch.tensor(numpy.asarray(image)).permute(2, 0, 1) / 255


class Normalize:
    def __init__(self, mean, deviation):
        self._mean, self._deviation = (torch.tensor(one).view(3, 1, 1) for one in (mean, deviation))

    def __call__(self, image):
        return (image - self._mean) / self._deviation
"""
MEET = ("--dist-backend", "gloo", "--init_method", "tcp://$MASTER_ADDR:$MASTER_PORT", "--world_size", "$SLURM_NTASKS")
PAGES = {
    "cpu": (("--cores", "2"), ("cifar10_cpu.py", "--batch_size", "32"), "images/s"),
    "ddp": (
        ("--nodes", "2", "--processes", "2", "--cores", "1"),
        ("pytorch_ddp_test.py", "--max_epochs", "1", "--batch_size", "32", *MEET),
        "From Rank: 1, Training time",
    ),
    "lightning": (
        ("--processes", "2", "--cores", "1"),
        ("pytorch_ddp_test_pl.py", "--max_epochs", "1", "--batch_size", "32"),
        "seconds",
    ),
}


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An account with an empty HOME, a folder of wheels without grappe, no network, and the pages' data."""
    sites = tmp_path / "home" / ".config" / "grappe" / "sites"
    sites.mkdir(parents=True)
    (sites / "mine.toml").write_text(MINE)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NODE_LOCAL", str(tmp_path / "local"))
    wheels = wheelhouse(tmp_path / "wheels", extra=("pytorch-lightning", "scikit-learn"))
    stand_in = {
        "torchvision/__init__.py": "",
        "torchvision/datasets.py": DATASETS,
        "torchvision/models.py": "def __getattr__(name):\n    return None\n",  # torchmetrics imports some
        "torchvision/transforms.py": TRANSFORMS,
    }
    wheel(wheels, "torchvision", "0.28.0", ["torch"], stand_in)
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    cifar_files.write(tmp_path / "data", per_file=64)
    return tmp_path


@pytest.mark.slow
def test_the_pages_scripts(cluster: Cluster, fresh: Path) -> None:
    """The second job takes the environment that the first has made; the third needs another."""
    for page, environments in zip(PAGES, (1, 1, 2), strict=True):
        options, (script, *arguments), expected = PAGES[page]
        shutil.copy(SCRIPTS / script, fresh / script)
        job = ("--site", "mine", "--gpus", "0", "--time", "10m", "--no-doctor", *options)
        said = grappe("submit", *job, "--", script, *arguments, cwd=fresh)
        assert expected in waited(said, fresh)[1]
        assert len(list((fresh / "runs" / ".environments").iterdir())) == environments, page


COMMANDS = {
    "measure": (("digits", "--steps", "5", "--repeats", "1", "--no-advice", "--plan", PLAIN), "samples/s"),
    "data": (("stage", __file__, "--out", "staged"), "staged"),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_other_commands(cluster: Cluster, tmp_path: Path, name: str) -> None:
    arguments, expected = COMMANDS[name]
    said = submit("--", name, *arguments, cwd=tmp_path)
    assert "core-hours" in said  # and no GPU
    folder, log = waited(said, tmp_path)
    assert expected in log and (folder / "done").exists()


def test_an_interactive_allocation(cluster: Cluster, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, `submit --interactive` is salloc: its shell has the allocation's variables."""
    monkeypatch.setenv("SHELL", "/bin/sh")
    words = [sys.executable, "-m", "grappe", "submit", "--interactive", "--site", "generic", "--gpus", "2"]
    said = bytearray()

    def read(terminal: int) -> bytes:
        data = os.read(terminal, 4096)
        if b"Granted job allocation" in said + data and b"Granted job allocation" not in said:
            os.write(terminal, b"echo shell of $SLURM_NNODES node, $SLURM_NTASKS_PER_NODE tasks; exit\n")
        said.extend(data)
        return data

    status = pty.spawn([*words, "--time", "5m"], read, lambda _: b"")
    assert os.waitstatus_to_exitcode(status) == 0, said.decode()
    assert "salloc --job-name=interactive" in said.decode()
    assert "shell of 1 node, 2 tasks" in said.decode()
