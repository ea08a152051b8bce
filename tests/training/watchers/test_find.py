"""A user's own watchers, from Python and by name: what they are called with, and what mistakes say."""

import json
from pathlib import Path

import pytest

import grappe
from grappe.errors import TaskError, UsageError
from grappe.training.request import checked_watchers, find_watcher, make_watchers
from grappe.training.run import Run
from tests.commands import GRAPPE
from tests.parity.tasks import Images
from tests.training.watchers.of_a_user import Diary, Gradients

FILE = Path(__file__).with_name("of_a_user.py")
HERE = "device=cpu,threads=1,workers=0"


def diary(run: Path) -> list[list]:
    return [json.loads(line) for line in (run / "diary.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("plan", "processes"), [("", 1), ("replicate=2", 2)])
def test_a_watcher_is_called_in_order_on_process_0(tmp_path: Path, plan: str, processes: int) -> None:
    text = f"{plan},{HERE}".strip(",")
    run = grappe.train(Images(epochs=2), text, tmp_path / "run", data=tmp_path, watchers=[Diary(), f"{FILE}:Gradients"])
    first, *calls, last = diary(run.folder)
    assert first[0] == "started"
    assert first[3:] == [0, processes, 0, 6]
    losses = {record["step"]: record["loss"] for record in run.records("step")}
    wanted = [
        *(["stepped", step, losses[step]] for step in (1, 2, 3)), ["evaluated", 3, 29], ["saving", 3],
        *(["stepped", step, losses[step]] for step in (4, 5, 6)), ["evaluated", 6, 29], ["saving", 6],
    ]  # fmt: skip
    assert calls == wanted
    assert last[:2] == ["ended", "finished"]
    steps = [line.split() for line in (run.folder / "gradients.txt").read_text().splitlines()]
    assert [int(step) for step, *_ in steps] == [1, 2, 3, 4, 5, 6]
    assert all(len(names) > 1 for _, _, *names in steps)


@pytest.mark.parametrize("engine", ["textbook", "lightning"])
def test_gradients_are_of_the_step_that_uses_them(tmp_path: Path, engine: str) -> None:
    norms = []
    for name in ("native", engine):
        run = grappe.train(Images(), f"engine={name},{HERE}", tmp_path / name, watchers=[Gradients()])
        norms.append([float(line.split()[1]) for line in (run.folder / "gradients.txt").read_text().splitlines()])
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_watch_on_the_command_line(start, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(FILE.read_text())
    plan = ("--plan", f"replicate=2,{HERE}", "--run", "run")
    watch = ("--callback", "mine.py:Diary", "--callback", "mine:Gradients")
    code, _, err = start(GRAPPE, "train", "digits", "epochs=1", *plan, "--steps", "2", *watch).end()
    assert (code, err) == (0, ""), err
    assert [line[0] for line in diary(tmp_path / "run")] == [
        "started", "stepped", "stepped", "evaluated", "saving", "ended",
    ]  # fmt: skip
    assert len((tmp_path / "run/gradients.txt").read_text().splitlines()) == 2


def test_an_error_in_a_watcher_names_it_and_its_line(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"Failing.stepped\(\) failed: KeyError: .*of_a_user.py, line \d+, in stepped"):
        grappe.train(Images(), HERE, tmp_path / "run", data=tmp_path, watchers=[f"{FILE}:Failing"])
    assert Run(tmp_path / "run").latest() is not None


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        (f"{FILE}", "name a class, as in"),
        (f"{FILE}:", "name a class, as in"),
        ("missing.py:Diary", "there is no file missing.py"),
        (f"{FILE}:Dairy", "there is no watcher 'Dairy' in it: did you mean Diary"),
        (f"{FILE}:json", "there is no watcher 'json' in it"),
        ("no_such_module:Diary", "cannot be loaded: ModuleNotFoundError"),
        ("pathlib:Path", "Path does not derive from grappe.Watcher"),
        (f"{FILE}:NeedsMore", "It is made without arguments"),
    ],
)
def test_a_watcher_that_is_not_there(reference: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as error:
        make_watchers([reference])
    assert error.value.exit_code == 2
    assert str(error.value).count("\n") == 0


def test_a_file_that_fails_and_what_is_no_watcher_are_refused(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import grappe\n\nx = 1 / 0\n")
    with pytest.raises(UsageError, match=r"broken.py:A cannot be loaded: ZeroDivisionError: .*broken.py, line 3"):
        find_watcher(f"{tmp_path / 'broken.py'}:A")
    with pytest.raises(UsageError, match="give an instance of a class"):
        grappe.train(Images(), HERE, tmp_path / "run", watchers=[print])  # type: ignore[list-item]


def test_a_files_path_holds_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(FILE.parent)
    watchers = checked_watchers(["of_a_user.py:Diary", Gradients()])
    assert watchers[0] == f"{FILE}:Diary"
