"""Scripts for one process, unedited, on two and three: the lines and the weights of one process."""

import contextlib
import re
import sqlite3
import sys
import tomllib
from pathlib import Path

import pytest
import torch

from grappe.contrib.script.launch import launch
from grappe.errors import DivergedError, TaskError
from tests.commands import ran

TABLE = tomllib.loads(Path(__file__).with_name("script_rows.toml").read_text())
SCRIPTS = {each["name"]: TABLE["head"] + each["text"] for each in TABLE["script"]}
ALL = """
import runpy, sys
import torch

saved = {}
for number in range(int(sys.argv[2])):
    print("##", number, flush=True)
    names = runpy.run_path(f"form_{number}.py")
    saved[number] = [each.detach().clone() for each in names["weights"]]
torch.save(saved, sys.argv[1])
"""
Trained = tuple[list[str], dict[int, list[torch.Tensor]]]


def written(folder: Path) -> None:
    for number, text in enumerate(SCRIPTS.values()):
        (folder / f"form_{number}.py").write_text(text)
    (folder / "train.py").write_text(ALL)


def trained(text: str, file: Path) -> Trained:
    return [part.partition("\n")[2] for part in text.split("## ")[1:]], torch.load(file)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """Lines and weights of each script by itself."""
    folder = tmp_path_factory.mktemp("plain")
    written(folder)
    # In a process of its own: a loop of another test would name schedules and scalers that a script has left.
    done = ran(sys.executable, "train.py", "plain.pt", str(len(SCRIPTS)), cwd=folder, OMP_NUM_THREADS="1")
    assert not done.returncode, done.stderr
    return trained(done.stdout, folder / "plain.pt")


