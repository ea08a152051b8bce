"""Runs of the gallery's tasks learn what plain loops do, resume to the bit and predict; a kernel runs the notebook."""

import functools
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks import gallery_files

import grappe
from grappe.training.run import Run
from tests import needs
from tests.gallery import tasks
from tests.gallery.cell import seen
from tests.parity.cell import TOLERANCE, difference
from tests.patience import PATIENCE_SECONDS

needs.library("transformers", "peft", "torch_geometric")

STEPS = 4
PLAN = "threads=1,device=cpu"


def train(name: str, folder: Path, steps: int = STEPS) -> Path:
    """A run of a few steps."""
    options = grappe.Options(steps=steps, save_every=2, evaluate_every=STEPS)
    grappe.train(gallery_files.file(name), PLAN, folder, data=tasks.folder(name), options=options)
    return folder


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """By name: the folder of a run, trained once."""
    folder = tmp_path_factory.mktemp("gallery")
    return functools.cache(lambda name: train(name, folder / name))


@pytest.mark.parametrize("name", gallery_files.NAMES)
def test_the_plain_loop_learns_the_same(name: str, trained: Callable[[str], Path]) -> None:
    losses, net = tasks.train_plain(name, STEPS)
    lines = [json.loads(line) for line in (trained(name) / "metrics.jsonl").read_text().splitlines()]
    assert [one["loss"] for one in lines if one["kind"] == "step"] == pytest.approx(losses, rel=1e-5)
    model = grappe.load(trained(name), gallery_files.file(name))
    gap, worst = difference(*(seen(dict(one.named_parameters())) for one in (net, model)))
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"


@pytest.mark.parametrize("name", gallery_files.NAMES)
def test_resumes_to_the_bit_and_predicts(name: str, trained: Callable[[str], Path], tmp_path: Path) -> None:
    resumed = shutil.copytree(trained(name), tmp_path / "resumed")
    shutil.rmtree(resumed / "checkpoints" / f"step-{STEPS:06d}")
    train(name, resumed)
    assert Run(resumed).latest().step == STEPS  # type: ignore[union-attr]
    both = [grappe.load(run, gallery_files.file(name)).state_dict() for run in (trained(name), tmp_path / "resumed")]
    assert all(torch.equal(one, both[1][key]) for key, one in both[0].items())
    data = tasks.folder(name)
    rows = list(grappe.predict(trained(name), "validation", task=gallery_files.file(name), data=data))
    assert len(rows) == len(tasks.task(name).data("validation", data))  # type: ignore[arg-type]


def test_the_plain_loop_of_a_mixture_cuts_and_packs_the_documents_as_its_task() -> None:
    dataset = tasks.task("pretraining").data("train", tasks.folder("pretraining"))
    ours = [tasks.pieces(dataset[place]) for place in range(len(dataset))]  # type: ignore[arg-type]
    theirs = gallery_files.plain("pretraining").data("train")
    assert len(ours) == len(theirs)
    assert sorted(piece for pack in ours for piece in pack) == sorted(piece for pack in theirs for piece in pack)


def test_a_teacher_comes_from_its_own_run_and_stays_as_it_is(tmp_path: Path) -> None:
    file, options = gallery_files.file("distillation"), grappe.Options(steps=STEPS)
    grappe.train(file, PLAN, tmp_path / "teacher", student=False, options=options)
    given = {"teacher": str(tmp_path / "teacher")}
    grappe.train(file, PLAN, tmp_path / "student", fields=given, options=options)
    teacher, pair = [grappe.load(tmp_path / name) for name in ("teacher", "student")]
    assert all(torch.equal(one, pair.state_dict()[f"teacher.{key}"]) for key, one in teacher.state_dict().items())


@pytest.mark.slow
def test_the_notebook_runs_in_a_kernel(tmp_path: Path) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(gallery_files.FOLDER / "tabular.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=PATIENCE_SECONDS, resources=resources).execute()
    [said] = [one for one in notebook.cells[-1].outputs if one.output_type == "execute_result"]
    assert said.data["text/plain"].count("tensor(") == 3
    assert (tmp_path / "tabular-run" / "done").exists()


@pytest.mark.parametrize("name", gallery_files.NAMES)
def test_each_is_short_and_says_what_it_is(name: str) -> None:
    assert gallery_files.lines(name) <= 60
    by_hand = (gallery_files.FOLDER / "plain" / f"{name}.py").read_text()
    assert len(by_hand.splitlines()) <= 80
    assert by_hand.startswith('"""')
    assert "grappe" not in by_hand
