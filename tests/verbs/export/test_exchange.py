"""ONNX and TorchScript: what they predict is proven, and what they cannot express is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grappe.cli.commands import app
from grappe.errors import GrappeError, TaskError, UsageError
from grappe.training.run import Run
from grappe.verbs.export import exchange
from grappe.verbs.export.export import export
from grappe.verbs.export.program import input_names, output_names, program_of, trace
from grappe.verbs.export.samples import samples_of
from tests.training.test_training import train
from tests.verbs.export import tasks

pytest.importorskip("onnx")
pytest.importorskip("onnxscript")
onnxruntime = pytest.importorskip("onnxruntime")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return Run(train(tmp_path_factory.mktemp("exchange") / "run", tasks.Tied(), steps=2).run)


def written(folder: Path) -> tuple[dict[str, Any], dict[str, np.ndarray], list[dict[str, Any]]]:
    """The manifest, the samples and their predictions of an exported folder."""
    known = json.loads((folder / "manifest.json").read_text())
    feed = {one["name"]: np.load(folder / "test" / f"{one['name']}.npy") for one in known["inputs"]}
    lines = (folder / "test" / "expected.jsonl").read_text().splitlines()
    return known, feed, [json.loads(line) for line in lines]


def test_onnx_gives_the_runs_predictions(run: Run, tmp_path: Path) -> None:
    """From the command: bytes in, tied weights, a buffer that no state dict has, three kinds of tensors out."""
    words = ["export", str(run.folder), "--to", str(tmp_path / "out"), "--format", "onnx"]
    app([*words, "--task", f"{tasks.__file__}:Tied"], exit_on_error=False, print_error=False)
    known, feed, wanted = written(tmp_path / "out")
    session = onnxruntime.InferenceSession(
        tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"]
    )
    assert [one.name for one in session.get_outputs()] == ["class", "chances", "sure"]
    for count in (1, 3, 8):
        found = session.run(None, {name: array[:count] for name, array in feed.items()})
        assert found[0].tolist() == [row["class"] for row in wanted[:count]]
        assert np.allclose(found[1], [row["chances"] for row in wanted[:count]], atol=1e-5)
    assert known["kind"] == "onnx"
    assert known["proof"]["batch_sizes"] == [1, 2, 12]
    assert known["onnxruntime"] == onnxruntime.__version__
    assert "onnxruntime.InferenceSession" in (tmp_path / "out" / "README.md").read_text()


def test_torchscript_gives_them_and_says_that_it_is_deprecated(
    run: Run, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    words = ["export", str(run.folder), "--to", str(tmp_path / "out"), "--format", "torchscript"]
    app([*words, "--task", f"{tasks.__file__}:Tied"], exit_on_error=False, print_error=False)
    assert "TorchScript is deprecated since torch 2.11" in capsys.readouterr().err
    _, feed, wanted = written(tmp_path / "out")
    module = torch.jit.load(tmp_path / "out" / "model.pt")
    found = module(*(torch.from_numpy(array[:3]) for array in feed.values()))
    assert found[0].tolist() == [row["class"] for row in wanted[:3]]
    assert "is deprecated" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("kind", ["onnx", "torchscript"])
def test_what_looks_at_values_is_refused_in_any_format(kind: exchange.Exchange, tmp_path: Path) -> None:
    """A trace by TorchScript alone would take one way of the two for ever."""
    task = tasks.LooksAtValues()
    run = Run(train(tmp_path / "run", task, steps=1).run)
    with pytest.raises(TaskError, match="looks at values in its forward"):
        export(run, tmp_path / "out", task=tasks.LooksAtValues, data=tmp_path, format=kind)
    assert not (tmp_path / "out").exists()


class Sorted(tasks.Plain):
    """Has an operation that ONNX has not."""

    def prediction(self, output: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(output)


def test_what_onnx_has_not_is_refused(tmp_path: Path) -> None:
    task = Sorted()
    samples = samples_of(task, "validation", tmp_path)
    program, example = program_of(task, task.model(), samples), samples.example()
    names = output_names(program, example)
    with pytest.raises(TaskError, match=r"--format onnx cannot express the model: .*Take --format program"):
        exchange.write(
            "onnx",
            tmp_path / "x.onnx",
            program,
            trace(program, example),
            example,
            input_names(samples),
            names,
        )


def test_a_file_that_was_changed_is_not_opened(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(b"native code")
    with pytest.raises(GrappeError, match="somebody has changed it, and it is not opened"):
        exchange.opened("torchscript", tmp_path / "model.pt", "0" * 64)


def test_what_is_missing_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"needs onnx, onnxscript, onnxruntime: pip install 'grappe\[onnx\]'"
    ):
        export(run, tmp_path / "out", task=tasks.Tied, format="onnx")
    with pytest.raises(UsageError, match="--operators: --format torchscript compiles nothing"):
        export(run, tmp_path / "out", task=tasks.Tied, format="torchscript", sources=[Path("x.cpp")])