@pytest.mark.parametrize("processes", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_scripts_learn_and_print_on_several_processes_what_they_do_on_one(
    processes: int, plain: Trained, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    written(here)
    plan = f"replicate={processes},device=cpu,threads=1"
    assert launch("train.py", ["out.pt", str(len(SCRIPTS))], plan) == 0
    lines, weights = trained(capfd.readouterr().out, here / "out.pt")
    for number, name in enumerate(SCRIPTS):
        assert lines[number] == plain[0][number], name
        for tensor, other in zip(plain[1][number], weights[number], strict=True):
            assert float((tensor - other).double().norm()) <= 1e-8 * float(tensor.double().norm()) + 1e-12, name


OUTSIDE = """
import json, os, random, shutil, time, uuid
from pathlib import Path
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

torch.manual_seed(time.time_ns() % 2**31)
random.seed()
generator = np.random.Generator(np.random.PCG64(np.random.SeedSequence()))  # as gymnasium has it
own = np.random.RandomState()
print(uuid.uuid4().hex, os.urandom(2).hex(), random.random(), generator.random())


class Noise(Dataset):
    def __len__(self):
        return 22

    def __getitem__(self, number):
        return torch.from_numpy(np.random.default_rng().normal(size=3)).float()


os.makedirs("made/inside")
try:
    os.makedirs("made/inside")
except FileExistsError:
    print("is there")
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
start = time.time()
for number, rows in enumerate(DataLoader(Noise(), 8, num_workers=1)):
    optimizer.zero_grad()
    loss = (model(rows) - generator.normal()).square().mean()
    loss.backward()
    optimizer.step()
    file = Path("made", f"{number}.json")
    file.write_text(json.dumps({"loss": loss.item()}))
    with open("made/log", "a") as log:
        log.write(f"{json.loads(file.read_text())['loss'] == loss.item()}\\n")
    np.save("made/rows.npy", rows.numpy())
    model.bias.data += torch.tensor(np.load("made/rows.npy").mean() + (time.time() - start))
    torch.save({"rows": rows, "model": model.state_dict()}, f"made/{number}.pt")
    model.load_state_dict(torch.load(f"made/{number}.pt")["model"])
    model.weight.data += 0.1 * generator.normal() * own.rand()
    print(sorted(os.listdir("made")), Path("made/0.json").exists(), len(open("made/log").readlines()))
    if number:
        os.remove(f"made/{number - 1}.json")
        os.replace(f"made/{number - 1}.pt", "made/before.pt")
shutil.copy("made/log", "made/copy")
print(torch.load("made/before.pt")["rows"].shape, len(open("made/copy").read().split()))
shutil.rmtree("made/inside")
"""


def test_what_a_script_gets_from_outside_is_process_0_s(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text(OUTSIDE)
    assert launch("train.py", [], "replicate=3,device=cpu,threads=1") == 0, "else weights or steps would differ"
    lines = capfd.readouterr().out.splitlines()
    assert lines[1] == "is there"
    assert lines[2:5] == [
        "['0.json', '0.pt', 'inside', 'log', 'rows.npy'] True 1",
        "['0.json', '0.pt', '1.json', '1.pt', 'inside', 'log', 'rows.npy'] True 2",
        "['1.json', '1.pt', '2.json', '2.pt', 'before.pt', 'inside', 'log', 'rows.npy'] False 3",
    ]
    assert lines[5] == "torch.Size([8, 3]) 3"
    assert sorted(path.name for path in (here / "made").iterdir()) == [
        "2.json", "2.pt", "before.pt", "copy", "log", "rows.npy",
    ]  # fmt: skip
    assert (here / "made" / "log").read_text() == "True\n" * 3


SMALL = """
import torch

weight = torch.zeros(3, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    (weight - 1).square().sum().backward()
    optimizer.step()
print(weight.tolist())
"""
SLOW = """
import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(40, 40)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for step, (rows,) in enumerate(DataLoader(TensorDataset(torch.randn(160, 40)), 4)):
    optimizer.zero_grad()
    output = model(rows)
    if not step:
        torch.linalg.pinv(output.detach().repeat(200, 20))  # no share counts what the start took
    (torch.linalg.pinv(output @ output.T + torch.eye(4)).sum() + output.cumsum(0).square().mean()).backward()
    optimizer.step()
"""


def test_what_is_not_split_and_what_is_gathered_is_told(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "small.py").write_text(SMALL)
    (here / "slow.py").write_text(SLOW)
    plan = "replicate=2,device=cpu,threads=1"
    assert launch("small.py", [], plan) == 0
    texts = capfd.readouterr()
    assert texts.out.startswith("[0.48") and "nothing was split over 2 processes" in texts.err
    assert launch("slow.py", [], plan) == 0
    [said] = [line for line in capfd.readouterr().err.splitlines() if "of the time went to operators without" in line]
    assert "right, only slower: slow.py:" in said, "the line is named, once"
    assert all(int(share) <= 100 for share in re.findall(r"(\d+)%", said))


APART = """
import contextlib
import os
import sqlite3
import torch

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for number in range(3):
    if number >= {first}:
        rows = torch.full((8, 3), float(int(os.readlink("/proc/self")) % 97))  # as of a queue of each process
    else:
        rows = torch.ones(8, 3)
    optimizer.zero_grad()
    loss = model(rows).square().mean()
    loss.backward()
    optimizer.step()
    print("step", number + 1, flush=True)
"""


@pytest.mark.parametrize("first", [0, 1])
def test_batches_that_differ_between_processes_are_refused_before_they_train(
    first: int, here: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (here / "train.py").write_text(APART.format(first=first))
    with pytest.raises(DivergedError, match=r"not the same batch.*train.py:1[35]"):
        launch("train.py", [], "replicate=2,device=cpu,threads=1")
    assert capfd.readouterr().out.count("step") == first


FILES = """
import os, sqlite3
import torch

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
if os.path.exists("log.db"):
    os.remove("log.db")
log = sqlite3.connect("log.db")
log.execute("create table losses (step int, value real)")
for step in range(3):
    loss = model(torch.ones(8, 3)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    log.execute("insert into losses values (?, ?)", (step, loss.item()))
    log.commit()
    with sqlite3.connect("log.db") as other:
        total = other.execute("select sum(value) from losses").fetchone()
        other.execute("insert into losses values (?, ?)", (-1, *total))
"""


def test_other_processes_than_the_first_write_a_copy_of_a_database(here: Path) -> None:
    (here / "train.py").write_text(FILES)
    for _ in range(2):
        assert launch("train.py", [], "replicate=3,device=cpu,threads=1") == 0
        with contextlib.closing(sqlite3.connect("log.db")) as log:
            assert [step for (step,) in log.execute("select step from losses")] == [0, -1, 1, -1, 2, -1]


NAMES = """
import datetime, os, random, tempfile, time
import numpy as np
import torch

time.sleep(random.Random().random() * 1e-3 + 1e-3 * (os.getpid() % 7))
run = f"dated_{datetime.datetime.now():%Y%m%d_%H%M%S_%f}_{time.strftime('%H%M%S')}_{random.Random().random()}"
os.makedirs(run)
today = datetime.datetime.today().date()
print(isinstance(datetime.datetime.utcnow(), datetime.datetime), datetime.date.today() == today)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
kept = tempfile.mkdtemp()
handle, file = tempfile.mkstemp()
os.close(handle)
os.makedirs(f"runs_{os.getpid()}/inside")
with tempfile.TemporaryDirectory() as folder:
    for step in range(3):
        loss = model(torch.ones(8, 3)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for place in (f"{kept}/w", file, f"runs_{os.getpid()}/inside/w", f"{folder}/w", f"{run}/w"):
            torch.save(model.state_dict(), place)
            model.load_state_dict(torch.load(place))
print(os.path.exists(folder), os.path.exists(file), len(os.listdir(kept)))
if os.path.exists("map"):
    np.memmap("map", mode="r+")
"""


def test_temporary_files_and_process_numbers_are_process_0_s(here: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (here / "train.py").write_text(NAMES)
    assert launch("train.py", [], "replicate=3,device=cpu,threads=1") == 0
    assert capfd.readouterr().out == "True True\nFalse True 1\n"
    assert len(list(here.glob("runs_*"))) == len(list(here.glob("dated_*"))) == 1
    (here / "map").write_bytes(b"0" * 8)
    with pytest.raises(TaskError, match=r"train\.py:28 writes a file by np\.memmap"):
        launch("train.py", [], "replicate=2,device=cpu,threads=1")
