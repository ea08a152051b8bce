"""Feeds grappe thousands of hostile or damaged files, each in a process of its own, and counts how it ends.

    python -m tests.faults.hostile 2000

Counted: refused with exit code 2, harmless (the command did its work), and what must never be: another exception,
more than 5 seconds, memory of more than twice the model's (and 200 MB for the process itself), a file elsewhere that
is new or changed.
"""

from __future__ import annotations

import collections
import gzip
import io
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
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
from grappe.errors import GrappeError
from grappe.sites.script import render
from grappe.verbs import predict
from grappe.verbs.sites import listing as site_listing
from tests.checkpoint import test_foreign as foreign
from tests.faults import test_fuzz as fuzzer
from tests.faults.fuzz import ESCAPES, FILES, KINDS, damage
from tests.parity.tasks import Images
from tests.training.test_training import train

SECONDS = 5.0
SIDE = 2048  # the model: SIDE x SIDE numbers, 16.8 MB
OWN = 200e6  # bytes that the process itself may take more than when it was forked: libraries, JSON
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
Case = Callable[[random.Random, Path], Iterator[Callable[[], object]]]


class Large(Images):
    """A task with a model of 16.8 MB."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(SIDE, SIDE))


def runs(rng: random.Random, place: Path) -> Iterator[Callable[[], object]]:
    """A run with one to three things wrong."""
    run = place / "here/runs/run"
    shutil.copytree(HONEST / "run", run, symlinks=True)
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


def weights(rng: random.Random, place: Path) -> Iterator[Callable[[], object]]:
    """Weights to start from: one of the known attacks, or an honest file with bytes changed, cut or added."""
    if rng.random() < 0.3:
        name = rng.choice(sorted(foreign.HOSTILE))
        file = place / "here" / name
        foreign.HOSTILE[name](file)
        yield lambda: take_over(foreign.model(), file)
        return
    source = rng.choice(["new.pt", "old.pt", "a.safetensors"])
    file = place / "here" / source
    file.write_bytes(_damaged(rng, (HONEST / source).read_bytes()))
    yield lambda: take_over(Large().model(), file)


def data(rng: random.Random, place: Path) -> Iterator[Callable[[], object]]:
    """Data files and inputs, with bytes changed, cut or added."""
    here = place / "here"
    for name in ("images.gz", "labels.gz", "batch", "batch.bin", "inputs.npy"):
        content = (HONEST / name).read_bytes()
        (here / name).write_bytes(_damaged(rng, content) if rng.random() < 0.7 else content)
    yield lambda: mnist(here / "images.gz", here / "labels.gz")
    yield lambda: cifar10_python([here / "batch"])
    yield lambda: cifar10_binary([here / "batch.bin"])
    yield lambda: list(predict.predict(HONEST / "run", here / "inputs.npy", task=Images()))


def site_files(rng: random.Random, place: Path) -> Iterator[Callable[[], object]]:
    """A user's own site with values changed, or bytes."""
    folder = place / "config/grappe/sites"
    folder.mkdir(parents=True)
    os.environ["XDG_CONFIG_HOME"] = str(place / "config")
    lines = dict(fuzzer.GOOD)
    for key in rng.sample(fuzzer.SITE_KEYS, rng.randint(0, 3)):
        value = rng.choice([one for one in VALUES if one != 10**400])
        lines[key] = fuzzer.toml(value)
    content = "\n".join(f"{key} = {value}" for key, value in lines.items()).encode()
    (folder / "mine.toml").write_bytes(content if rng.random() < 0.5 else _damaged(rng, content))
    yield lambda: fuzzer.printed(site_listing())
    yield lambda: render(fuzzer._with(sites.find("mine")))


def _damaged(rng: random.Random, content: bytes) -> bytes:
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(min(len(content), rng.choice([64, 2000, 10**9])) or 1)
        match rng.randrange(4):
            case 0:
                content = content[:at] + bytes([rng.randrange(256)]) + content[at + 1 :]
            case 1:
                content = content[:at]
            case 2:
                content = (
                    content[:at] + rng.choice([*BYTES[:5], rng.randbytes(9), b"\xff" * 8]) + content[at:]
                )
            case 3:
                content = content[:at] + b"\xff" * 4 + content[at + 4 :]
    return content


CASES: dict[str, tuple[Case, int, float]] = {
    "damaged runs": (runs, 4, 1e5),
    "weights": (weights, 8, SIDE * SIDE * 4),
    "data": (data, 4, 1e6),
    "sites": (site_files, 4, 0),
}
"""Each with its share of twenty, and the bytes of its model."""
HONEST = Path(tempfile.mkdtemp(prefix="grappe-hostile-"))


