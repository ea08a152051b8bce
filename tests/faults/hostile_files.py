"""Hostile and damaged files of all kinds, each made from a number, and the commands that are given them."""

import dataclasses
import gzip
import os
import pickle
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn

from grappe import sites
from grappe.checkpoint.initial import take_over
from grappe.data.formats import cifar10_binary, cifar10_python, mnist
from grappe.sites.script import render
from grappe.verbs.catalogue import site_list
from grappe.verbs.predict import predict
from tests.checkpoint import test_foreign as foreign
from tests.faults import test_fuzz as fuzzer
from tests.faults.fuzz import ESCAPES, FILES, KINDS, damage
from tests.parity.tasks import Images
from tests.training.test_training import train

SIDE = 4096  # the model: SIDE x SIDE numbers, 67 MB
BYTES = [
    b"",
    b"{}",
    b"[]",
    b"\xff\xfe",
    b"\x80\x04K.",
    b"[" * 100_000,
    b'{"a":' * 50_000,
    b"9" * 6000,
    ESCAPES.encode(),
]
VALUES: list[Any] = [None, True, -1, 10**400, float("nan"), 1e308, "", ESCAPES, "../../outside", "x\ny", [], {}, [[[]]],
                     {"a": {"b": []}}, "os:system", "9" * 5000, "$(touch ran)"]  # fmt: skip
Case = Callable[[random.Random, Path, Path], Iterator[Callable[[], object]]]
"""Makes files from a folder of honest ones, in a folder of its own; yields the commands that are given them."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of files, and what reading one may take."""

    case: Case
    share: int
    """Of twenty files."""
    model: float
    """Bytes of the model that the files are read for."""
    own: float
    """Bytes that the commands take beside: libraries that they load, JSON."""


class Large(Images):
    """A task with a model of 67 MB."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(SIDE, SIDE))


def runs(rng: random.Random, honest: Path, place: Path) -> Iterator[Callable[[], object]]:
    """A run with one to three things wrong."""
    run = place / "here/runs/run"
    shutil.copytree(honest / "run", run, symlinks=True)
    todo = []
    for _ in range(rng.randint(1, 3)):
        how = rng.choice(["bytes", "flip", "cut", "json", "line", "kind"])
        what = {
            "bytes": rng.choice([*BYTES, rng.randbytes(50)]), "flip": rng.randrange(10**5), "cut": rng.randrange(10**4),
            "json": (rng.randrange(50), rng.choice(VALUES)), "line": rng.choice(VALUES), "kind": rng.choice(KINDS),
        }[how]  # fmt: skip
        todo.append((how, rng.choice(FILES), what))
    damage(run, place / "outside", todo, sealed=rng.random() < 0.5)
    for name in rng.sample(sorted(fuzzer.READERS), 5):
        yield lambda name=name: fuzzer.READERS[name](run)


def weights(rng: random.Random, honest: Path, place: Path) -> Iterator[Callable[[], object]]:
    """Weights to start from: one of the known attacks, or an honest file with bytes changed, cut or added."""
    if rng.random() < 0.3:
        name = rng.choice(sorted(foreign.HOSTILE))
        file = place / "here" / name
        foreign.HOSTILE[name](file)
        yield lambda: take_over(foreign.model(), file)
        return
    source = rng.choice(["new.pt", "old.pt", "a.safetensors"])
    file = shutil.copyfile(honest / source, place / "here" / source)
    _damage(rng, file)
    yield lambda: take_over(Large().model(), file)


def data(rng: random.Random, honest: Path, place: Path) -> Iterator[Callable[[], object]]:
    """Data files and inputs, with bytes changed, cut or added."""
    here = place / "here"
    for name in ("images.gz", "labels.gz", "batch", "batch.bin", "inputs.npy"):
        file = shutil.copyfile(honest / name, here / name)
        if rng.random() < 0.7:
            _damage(rng, file)
    yield lambda: mnist(here / "images.gz", here / "labels.gz")
    yield lambda: cifar10_python([here / "batch"])
    yield lambda: cifar10_binary([here / "batch.bin"])
    yield lambda: list(predict.predict(honest / "run", here / "inputs.npy", task=Images()))


def site_files(rng: random.Random, honest: Path, place: Path) -> Iterator[Callable[[], object]]:
    """A user's own site with values changed, or bytes."""
    folder = place / "config/grappe/sites"
    folder.mkdir(parents=True)
    os.environ["XDG_CONFIG_HOME"] = str(place / "config")
    lines = dict(fuzzer.GOOD)
    for key in rng.sample(fuzzer.SITE_KEYS, rng.randint(0, 3)):
        value = rng.choice([one for one in VALUES if one != 10**400])
        lines[key] = fuzzer.toml(value)
    content = "\n".join(f"{key} = {value}" for key, value in lines.items()).encode()
    (folder / "mine.toml").write_bytes(content)
    if rng.random() < 0.5:
        _damage(rng, folder / "mine.toml")
    yield lambda: fuzzer.printed(site_list())
    yield lambda: render(fuzzer._with(sites.find("mine")))


def _damage(rng: random.Random, file: Path) -> None:
    """Changes, cuts or adds bytes; by copying, since a large file in memory would count as the reader's memory."""
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(file.stat().st_size, rng.choice([64, 2000, 10**9])) or 1)
        gone, new = rng.choice(
            [
                (1, bytes([rng.randrange(256)])),
                (file.stat().st_size, b""),
                (0, rng.choice([*BYTES[:5], rng.randbytes(9), b"\xff" * 8])),
                (4, b"\xff" * 4),
            ]
        )
        beside = file.with_name("beside")
        with file.open("rb") as old, beside.open("wb") as changed:
            os.sendfile(changed.fileno(), old.fileno(), 0, at)
            changed.write(new)
            old.seek(at + gone)
            shutil.copyfileobj(old, changed)
        beside.replace(file)


KINDS_OF_FILES = {
    "damaged runs": Kind(case=runs, share=4, model=1e5, own=200e6),
    "weights": Kind(case=weights, share=8, model=SIDE * SIDE * 4, own=64e6),
    "data": Kind(case=data, share=4, model=1e6, own=200e6),
    "sites": Kind(case=site_files, share=4, model=0, own=200e6),
}


def make_honest(honest: Path) -> None:
    """Makes the files that the cases are damaged from."""
    train(honest / "run", Images(), steps=2, save_every=1, log_samples=True)
    state = Large().model().state_dict()
    torch.save(state, honest / "new.pt")
    torch.save(state, honest / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, honest / "a.safetensors")
    images, labels = np.ones((50, 28, 28), np.uint8), np.ones(50, np.uint8)
    for name, array in (("images.gz", images), ("labels.gz", labels)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (honest / name).write_bytes(gzip.compress(header + array.tobytes()))
    pixels = np.ones((9, 3072), np.uint8)
    (honest / "batch").write_bytes(pickle.dumps({"data": pixels, "labels": [1] * 9}, 2))
    (honest / "batch.bin").write_bytes(np.ones((9, 3073), np.uint8).tobytes())
    np.save(honest / "inputs.npy", np.ones((4, 3, 8, 8), np.float32))
