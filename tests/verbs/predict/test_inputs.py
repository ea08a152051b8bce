"""grappe predict takes JSON lines and pictures to the same predictions as arrays, and names what it cannot take."""

import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from grappe import Arrays
from grappe.data import CentreCrop, Images
from grappe.errors import DataError, TaskError, UsageError
from grappe.tasks.digits import Digits
from grappe.training.run import Run
from grappe.verbs.predict import inputs as verb_inputs
from grappe.verbs.predict.predict import predict, save
from tests.commands import GRAPPE, ran
from tests.contrib.export.tasks import Plain
from tests.patience import PATIENCE_SECONDS
from tests.training.test_training import train
from tests.warm import WarmProcess


class Pairs(Plain):
    """Two inputs by name: numbers, and whole numbers."""

    def model(self) -> nn.Module:
        return Embedding()

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(3)
        inputs = {"x": torch.randn(29, 4, generator=generator), "ids": torch.arange(29)[:, None] % 7}
        return Arrays(inputs, torch.arange(29) % 3)


class Embedding(nn.Module):
    """Adds what a number stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(7, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return self.layer(x + self.table(ids).mean(1))


class Photographs(Plain):
    """Pictures in folders, of which the middle is taken."""

    def model(self) -> nn.Module:
        return nn.Sequential(Float(), nn.Flatten(), nn.Linear(3 * 8 * 8, 2))

    def data(self, split: str, folder: Path) -> Images:
        return Images(folder / "photographs", CentreCrop(size=8, short=10))


class Broken(list):
    """Samples that cannot be read."""

    def __getitem__(self, index: Any) -> Any:
        raise IndexError("no such sample")


class Float(nn.Module):
    """Bytes to numbers."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.float() / 255


class Wide(Plain):
    """Samples of 100 kB."""

    def model(self) -> nn.Module:
        return nn.Linear(25_000, 3)

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(torch.ones(29, 25_000), torch.arange(29) % 3)


class Houses(Plain):
    """Rows of a table, with names."""

    def data(self, split: str, folder: Path) -> Arrays:
        rows = pytest.importorskip("pandas").DataFrame(torch.randn(29, 4).numpy(), columns=["a", "b", "c", "d"])
        return Arrays(rows, torch.arange(29) % 3)


class OwnPictures(torch.utils.data.Dataset):
    """A user's dataset, which says how a file becomes inputs."""

    def __len__(self) -> int:
        return 12

    def of_file(self, file: Path) -> torch.Tensor:
        return torch.tensor(Image.open(file).size * 2).float()

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.ones(4), 0


class OfFiles(Plain):
    """Trained on that dataset, or a part of it."""

    def data(self, split: str, folder: Path) -> Any:
        return torch.utils.data.Subset(OwnPictures(), range(9))


