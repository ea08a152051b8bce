"""A run from somebody else runs no code, whatever task it names; a run that was trained here keeps its task."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import grappe
from grappe import finder
from grappe.checkpoint.commit import json_hash
from grappe.errors import TaskError
from grappe.training.run import HASH, Run
from grappe.training.task_reference import ID
from tests.cli.test_bad_input import TASK

EVIL = "from pathlib import Path\n(Path(__file__).parents[{up}] / 'ran').touch()\n" + TASK.replace("Mine", "Evil")
PLAN = "threads=1,device=cpu"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A working folder and a state folder of one's own; what was imported is forgotten."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "work/runs").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    before, modules = list(sys.path), set(sys.modules)
    yield tmp_path / "work"
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        if name.partition(".")[0] in ("payload", "runs", "mine", "evil", "package") or name.startswith("grappe_task_"):
            del sys.modules[name]


def trained(task: str, folder: Path) -> Path:
    return grappe.train(task, PLAN, folder).folder


def named(run: Path, name: str, **others: object) -> None:
    """Has run.json name another task, as whoever sends it can."""
    known = {**json.loads((run / "run.json").read_text()), "task": name, **others}
    del known[HASH]
    (run / "run.json").write_text(json.dumps({**known, HASH: json_hash(known)}))


@pytest.fixture(scope="module")
def sent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of somebody else's."""
    theirs = tmp_path_factory.mktemp("theirs")
    (theirs / "mine.py").write_text(TASK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(theirs / "state"))
        return trained(str(theirs / "mine.py"), theirs / "run")


@pytest.fixture
def foreign(sent: Path, place: Path) -> Path:
    """A run that somebody else has trained and sent, with code in it, beside it and in the working folder."""
    run = shutil.copytree(sent, place / "runs/digits-2026")
    for file in ("payload.py", "runs/payload.py", "runs/digits-2026/payload.py", "runs/digits-2026/sub/payload.py"):
        (place / file).parent.mkdir(exist_ok=True)
        (place / file).write_text(EVIL.format(up=file.count("/")))
    return run


NAMED = """
runs.digits-2026.payload:Evil digits-2026.payload:Evil payload:Evil payload.py payload.py:Evil sub.payload:Evil
RUN/payload.py RUN/../payload.py grappe.tasks.digits.payload:Evil grappe.tasks.digits:os.system
grappe.tasks:importlib os:system __main__:Evil
"""


@pytest.mark.parametrize("where", ["work", "runs", "run"])
@pytest.mark.parametrize("name", [*NAMED.split(), ""])
def test_no_code_runs_because_a_run_names_it(foreign, place, name, where, monkeypatch):
    monkeypatch.chdir({"work": place, "runs": place / "runs", "run": foreign}[where])
    named(foreign, name.replace("RUN", str(foreign)))
    for verb in (
        lambda: grappe.load(foreign),
        lambda: grappe.evaluate(foreign, plan=PLAN),
        lambda: next(iter(grappe.predict(foreign, "validation"))),
    ):
        with pytest.raises(grappe.GrappeError) as error:
            verb()
        assert "\n" not in str(error.value)
    assert not list(place.rglob("ran"))


def test_the_bait_is_live(foreign: Path, place: Path) -> None:
    finder.find("payload:Evil")
    assert (place / "ran").exists()


@pytest.mark.parametrize("name", ["runs/digits-2026/payload.py", "runs/digits-2026/sub/payload.py:Evil"])
def test_nothing_inside_a_run_is_loaded_even_when_asked_for(foreign: Path, place: Path, name: str) -> None:
    with pytest.raises(TaskError, match="the file is inside the run"):
        grappe.load(foreign, name)
    assert not list(place.rglob("ran"))


