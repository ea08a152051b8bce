"""--json: one line with the three keys of its form, and nothing else on the standard output."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from docs.messages.others import command, commands

from grappe.cli.commands import app
from grappe.cli.exit import FORM, json_values, show_json
from grappe.contrib.slurm import jobs
from grappe.verbs.data import walk
from tests.data.images import pictures

GUIDE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, whose index is made, and a run whose job has ended."""
    folder = tmp_path_factory.mktemp("json")
    pictures.folder(folder / "images", pictures.files())
    walk.index(folder / "images")
    (folder / "runs" / "one" / "logs").mkdir(parents=True)
    jobs.record_job(folder / "runs" / "one", "12", "generic", "nothing")
    (folder / "runs" / "one" / "logs" / "job-12.end").write_text("0\n")
    return folder


@pytest.fixture
def folder(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(made)
    return made


@pytest.mark.parametrize(
    ("words", "kind", "key"),
    [
        ("tasks digits", "tasks", "tasks"),
        ("engines", "engines", "keys"),
        ("sites narval", "sites", "sites"),
        ("gpus", "gpus", "gpus"),
        ("runs", "runs", "runs"),
        ("prune", "prune", "folders"),
        ("fetch mnist --data . --dry-run", "fetch", "files"),
        ("data index images", "data-index", None),
        ("data check images", "data-check", "bad"),
        ("data pack images --out shards --dry-run", "data-pack", "shards"),
        ("data stage images --out disk --dry-run", "data-stage", None),
        ("cancel runs/one --dry-run", "cancel", "jobs"),
        ("wait runs/one", "wait", None),
        ("tune digits lr=0.1|0.2 --sampler grid --dry-run", "search", None),
        ("submit --site narval --account def-me --dry-run -- train digits", "submit", "jobs"),
    ],
)
def test_one_line_of_its_kind(words: str, kind: str, key: str | None, folder: Path, capsys) -> None:
    before = sorted(folder.rglob("*"))
    first, dashes, rest = words.partition(" -- ")
    app([*first.split(), "--json", *f"{dashes}{rest}".split()], exit_on_error=False, print_error=False)
    content = json.loads(capsys.readouterr().out)
    assert (content["form"], content["kind"]) == (FORM, kind)
    if key is not None:
        assert isinstance(content[key], list)
    if "--dry-run" in words:
        assert sorted(folder.rglob("*")) == before


@pytest.mark.slow
def test_a_trainings_line_stands_alone_and_its_curves_are_records(tmp_path: Path, capsys) -> None:
    words = [Path(sys.executable).parent / "grappe", "train", "digits", "epochs=1", "--run", "run", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=True)
    [run] = json.loads(done.stdout)["runs"]
    assert (run["folder"], run["status"]) == ("run", "finished")
    assert "epoch  1" in done.stderr
    app(["curves", str(tmp_path / "run"), "--json"], exit_on_error=False, print_error=False)
    records = json.loads(capsys.readouterr().out)["records"]
    assert {record["run"] for record in records} == {"run"}
    assert run["evaluation"] in [{name: value for name, value in one.items() if name != "run"} for one in records]


def test_what_is_not_finite_is_null(capsys: pytest.CaptureFixture[str]) -> None:
    show_json("scores", loss=float("nan"), folder=Path("a"), steps=(1, 2))
    content = json.loads(capsys.readouterr().out)
    assert (content["loss"], content["folder"], content["steps"]) == (None, "a", [1, 2])
    assert json_values({1: {float("inf")}}) == {"1": [None]}


def options_of(words: tuple[str, ...]) -> set[str]:
    application = command(words)
    collection = application.assemble_argument_collection() if application.default_command else ()
    return {name for argument in collection for name in argument.names}


def test_the_guide_names_each_command_that_has_the_option() -> None:
    rows = "\n".join(line.split("|")[1] for line in GUIDE.splitlines() if line.startswith("| `"))
    with_it = [" ".join(words) for words in commands(app) if "--json" in options_of(words)]
    assert [name for name in with_it if not re.search(rf"`{name}\b", rows)] == []


@pytest.mark.parametrize("words", ["tune", "prune", "fetch", "submit", "cancel", "export", "data pack", "data stage"])
def test_a_command_that_changes_something_can_show_it_first(words: str) -> None:
    assert "--dry-run" in options_of(tuple(words.split()))
