"""Faults while images are loaded: one message each, nothing lost, no hang."""

import os
import shutil
import signal
import sys
from pathlib import Path

import pytest

from grappe.cli.exit import BUG
from grappe.data import Images, RandomResizedCrop
from grappe.data.loader import training_loader
from grappe.errors import DataError
from grappe.plan import Plan
from grappe.training.run import Run
from tests.commands import Command, until
from tests.data.images.pictures import archive, files, folder, shards
from tests.data.images.test_training import Photos
from tests.data.test_loader import world

TASK = """
import functools
import os
import torch
from torch import nn
from grappe import Task
from grappe.data import CentreCrop, Images, Normalise


@functools.cache
def node(source):
    '''Another folder for the process that asks second, as on a node of its own.'''
    if "NODE" not in os.environ:
        return source
    try:
        open(os.environ["NODE"] + ".taken", "x").close()
    except FileExistsError:
        return os.environ["NODE"]
    return source


class Large(Task):
    epochs: int = 8
    batch_size: int = 24
    size: int = 512
    source: str = "photos"

    def model(self):
        return nn.Sequential(
            nn.Sequential(Normalise(), nn.AdaptiveAvgPool2d(2)), nn.Sequential(nn.Flatten(), nn.Linear(12, 4))
        )

    def data(self, split, folder):
        return Images(folder / node(self.source), CentreCrop(size=self.size))

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1)
"""
OWN = ("unshare", "--mount", "--map-root-user", "bash", "-c")
SMALL = "mount -t tmpfs -o size=64m tmpfs /dev/shm"


@pytest.fixture
def place(tmp_path: Path) -> Path:
    (tmp_path / "large.py").write_text(TASK)
    folder(tmp_path / "photos", files())
    return tmp_path


def words(plan: str, *more: str) -> tuple[str, ...]:
    start = (sys.executable, "-m", "grappe", "train", "large.py", "--data", ".", "--run", "run")
    return (*start, "--plan", f"threads=1,device=cpu,{plan}", *more)


@pytest.mark.slow
def test_little_shared_memory_for_images(place: Path, start) -> None:
    """64 MB, as in a container: worker processes say what to do, threads need none."""
    if start(*OWN, SMALL).end()[0]:
        pytest.skip("no mounts of one's own")
    ended = {}
    for kind, epochs in (("processes", 40), ("threads", 2)):
        train = words(f"workers=2,loading={kind}", f"epochs={epochs}")
        command = start(*OWN, SMALL + ' && exec "$@"', "bash", *train)
        ended[kind] = command.end()
        until(lambda command=command: not command.members(), "all of its processes have ended")
    code, _, err = ended["processes"]
    assert code == 2, err
    assert "/dev/shm is full" in err and "loading=threads" in err
    assert "Traceback" not in err and BUG not in err
    assert ended["threads"][0] == 0, ended["threads"][2]


def test_a_killed_worker_ends_it_with_one_message_and_it_goes_on(place: Path, start) -> None:
    train = words("workers=2,loading=processes", "epochs=400", "--save-every", "5")
    command = start(*train)
    until(lambda: _step(place / "run") >= 5 and len(_workers(command)) >= 2, "it was saved, and workers load")
    os.kill(_workers(command)[0], signal.SIGKILL)
    code, _, err = command.end()
    assert code == 2, err
    assert "a data worker was ended by SIGKILL" in err
    assert err.count("data worker") == 1 and "Traceback" not in err and BUG not in err
    until(lambda: not command.members(), "all of its processes have ended")
    saved = _step(place / "run")
    code, _, err = start(*words("workers=0", "epochs=400", "--steps", str(saved + 3))).end()
    assert code == 0, err
    steps = [record["step"] for record in Run(place / "run").records("step")]
    assert steps == list(range(1, saved + 4))


def _workers(command: Command) -> list[int]:
    """The data workers of a command: the youngest generation of its processes."""
    parents = {}
    for pid in command.members():
        try:
            parents[pid] = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    busy = [pid for pid, parent in parents.items() if pid not in parents.values() and parent in parents]
    depth = {pid: _depth(pid, parents) for pid in busy}
    return [pid for pid in busy if depth[pid] == max(depth.values()) and depth[pid] >= 1]


def _depth(pid: int, parents: dict[int, int]) -> int:
    return 0 if parents.get(pid) not in parents else 1 + _depth(parents[pid], parents)


def _step(run: Path) -> int:
    if not Run.is_run(run):
        return 0
    newest = Run(run).latest()
    return 0 if newest is None else newest.step


@pytest.mark.parametrize("plan", ["workers=0", "workers=2,loading=processes", "workers=2,loading=threads"])
@pytest.mark.parametrize("make", [archive, folder])
def test_a_file_replaced_during_a_run(tmp_path: Path, make, plan: str) -> None:
    source = make(tmp_path / "train", files())
    data = Images(source, RandomResizedCrop(size=16))
    loader = training_loader(Photos(), data, Plan.parse(plan), world(0, 1))
    batches = loader.batches(0, 600)
    next(batches)
    others = dict(zip(files(), reversed(files().values()), strict=True))
    if source.is_dir():
        for name, content in others.items():
            (source / name).write_bytes(content)
            os.utime(source / name, (1, 1))
    else:
        content = bytearray(archive(tmp_path / "other", others).read_bytes())
        with source.open("r+b") as stream:
            stream.write(bytes(len(content)))
    with pytest.raises(DataError, match="changed after it was indexed: a file was replaced"):
        for _ in batches:
            pass
    loader.sources.close()


@pytest.mark.parametrize("indexed", [True, False])
def test_a_shard_missing_on_one_node(place: Path, start, indexed: bool) -> None:
    """Fewer samples on one node would be another training: it ends on all, and says what is missing."""
    shards(place / "whole", dict(sorted(files().items())))
    shutil.copytree(place / "whole", place / "part")
    gone = sorted((place / "part").glob("*.tar"))[1 if indexed else -1]  # a gap in the numbers is seen, too
    if indexed:
        Images(place / "part", RandomResizedCrop(size=16))
    gone.unlink()
    code, _, err = start(*words("replicate=2,workers=0", "source=whole"), NODE="part").end()
    assert code == 2, err
    said = f"{gone.name} is missing" if indexed else "samples, process 0 on"
    assert said in err
    assert "Traceback" not in err and BUG not in err
