"""Refused exports: the user's line is named where there is one, and nothing is left at the target."""

import hashlib
from pathlib import Path

import pytest
import torch

from grappe.checkpoint.foreign_training import foreign_weights
from grappe.checkpoint.weights import agreed
from grappe.cli.commands import app
from grappe.contrib.export import cpp, formats, proof
from grappe.contrib.export.cpp import open_package
from grappe.contrib.export.export import export
from grappe.contrib.export.folder import ExportOptions, complete_or_nothing
from grappe.contrib.export.program import input_names, output_names, program_of, trace
from grappe.contrib.export.proof import samples_of
from grappe.errors import GrappeError, TaskError, UsageError
from grappe.training.run import Run
from grappe.verbs.load import load
from tests.commands import GRAPPE, ran
from tests.contrib.export import tasks
from tests.training.test_training import train


def traced(task: tasks.Plain, folder: Path) -> torch.export.ExportedProgram:
    samples = samples_of(task, "validation", folder)
    return trace(program_of(task, task.model(), samples), samples.example())


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (tasks.LooksAtValues(), r"looks at values in its forward \(.*tasks\.py, line \d+, in forward\(\): if x\.sum"),
        (tasks.FixesTheBatch(), r"some numbers of samples in a batch.*49"),
        (tasks.LeavesTorch(), r"cannot trace the model: .*tasks\.py, line \d+, in forward"),
    ],
)  # fmt: skip
def test_what_cannot_be_traced(task: tasks.Plain, told: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=told) as refused:
        traced(task, tmp_path)
    assert "\n" not in str(refused.value)
    assert refused.value.exit_code == 2


def test_the_batch_is_any(tmp_path: Path) -> None:
    found = traced(tasks.Tied(), tmp_path)
    assert [str(one) for one in found.range_constraints.values()] == ["VR[1, int_oo]"]
    module, images = found.module(), torch.zeros(1, 3, 8, 8, dtype=torch.uint8)
    assert [one.shape for one in module(images)] == [(1,), (1, 5), (1,)]
    assert not images.any()  # the transform works in place, on a copy
    samples = samples_of(tasks.Tied(), "validation", tmp_path)
    assert input_names(samples) == ("inputs",)
    program = program_of(tasks.Tied(), tasks.Tied().model(), samples)
    assert output_names(program, samples.example()) == ("class", "chances", "sure")


class Scalar(tasks.Plain):
    """One number for a batch."""

    def prediction(self, output):
        return {"mean": output.mean()}


class Words(tasks.Plain):
    """A text."""

    def prediction(self, output):
        return {"rows": output, "text": "yes"}


class Quoted(tasks.Plain):
    """A name that would end a C++ string."""

    def prediction(self, output):
        return {'"; system("x': output}


@pytest.mark.parametrize(
    ("task", "told"),
    [
        (Scalar(), r"'mean' is a tensor \[\] for 3 samples"),
        (Words(), "'text' is a str"),
        (Quoted(), "cannot be a name in a program"),
    ],
)
def test_predictions_are_tensors_with_a_row_for_each_sample(task: tasks.Plain, told: str, tmp_path: Path) -> None:
    samples = samples_of(task, "validation", tmp_path)
    with pytest.raises(TaskError, match=told):
        output_names(program_of(task, task.model(), samples), samples.example())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(train(tmp_path_factory.mktemp("export") / "run", tasks.Couples(), steps=1).run)


def test_what_differs_is_not_written(run: Run, tmp_path: Path) -> None:
    """Predictions depend on the other samples of the batch, so no batch size gives what another does."""
    with pytest.raises(
        proof.PredictionMismatch, match=r"sample 0: .*, 1 at a time, .*output is .*, not .*Nothing was"
    ) as bad:
        export(run, tmp_path / "out", ExportOptions(format="safetensors"), task=tasks.Couples, data=tmp_path)
    assert bad.value.exit_code == 1
    assert not list(tmp_path.iterdir())


def test_the_first_sample_that_differs_is_named() -> None:
    ours = [torch.zeros(4, dtype=torch.long), torch.zeros(4, 2)]
    theirs = [torch.tensor([0, 0, 0, 1]), torch.tensor([[0.0, 0], [0, 0], [0, 2e-5], [0, 0]])]
    names = ("class", "scores")
    with pytest.raises(proof.PredictionMismatch, match=r"sample 102: in C\+\+, .* scores is 0, 2e-05, not 0, 0"):
        proof.compare(ours, theirs, names=names, first=100, place="in C++, 1 at a time")
    near = [ours[0], theirs[1] / 4]
    assert proof.compare(ours, near, names=names, first=0, place="") == pytest.approx(5e-6)


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ([1e6, 1.0], [1e6, 1.5], True),  # a share of the row's largest
        ([1.0, 0.0], [1.0, 3e-5], False),
        ([float("nan"), 1.0], [float("nan"), 1.0], True),
        ([float("nan"), 1.0], [0.0, 1.0], False),
        ([float("inf"), 1.0], [float("nan"), 1.0], True),  # JSON has one word for both
    ],
)
def test_rows_are_compared(ours: list[float], theirs: list[float], same: bool) -> None:
    found = proof.row_differences(torch.tensor([ours]), torch.tensor([theirs]))
    assert bool(found <= proof.TOLERANCE) is same


def test_batch_sizes() -> None:
    assert proof.sizes_of(360, 64) == (1, 2, 64)
    assert proof.sizes_of(29, 64) == (1, 2, 29)
    assert proof.sizes_of(1, 64) == (1,)