def test_a_foreign_run_is_read_with_the_users_own_task(foreign: Path, place: Path) -> None:
    named(foreign, "payload:Evil")
    with pytest.raises(TaskError, match=r"Say which task it is: --task path/to/file\.py"):
        grappe.load(foreign)
    (place / "mine.py").write_text(TASK)
    assert grappe.load(foreign, "mine.py").last.weight.shape == (2, 4)
    assert grappe.evaluate(foreign, plan=PLAN, task="mine.py").samples == 16
    assert len(list(grappe.predict(foreign, "validation", task="mine.py:Mine"))) == 16
    assert not list(place.rglob("ran"))


@pytest.mark.parametrize("name", ["mine.py", "package.mine:Mine", "mine:Mine"])
def test_a_run_that_was_trained_here_is_read_from_anywhere(place, name, monkeypatch):
    (place / "package").mkdir()
    for file in ("mine.py", "package/mine.py"):
        (place / file).write_text(TASK)
    run = trained(name, place / "runs/here")
    assert ID.fullmatch(Run(run).read_id())
    elsewhere = place.parent / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "mine.py").write_text(EVIL.format(up=0))
    monkeypatch.chdir(elsewhere)
    sys.modules.pop("mine", None)
    assert grappe.load(run).last.weight.shape == (2, 4)
    assert grappe.evaluate(run, plan=PLAN).samples == 16
    moved = shutil.move(run, place / "runs/moved")
    assert grappe.load(moved).last.weight.shape == (2, 4)
    assert not list(place.parent.rglob("ran"))


def test_a_task_that_has_changed_is_asked_for(place: Path) -> None:
    (place / "mine.py").write_text(TASK)
    run = trained("mine.py", place / "runs/here")
    (place / "mine.py").write_text(TASK + "\n# more\n")
    with pytest.raises(TaskError, match=r"has changed since .* was trained with it"):
        grappe.load(run)
    assert grappe.load(run, "mine.py") is not None
    (place / "mine.py").unlink()
    with pytest.raises(TaskError, match="which no longer exists"):
        grappe.load(run)


def test_a_shipped_task_needs_no_record(place: Path) -> None:
    run = grappe.train("digits", PLAN, place / "runs/shipped", options=grappe.Options(steps=1)).folder
    assert not (place.parent / "state/grappe/tasks").exists()
    assert grappe.load(run) is not None
    named(run, "grappe.tasks.digits:Digits")
    assert grappe.load(run) is not None


def test_records_are_the_users_alone(place: Path) -> None:
    (place / "mine.py").write_text(TASK)
    run = trained("mine.py", place / "runs/here")
    folder = place.parent / "state/grappe/tasks"
    (file,) = folder.iterdir()
    assert (file.name, file.stat().st_mode & 0o777) == (f"{Run(run).read_id()}.json", 0o600)
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)  # others may have written in it
    with pytest.raises(TaskError, match="Say which task it is"):
        grappe.load(run)


@pytest.mark.parametrize("home", ["a file", "none"])
def test_a_training_needs_no_home(place, home, monkeypatch, capfd):
    monkeypatch.delenv("XDG_STATE_HOME")
    if home == "none":
        monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
        monkeypatch.setenv("HOME", "")
    else:
        (place / "home").write_text("")
        monkeypatch.setenv("HOME", str(place / "home"))
    (place / "mine.py").write_text(TASK)
    run = trained("mine.py", place / "runs/here")
    if home != "none":  # the process of the training looks it up in the system's list of users
        assert "later commands will ask for --task" in capfd.readouterr().out
    with pytest.raises(TaskError, match="Say which task it is"):
        grappe.load(run)
    assert grappe.load(run, "mine.py") is not None


def test_a_working_folder_lends_no_modules_to_the_command(foreign: Path, place: Path) -> None:
    (foreign / "cyclopts.py").write_text("from pathlib import Path\nPath('ran').touch()\n")
    words = [sys.executable, "-m", "grappe", "runs", "."]
    environment = {**os.environ, "PYTHONPATH": str(Path(grappe.__file__).parents[1])}
    done = subprocess.run(words, cwd=foreign, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not list(place.rglob("ran"))