def make_honest() -> None:
    """Makes the files that the cases are damaged from."""
    train(HONEST / "run", Images(), steps=2, save_every=1, log_samples=True)
    state = Large().model().state_dict()
    torch.save(state, HONEST / "new.pt")
    torch.save(state, HONEST / "old.pt", _use_new_zipfile_serialization=False)
    save_file(state, HONEST / "a.safetensors")
    images, labels = np.ones((50, 28, 28), np.uint8), np.ones(50, np.uint8)
    for name, array in (("images.gz", images), ("labels.gz", labels)):
        header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
        (HONEST / name).write_bytes(gzip.compress(header + array.tobytes()))
    pixels = np.ones((9, 3072), np.uint8)
    (HONEST / "batch").write_bytes(pickle.dumps({"data": pixels, "labels": [1] * 9}, 2))
    (HONEST / "batch.bin").write_bytes(np.ones((9, 3073), np.uint8).tobytes())
    np.save(HONEST / "inputs.npy", np.ones((4, 3, 8, 8), np.float32))


def attempt(case: Case, seed: int, model: float) -> list[str]:
    """Runs each command of a case; returns the worst that can be said of each end."""
    rng = random.Random(seed)
    ends = []
    with tempfile.TemporaryDirectory(prefix="grappe-case-") as folder:
        place = Path(folder)
        (place / "here").mkdir()
        (place / "outside").mkdir()
        (place / "outside/kept").write_text("kept")
        os.chdir(place / "here")
        before = _peak()
        for verb in case(rng, place):
            began = time.monotonic()
            ends.append(_ended(verb))
            if time.monotonic() - began > SECONDS:
                ends.append(f"slow: {time.monotonic() - began:.1f} s")
        taken = _peak() - before
        if taken > 2 * model + OWN:
            ends.append(f"memory: {taken / 1e6:.0f} MB")
        outside = [(one.name, one.read_text()) for one in (place / "outside").iterdir()]
        if outside != [("kept", "kept")] or list(place.rglob("ran")):
            ends.append("wrote outside")
        ends.append(f"took {taken / 1e6:.0f}")
        os.chdir("/")
    return ends


def _ended(verb: Callable[[], object]) -> str:
    try:
        verb()
    except GrappeError as error:
        return "refused" if error.exit_code == 2 else f"exit code {error.exit_code}: {error}"
    except OSError as error:
        return "refused" if error.filename or error.strerror else f"OSError {error}"
    except BaseException:
        return "exception: " + "".join(traceback.format_exc().splitlines(keepends=True)[-5:])
    return "harmless"


def _peak() -> int:
    """The most memory of this process and of those that it forked."""
    who = (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    return max(resource.getrusage(one).ru_maxrss for one in who) * 1024


def in_fork(work: Callable[[], Any]) -> Any:
    """The result of `work`, JSON, from a forked process whose output is dropped."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)
        sys.stdout = io.StringIO()
        os.write(writer, json.dumps(work()).encode()[:60_000])
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as stream:
        said = stream.read()
    os.waitpid(pid, 0)
    return json.loads(said) if said else ["the process died"]


def main(count: int) -> int:
    """Tries `count` files, and prints the table."""
    torch.set_num_threads(1)
    in_fork(make_honest)
    total, bad = collections.Counter(), []
    worst = (0.0, 0)
    names = [name for name, (_, share, _) in CASES.items() for _ in range(share)]
    tables: dict[str, collections.Counter] = collections.defaultdict(collections.Counter)
    for number in range(count):
        name = names[number % len(names)]
        case, _, model = CASES[name]
        began = time.monotonic()
        ends = in_fork(lambda case=case, number=number, model=model: attempt(case, number, model))
        worst = max(worst, (time.monotonic() - began, number))
        tables[name]["files"] += 1
        for end in ends:
            if end.startswith("took "):
                tables[name]["most MB"] = max(tables[name]["most MB"], int(end[5:]))
            elif end in ("refused", "harmless"):
                tables[name][end] += 1
            else:
                tables[name]["BAD"] += 1
                bad.append(f"{name} {number}: {end}")
                print(bad[-1], file=sys.stderr, flush=True)
        if number % 100 == 99:
            so_far = {one: dict(table) for one, table in tables.items()}
            print(f"{number + 1} of {count}: {so_far}", file=sys.stderr, flush=True)
    for name, table in tables.items():
        total.update({key: value for key, value in table.items() if key != "most MB"})
        print(f"{name:<14}", ", ".join(f"{key} {value}" for key, value in sorted(table.items())), flush=True)
    print("together      ", ", ".join(f"{key} {value}" for key, value in sorted(total.items())))
    print(f"longest file: {worst[0]:.1f} s (number {worst[1]})")
    print("\n".join(bad[:40]))
    shutil.rmtree(HONEST)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