def test_weights_alone_have_the_predictions_of_the_run(tmp_path: Path) -> None:
    """Tied weights and batch normalisation, too; a buffer outside of the state dict cannot be in it, and is told."""
    made = Run(train(tmp_path / "run", tasks.Plain(), steps=2).run)
    done = export(made, tmp_path / "out", ExportOptions(format="safetensors"), task=tasks.Plain, data=tmp_path)
    assert done.proof.samples == 29
    assert done.proof.batch_sizes == (1, 2, 12)
    written = formats.load_file(tmp_path / "out" / "model.safetensors")
    model = load(made, tasks.Plain).state_dict()
    assert {name: value.tolist() for name, value in written.items()} == {
        name: value.tolist() for name, value in model.items()
    }
    with pytest.raises(UsageError, match="it holds something, and grappe overwrites nothing"):
        export(made, tmp_path / "out", ExportOptions(format="safetensors"), task=tasks.Plain, data=tmp_path)


def test_a_buffer_that_no_state_dict_has_is_found_out(tmp_path: Path) -> None:
    made = Run(train(tmp_path / "run", tasks.Tied(), steps=2).run)
    with pytest.raises(proof.PredictionMismatch, match="sample 0: with the weights that were written"):
        export(made, tmp_path / "out", ExportOptions(format="safetensors"), task=tasks.Tied, data=tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with pytest.raises(KeyboardInterrupt), complete_or_nothing(target) as staged:
        (staged / "half").write_text("")
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())
    with complete_or_nothing(target) as staged:
        (staged / "whole").write_text("")
        assert not target.exists()
    assert [one.name for one in tmp_path.iterdir()] == ["out"]
    assert (target / "whole").is_file()


@pytest.mark.parametrize("kind", ["full", "link", "file", "nowhere", "filled on the way"])
def test_what_is_there_stays(kind: str, tmp_path: Path) -> None:
    target = tmp_path / "theirs" / "out"
    (tmp_path / "elsewhere").mkdir()
    if kind != "nowhere":
        target.parent.mkdir()
    if kind == "full":
        target.mkdir()
        (target / "x").write_text("theirs")
    elif kind == "link":
        target.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        target.write_text("theirs")

    def write() -> None:
        with complete_or_nothing(target) as staged:
            (staged / "y").write_text("ours")
            target.mkdir()
            (target / "x").write_text("theirs")

    with pytest.raises(UsageError, match=r"--out .*out: "):
        write()
    assert not list(tmp_path.rglob("y"))
    assert not list((tmp_path / "elsewhere").iterdir())


def test_a_package_is_opened_only_by_who_made_it(tmp_path: Path) -> None:
    file = tmp_path / "model.pt2"
    file.write_bytes(b"native code")
    made = hashlib.sha256(b"native code").hexdigest()
    for changed in (b"native codE", b"native"):
        file.write_bytes(changed)
        with pytest.raises(GrappeError, match="somebody has changed it, and it is not opened"):
            open_package(file, made)
    file.unlink()
    file.symlink_to(tmp_path / "other")
    with pytest.raises(GrappeError, match="not opened"):
        open_package(file, made)


def test_a_package_that_ends_who_opens_it_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch 2.11's did on a machine with a GPU; the remedy is in the message."""
    monkeypatch.setattr(cpp, "OPEN", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    file = tmp_path / "model.pt2"
    file.write_bytes(b"native code")
    with pytest.raises(GrappeError, match=r"ended by signal 11 when it opens .* --format safetensors"):
        open_package(file, hashlib.sha256(b"native code").hexdigest())


@pytest.mark.parametrize(
    "words",
    [
        ["predict", "model.pt2", "validation"],
        ["evaluate", "model.pt2"],
        ["export", "model.pt2", "--out", "new"],
        ["predict", "RUN", "model.pt2", "--task", f"{tasks.__file__}:Couples"],
    ],
)
def test_commands_open_no_package(words: list[str], run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.pt2").write_bytes(b"native code")
    words = [str(run.folder) if word == "RUN" else word for word in words]
    with pytest.raises(GrappeError, match=r"opens no \.pt2 file\. It is native code") as refused:
        app(words, exit_on_error=False, print_error=False)
    assert refused.value.exit_code == 2


def test_weights_are_read_from_no_package(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"opens no \.pt2 file"):
        foreign_weights(tmp_path / "model.pt2")


def test_without_a_compiler_the_fix_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(UsageError, match=r"no C\+\+ compiler on the PATH: module load gcc.*--format safetensors"):
        export(run, tmp_path / "out", task=tasks.Couples, data=tmp_path)
    assert not list(tmp_path.iterdir())


def test_which_statistics_of_batch_normalisation_were_exported_is_said(tmp_path: Path) -> None:
    """Each of two processes has its own: the mean is exported, and the manifest says so."""
    task = f"{tasks.__file__}:Layered"
    words = ["train", task, "middle=BatchNorm1d", "--plan", "replicate=2,batchnorm=local", "--steps", "3"]
    done = ran(GRAPPE, *words, "--run", "run", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    words = ["export", str(tmp_path / "run"), "--out", str(out), "--format", "safetensors", "--task", task]
    app(words, exit_on_error=False, print_error=False)
    checkpoint = Run(tmp_path / "run").latest()
    tensors = checkpoint.read_tensors()
    own = [tensors.read(f"local.{number}.1.1.running_mean") for number in (0, 1)]
    assert not torch.equal(*own)
    assert torch.equal(formats.load_file(out / "model.safetensors")["1.1.running_mean"], agreed(own))
    assert '"buffers": "the mean over the processes\' own"' in (out / "manifest.json").read_text()
