"""ONNX: what it predicts is proven, and what it cannot express is refused."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import grappe
from grappe.cli.commands import app
from grappe.contrib.export import formats
from grappe.contrib.export.export import export
from grappe.contrib.export.folder import ExportOptions
from grappe.contrib.export.program import trace
from grappe.contrib.export.proof import PredictionMismatch
from grappe.errors import TaskError, UsageError
from grappe.plan import Rounding
from grappe.training.run import Run
from tests import needs
from tests.contrib.export import tasks
from tests.training.test_training import train

needs.library("onnx", "onnxscript")
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
    words = ["export", str(run.folder), "--out", str(tmp_path / "out"), "--format", "onnx"]
    app([*words, "--task", f"{tasks.__file__}:Tied"], exit_on_error=False, print_error=False)
    known, feed, wanted = written(tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    assert [one.name for one in session.get_outputs()] == ["class", "chances", "sure"]
    for count in (1, 3, 8):
        found = session.run(None, {name: array[:count] for name, array in feed.items()})
        assert found[0].tolist() == [row["class"] for row in wanted[:count]]
        assert np.allclose(found[1], [row["chances"] for row in wanted[:count]], atol=1e-5)
    assert known["kind"] == "onnx"
    assert known["proof"]["batch_sizes"] == [1, 2, 12]
    assert known["onnxruntime"] == onnxruntime.__version__
    assert "onnxruntime.InferenceSession" in (tmp_path / "out" / "README.md").read_text()


@pytest.mark.parametrize("weights", ["bf16", "int8"])
def test_rounded_weights_are_proven_and_scored(weights: Rounding, run: Run, tmp_path: Path) -> None:
    done = export(run, tmp_path / "out", ExportOptions(format="onnx", weights=weights), task=tasks.Tied)
    known, feed, wanted = written(tmp_path / "out")
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(None, feed)
    assert np.allclose(found[1], [row["chances"] for row in wanted], atol=1e-5)
    scores = known["proof"]["scores"]
    assert known["weights"] == weights
    assert scores == done.scores
    assert list(scores) == ["fp32", weights]
    assert scores["fp32"]["loss"] == grappe.evaluate(run, task=tasks.Tied).loss
    assert scores[weights]["loss"] != scores["fp32"]["loss"]
    assert scores[weights]["loss"] == pytest.approx(scores["fp32"]["loss"], rel=0.05)
    assert f"with weights in {weights}: loss " in (tmp_path / "out" / "README.md").read_text()


def test_rounded_weights_are_a_programs(run: Run, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--weights int8: --format safetensors writes the weights as they are"):
        export(run, tmp_path / "out", ExportOptions(format="safetensors", weights="int8"), task=tasks.Tied)


def differs(folder: Path, task: tasks.Plain) -> str:
    run = Run(train(folder / "run", task, steps=1).run)
    with pytest.raises(PredictionMismatch) as bad:
        export(run, folder / "out", ExportOptions(format="onnx"), task=task, data=folder)
    assert not (folder / "out").exists()
    assert "\n" not in str(bad.value)
    return str(bad.value)


def test_what_is_traced_another_way_is_not_written(tmp_path: Path) -> None:
    assert differs(tmp_path, tasks.Layered(middle="TwoWays")).startswith("sample ")


@pytest.mark.parametrize("tensor", ["model.2.bias", "model.1.1.running_mean"])
def test_what_is_written_wrongly_is_not_kept(tensor: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is changed in the trace alone, as a fault of what writes it would."""

    def spoiled(*arguments: Any) -> torch.export.ExportedProgram:
        traced = trace(*arguments)
        value = traced.state_dict[tensor]
        changed = value.detach() + 0.5
        traced.state_dict[tensor] = torch.nn.Parameter(changed) if isinstance(value, torch.nn.Parameter) else changed
        return traced

    monkeypatch.setattr(formats, "trace", spoiled)
    message = differs(tmp_path, tasks.Layered(middle="BatchNorm1d"))
    assert message.startswith("sample 0: in onnxruntime, 1 at a time, the exported program predicts something else")


class Sorted(tasks.Plain):
    """Has an operation that ONNX has not."""

    def prediction(self, output: torch.Tensor) -> torch.Tensor:
        return torch.special.i0(output)


def test_what_onnx_has_not_is_refused(tmp_path: Path) -> None:
    run = Run(train(tmp_path / "run", Sorted(), steps=1).run)
    with pytest.raises(TaskError, match=r"--format onnx cannot express the model: .*Take --format program"):
        export(run, tmp_path / "out", ExportOptions(format="onnx"), task=Sorted, data=tmp_path)


def test_what_is_missing_is_named(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs onnx, onnxscript, onnxruntime: pip install 'grappe\[onnx\]'"):
        export(run, tmp_path / "out", ExportOptions(format="onnx"), task=tasks.Tied)
    with pytest.raises(UsageError, match="--operators: --format safetensors compiles nothing"):
        export(run, tmp_path / "out", ExportOptions(format="safetensors", operators=(Path("x.cpp"),)), task=tasks.Tied)