TASKS = {
    "houses": Houses,
    "files": OfFiles,
    "plain": Plain,
    "wide": Wide,
    "pairs": Pairs,
    "digits": Digits,
    "photographs": Photographs,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data folder with pictures of two classes."""
    folder = tmp_path_factory.mktemp("inputs")
    random = np.random.default_rng(0)
    for number in range(12):
        place = folder / "photographs" / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        pixels = random.integers(0, 256, (14 + number, 20, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(place / f"{number:02}.png")
    return folder


@pytest.fixture(scope="module")
def runs(folder: Path) -> Callable[[str], Run]:
    made: dict[str, Run] = {}

    def run(name: str) -> Run:
        if name not in made:
            made[name] = Run(train(folder / f"run-{name}", TASKS[name](), "threads=1", steps=1).run)
        return made[name]

    return run


@pytest.fixture
def given(runs, folder: Path) -> Callable[[str, Any], list[torch.Tensor]]:
    return lambda name, inputs: list(predict(runs(name), inputs, task=TASKS[name], data=folder))


def same(ours: list[Any], theirs: list[Any]) -> bool:
    return len(ours) == len(theirs) and all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours, theirs, strict=True))


def write(file: Path, lines: list[Any]) -> Path:
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return file


def test_json_lines_of_arrays(given, tmp_path: Path) -> None:
    inputs = Plain().data("validation", tmp_path).inputs
    lines = write(tmp_path / "a.jsonl", inputs.tolist())
    assert same(given("plain", lines), given("plain", "validation"))
    whole = write(tmp_path / "whole.ndjson", [[1, 2, 3, 4], [0.5, 2, 3, 4]])  # types are the task's, not a line's
    assert same(given("plain", whole), given("plain", torch.tensor([[1.0, 2, 3, 4], [0.5, 2, 3, 4]])))


def test_rows_by_the_names_of_columns(given, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    expected = given("houses", torch.tensor([[1.0, 2, 3, 4], [5.5, 6, 7, 8]]))
    lines = write(tmp_path / "a.jsonl", [{"d": 4, "a": 1, "c": 3, "b": 2}, [5.5, 6, 7, 8]])
    assert same(given("houses", lines), expected)
    table = tmp_path / "a.csv"
    table.write_text('\ufeffb,a,price,c,d\r\n2,1,"x, y",3,4\r\n\r\n6,5.5,,7,8\r\n')
    assert same(given("houses", table), expected)
    assert "a, b, c, d are taken as the file has them" in capsys.readouterr().err
    for text, match in (("a,b,c\n1,2,3\n", "line 1: there is no d"), ("a,b,c,d\n1,x,3,4\n", "line 2: .*'x'")):
        table.write_text(text)
        with pytest.raises(DataError, match=match):
            given("houses", table)
    with pytest.raises(DataError, match="no names of columns"):
        given("plain", table)


def test_a_users_dataset_says_how_a_file_becomes_inputs(given, folder: Path) -> None:
    picture = folder / "photographs" / "class0" / "00.png"  # 20 x 14
    assert same(given("files", picture), given("files", torch.tensor([[20.0, 14, 20, 14]])))
    with pytest.raises(DataError, match=r"of_file\(self, file\)"):
        given("plain", picture)


def test_json_lines_of_objects_and_several_lengths(given, tmp_path: Path) -> None:
    inputs = Pairs().data("validation", tmp_path).inputs
    rows = [{"x": x, "ids": ids} for x, ids in zip(inputs["x"].tolist(), inputs["ids"].tolist(), strict=True)]
    assert same(given("pairs", write(tmp_path / "a.jsonl", rows)), given("pairs", "validation"))
    longer = [{**row, "ids": row["ids"] * (1 + number % 2)} for number, row in enumerate(rows)]
    assert same(given("pairs", write(tmp_path / "b.jsonl", longer)), given("pairs", "validation"))


@pytest.mark.parametrize(
    ("name", "line", "told"),
    [
        ("plain", "[1, 2, 3", r"a\.jsonl, line 3: this is not JSON"),
        ("plain", "[" * 100_000, r"line 3: this is not JSON"),
        ("plain", '["a", 1, 2, 3]', "line 3: give numbers, in nested lists of equal length"),
        ("plain", "[[1], [2, 3]]", "line 3: give numbers, in nested lists of equal length"),
        ("plain", "[[1, 2, 3, 4]]", r"line 3: it is \[1, 4\], and the model takes \[4\]"),
        ("plain", "null", "line 3: give numbers"),
        ("plain", "[1, 2, 3, 1e400, 5]", "the model does not take inputs of shape"),
        ("pairs", "[1, 2, 3, 4]", "line 3: give an object with x, ids"),
        ("pairs", '{"x": [1, 2, 3, 4]}', "line 3: give an object with x, ids"),
        ("pairs", '{"x": [1, 2, 3, 4], "ids": [1.5]}', "line 3, ids: give whole numbers"),
        ("pairs", '{"x": [1, 2, 3, 4], "ids": [99999999999999999999]}', "line 3, ids: "),
    ],
)
def test_lines_that_are_no_samples(given, name: str, line: str, told: str, tmp_path: Path) -> None:
    good = '{"x": [1, 2, 3, 4], "ids": [1]}' if name == "pairs" else "[1, 2, 3, 4]"
    (tmp_path / "a.jsonl").write_text(f"{good}\n\n{line}\n")
    with pytest.raises(DataError, match=told):
        given(name, tmp_path / "a.jsonl")


class Both(NamedTuple):
    """Two inputs in order, by name."""

    x: torch.Tensor
    ids: torch.Tensor


def test_types_are_the_tasks_whatever_a_line_says() -> None:
    example = Both(torch.zeros(1, 2), torch.zeros(1, 2, dtype=torch.int64))
    ((found, count),) = verb_inputs.line_batches(Trickle(b"[[1, 2], [1.0, 2.0]]", 1000), "-", example)
    assert isinstance(found, Both) and count == 1
    assert found.ids.dtype == torch.int64 and found.ids.tolist() == [[1, 2]] and found.x.dtype == torch.float32
    for number in ("1.5", "1e300", "Infinity", "NaN"):
        with pytest.raises(DataError, match="give whole numbers"):
            list(verb_inputs.line_batches(Trickle(f"[{number}, 2]".encode(), 1000), "-", example.ids))


def test_what_lines_cannot_give(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DataError, match="complex numbers"):
        list(verb_inputs.line_batches(Trickle(b"[1]", 10), "-", torch.zeros(1, 1, dtype=torch.complex64)))
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(DataError, match="there is no standard input"):
        verb_inputs.open_lines(Path("-"))


def test_validation_data_that_cannot_be_read_name_the_line(given, tmp_path: Path, monkeypatch) -> None:
    lines = write(tmp_path / "a.jsonl", [[1, 2, 3, 4]])
    given("plain", lines)
    monkeypatch.setattr(Plain, "data", lambda *_: Broken(range(29)))
    with pytest.raises(TaskError, match=r"Plain failed.*no such sample.*test_inputs\.py"):
        given("plain", lines)


class Trickle(io.RawIOBase):
    """Gives its bytes a few at a time, as a pipe does."""

    def __init__(self, content: bytes, size: int) -> None:
        self._rest, self._size = content, size

    def read1(self, size: int = -1) -> bytes:
        part, self._rest = self._rest[: self._size], self._rest[self._size :]
        return part


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_lines_in_any_pieces(size: int) -> None:
    content = b"".join(b"[%d, 1]\n" % number for number in range(600)) + b"[600, 1]"
    example = torch.zeros(1, 2)
    found = list(verb_inputs.line_batches(Trickle(content, size), "-", example))
    assert sum(count for _, count in found) == 601
    assert max(count for _, count in found) <= verb_inputs.BATCH
    assert torch.cat([batch for batch, _ in found])[:, 0].tolist() == list(range(601))


def test_a_line_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb_inputs, "LONGEST", 100)
    with pytest.raises(DataError, match="a line is longer than"):
        list(verb_inputs.line_batches(Trickle(b"[" * 200, 50), "-", torch.zeros(1, 2)))


@pytest.mark.slow
def test_a_line_is_answered_before_the_next_is_written(runs, folder: Path) -> None:
    words = [GRAPPE, "predict", str(runs("plain").folder), "-", "--task", f"{__file__}:Plain", "--data", str(folder)]
    paths = [str(Path(__file__).parents[3]), *filter(None, [os.environ.get("PYTHONPATH")])]  # of this file's imports
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    pipe, answers = subprocess.PIPE, []
    with WarmProcess(words, stdin=pipe, stdout=pipe, text=True, env=variables, start_new_session=True) as child:
        for number in range(3):
            child.stdin.write(f"[{number}, 2, 3, 4]\n")
            child.stdin.flush()
            answers.append(json.loads(child.stdout.readline()))
        child.stdin.close()
        assert child.wait(PATIENCE_SECONDS) == 0
    assert [one["sample"] for one in answers] == [0, 1, 2]
    assert len({str(one["output"]) for one in answers}) == 3


def test_pictures_are_what_the_tasks_arrays_hold(given, tmp_path: Path) -> None:
    images = Digits().data("validation", tmp_path).inputs
    for number in range(5):
        Image.fromarray(images[number, 0].numpy()).save(tmp_path / f"{number}.png")
    (tmp_path / "notes.txt").write_text("")
    wanted = given("digits", "validation")[:5]
    for inputs in (tmp_path, sorted(tmp_path.glob("*.png"))):
        found = given("digits", inputs)
        assert [int(one["class"]) for one in found] == [int(one["class"]) for one in wanted]
        assert same([one["probability"] for one in found], [one["probability"] for one in wanted])
    assert len(given("digits", tmp_path / "0.png")) == 1


def test_a_splits_name_is_never_a_folder(given, runs, folder: Path, tmp_path: Path, monkeypatch) -> None:
    wanted = given("digits", "validation")
    (tmp_path / "validation").mkdir()
    monkeypatch.chdir(tmp_path)
    assert len(given("digits", "validation")) == len(wanted)  # no pictures are in the folder
    with pytest.raises(DataError, match="there is no picture in this folder"):
        given("digits", "./validation")
    words = ("predict", str(runs("digits").folder), "validation", "--task", "digits", "--data", str(folder))
    done = ran(GRAPPE, *words, cwd=tmp_path)
    assert len(done.stdout.splitlines()) == len(wanted), done.stderr


def test_pictures_as_a_tasks_own_data_read_them(given, folder: Path) -> None:
    wanted = given("photographs", "validation")
    files = [folder / "photographs" / f"class{number % 2}" / f"{number:02}.png" for number in range(12)]
    assert same(given("photographs", [*files[::2], *files[1::2]]), wanted)


def test_pictures_that_cannot_be_taken(given, tmp_path: Path) -> None:
    Image.fromarray(np.zeros((9, 8), np.uint8)).save(tmp_path / "large.png")
    (tmp_path / "cut.png").write_bytes((tmp_path / "large.png").read_bytes()[:40])
    (tmp_path / "no.jpg").write_bytes(b"text")
    (tmp_path / "empty").mkdir()
    (tmp_path / "above/ant").mkdir(parents=True)
    (tmp_path / "above/ant/0.png").write_bytes((tmp_path / "large.png").read_bytes())
    (tmp_path / "above/._0.png").write_bytes(b"Mac OS X")
    for task, name, told in [
        ("digits", "above", r"there is no picture in this folder .*, but in .*above/ant: name that one"),
        ("digits", "large.png", "it has 8 x 9 pixels, and the task's samples 8 x 8: resize it"),
        ("digits", "cut.png", r"cut\.png: "),
        ("digits", "no.jpg", r"no\.jpg: no picture"),
        ("digits", "none.png", r"none\.png is not a file"),
        ("digits", "empty", "there is no picture in this folder"),
        ("plain", "large.png", "data do not define how a picture becomes a sample"),
    ]:
        with pytest.raises(DataError, match=told):
            given(task, tmp_path / name)
    with pytest.raises(UsageError, match="several inputs are pictures"):
        given("digits", [tmp_path / "large.png", tmp_path / "a.npy"])
    with pytest.raises(
        UsageError, match=r"a\.txt: give one of train, validation, test, a \.npy or \.csv file, JSON lines"
    ):
        given("digits", tmp_path / "a.txt")


def test_files_of_predictions_are_those_in_memory(runs, folder: Path, tmp_path: Path) -> None:
    rows = list(predict(runs("digits"), "validation", task=Digits, data=folder))
    save(tmp_path / "out.npz", iter(rows))
    found = np.load(tmp_path / "out.npz")
    assert found["class"].tolist() == [int(row["class"]) for row in rows]
    assert found["probability"].dtype == np.float32
    save(tmp_path / "one.npy", (row["probability"] for row in rows))
    assert np.array_equal(np.load(tmp_path / "one.npy"), found["probability"])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["one.npy", "out.npz"]
    with pytest.raises(UsageError, match="there is no folder"):
        save(tmp_path / "none" / "out.npy", iter([torch.zeros(2)]))


def test_files_are_named_as_numpy_names_them(tmp_path: Path) -> None:
    rows = [torch.ones(2)] * 3
    save(tmp_path / "pred", rows)
    assert np.load(tmp_path / "pred.npy").shape == (3, 2)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link.npy").symlink_to(tmp_path / "elsewhere" / "there.npy")
    save(tmp_path / "link.npy", rows)
    assert (tmp_path / "link.npy").is_symlink() and np.load(tmp_path / "elsewhere" / "there.npy").shape == (3, 2)


def test_a_folder_is_refused_before_anything_is_computed(tmp_path: Path) -> None:
    rows = iter([torch.ones(2)])
    with pytest.raises(UsageError, match="it is a folder"):
        save(tmp_path, rows)
    assert len(list(rows)) == 1


LIMITED = """
import resource, sys
from pathlib import Path
import numpy as np
from grappe.verbs.predict.predict import predict
from grappe.verbs.predict.predict import save
from tests.verbs.predict.test_inputs import TASKS

name, run, inputs, folder = sys.argv[1:]
found = predict(run, inputs, task=TASKS[name], data=folder)
next(found)
now = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmData")) * 1024
resource.setrlimit(resource.RLIMIT_DATA, (now + (200 << 20), now + (200 << 20)))
try:
    np.ones(300 << 20, np.uint8)
except MemoryError:
    save(Path(folder) / "limited.npy", found)
    print(len(np.load(Path(folder) / "limited.npy", mmap_mode="r")))
"""


@pytest.mark.parametrize(("kind", "name"), [("npy", "wide"), ("jsonl", "plain")])
def test_files_larger_than_the_memory(kind: str, name: str, runs, folder: Path) -> None:
    """300 MB of samples, in a process that may take 200 MB more than before the first."""
    file, count = folder / f"large.{kind}", 3_000
    if kind == "npy":
        np.lib.format.open_memmap(file, "w+", np.float32, (count, 25_000)).flush()  # takes no room on the disk
    else:
        padded = b"[1, 2, 3, 4" + b" " * 100_000 + b"]\n"
        with file.open("wb") as stream:
            for _ in range(count):
                stream.write(padded)
    done = subprocess.run(
        [sys.executable, "-c", LIMITED, name, str(runs(name).folder), str(file), str(folder)],
        check=False, capture_output=True, text=True, timeout=PATIENCE_SECONDS, cwd=Path(__file__).parents[3],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    file.unlink()
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(count - 1)
