"""The fuzzer of files: damaged weights and data are refused or read, in a fork with a few seconds and little memory."""

import gzip
import os
import pickle
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file
from torch import nn

from grappe.checkpoint.initial import take_over
from grappe.data.formats import cifar10_binary, cifar10_python, mnist
from grappe.errors import GrappeError
from grappe.launch.fork import Limits, run_in_fork
from grappe.verbs.predict.predict import predict
from tests.faults.fuzz import DEEP, fuzzed
from tests.faults.test_fuzz import workplace
from tests.parity.tasks import Images
from tests.training.test_training import train

SIDE = 4096  # the model: SIDE x SIDE numbers, 67 MB
SECONDS = 5
LIBRARIES = 200_000_000  # bytes of what commands load besides
SEEDS = st.integers(0, 10**9)


class Large(Images):
    """A task with a model of 67 MB."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(SIDE, SIDE))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files that are damaged."""
    folder = tmp_path_factory.mktemp("honest")
    train(folder / "run", Images(), steps=1)
    state = Large().model().state_dict()
    torch.save(state, folder / "new.pt")
    torch.save(state, folder / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, folder / "a.safetensors")
    for name, array in (("images.gz", np.ones((50, 28, 28), np.uint8)), ("labels.gz", np.ones(50, np.uint8))):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (folder / name).write_bytes(gzip.compress(header + array.tobytes()))
    (folder / "batch").write_bytes(pickle.dumps({"data": np.ones((9, 3072), np.uint8), "labels": [1] * 9}, 2))
    (folder / "batch.bin").write_bytes(np.ones((9, 3073), np.uint8).tobytes())
    np.save(folder / "inputs.npy", np.ones((4, 3, 8, 8), np.float32))
    return folder


def damaged(file: Path, rng: random.Random) -> Path:
    """Changes, cuts or adds bytes; by copying, since a large file in memory would count as the reader's memory."""
    for _ in range(rng.randint(1, 4)):
        size = file.stat().st_size
        at = rng.randrange(min(size, rng.choice([64, 2000, 10**9])) or 1)
        added = rng.choice([b"{}", b"\xff\xfe", b"\x80\x04K.", DEEP[0], rng.randbytes(9), b"\xff" * 8])
        gone, new = rng.choice([(1, rng.randbytes(1)), (size, b""), (0, added), (4, b"\xff" * 4)])
        beside = file.with_name("beside")
        with file.open("rb") as old, beside.open("wb") as changed:
            os.sendfile(changed.fileno(), old.fileno(), 0, at)
            changed.write(new)
            old.seek(at + gone)
            shutil.copyfileobj(old, changed)
        beside.replace(file)
    return file


def refused_or_done(memory: int, *verbs: Callable[[], object]) -> None:
    """Calls each in a fork, which may take SECONDS of computing and `memory` bytes; any other error fails."""

    def ends() -> None:
        for verb in verbs:
            try:
                verb()
            except GrappeError as error:
                assert error.exit_code == 2 and str(error)
            except OSError as error:  # the command line makes one message of it
                assert error.filename or error.strerror

    run_in_fork(ends, Limits(memory=memory, mapped=1 << 40, seconds=SECONDS))


@given(seed=SEEDS, name=st.sampled_from(["new.pt", "old.pt", "a.safetensors"]))
@fuzzed(3)
def test_damaged_weights(honest: Path, seed: int, name: str) -> None:
    with workplace() as here:
        file = damaged(Path(shutil.copyfile(honest / name, here / name)), random.Random(seed))
        refused_or_done(2 * 4 * SIDE**2 + LIBRARIES, lambda: take_over(Large().model(), file))


@given(seed=SEEDS, spared=st.integers(0, 5))
@fuzzed(3)
def test_damaged_data(honest: Path, seed: int, spared: int) -> None:
    rng = random.Random(seed)
    with workplace() as here:
        for number, name in enumerate(("images.gz", "labels.gz", "batch", "batch.bin", "inputs.npy")):
            file = Path(shutil.copyfile(honest / name, here / name))
            if number != spared:
                damaged(file, rng)
        refused_or_done(
            LIBRARIES,
            lambda: mnist(here / "images.gz", here / "labels.gz"),
            lambda: cifar10_python([here / "batch"]),
            lambda: cifar10_binary([here / "batch.bin"]),
            lambda: list(predict(honest / "run", here / "inputs.npy", task=Images())),
        )


def test_another_error_is_found() -> None:
    with pytest.raises(GrappeError, match="KeyError"):
        refused_or_done(LIBRARIES, lambda: {}[1])
