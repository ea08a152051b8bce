"""An export that differs names the layer: where a batch, the trace or the compiler is at fault."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from grappe.checkpoint.weights import agreed
from grappe.cli.commands import app
from grappe.training.run import Run
from grappe.verbs.export import exchange, weights, writers
from grappe.verbs.export.export import export
from grappe.verbs.export.layers import located
from grappe.verbs.export.program import program_of
from grappe.verbs.export.proof import Differs
from grappe.verbs.export.samples import samples_of
from tests.patience import PATIENCE_SECONDS
from tests.training.test_training import train
from tests.verbs.export import tasks
from tests.verbs.export.tasks import Layered


def differs(folder: Path, task: Layered, format: Any) -> str:
    run = Run(train(folder / "run", task, steps=1).run)
    with pytest.raises(Differs) as bad:
        export(run, folder / "out", task=task, data=folder, format=format)
    assert not (folder / "out").exists()
    assert "\n" not in str(bad.value)
    return str(bad.value)


def spoil(traced: torch.export.ExportedProgram, tensor: str) -> None:
    """Changes a tensor in the trace alone, as a fault of what writes it would."""
    name = next(name for name in traced.state_dict if name.endswith(tensor))
    value = traced.state_dict[name]
    changed = value.detach() + 0.5
    traced.state_dict[name] = (
        torch.nn.Parameter(changed) if isinstance(value, torch.nn.Parameter) else changed
    )


def test_a_layer_that_couples_samples_is_named(tmp_path: Path) -> None:
    told = differs(tmp_path, Layered(), "safetensors")
    assert told.startswith("sample 0: with the weights that were written, 1 at a time, the exported program")
    assert "The layer 1.1 (Centred) is the first that differs, by " in told
    assert told.endswith("in a batch of 1 and in one of 12: it depends on the other samples")


def test_a_layer_that_is_traced_another_way_is_named(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    told = differs(tmp_path, Layered(middle="TwoWays"), "onnx")
    assert "The layer 1.1 (TwoWays) is the first that differs, by " in told
    assert told.endswith("in the model and as torch.export traces it")


def test_a_layer_that_is_written_wrongly_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxruntime")
    write = exchange.write

    def wrong(kind: Any, file: Path, program: Any, traced: torch.export.ExportedProgram, *rest: Any) -> str:
        spoil(traced, "model.2.bias")
        return write(kind, file, program, traced, *rest)

    task = Layered(middle="BatchNorm1d")
    monkeypatch.setattr(exchange, "write", wrong)
    told = differs(tmp_path, task, "onnx")
    assert "The layer 2 (Linear) is the first that differs, by " in told
    assert told.endswith("in the model and as it was written")


def test_a_layer_that_is_compiled_wrongly_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers' tensors are outputs of a package, compiled once more."""
    task = Layered(middle="BatchNorm1d")
    samples = samples_of(task, "validation", tmp_path)
    program = program_of(task, task.model(), samples)
    compile_to = writers.compile_to

    def wrong(file: Path, traced: torch.export.ExportedProgram) -> str:
        spoil(traced, "model.1.1.running_mean")
        return compile_to(file, traced)

    monkeypatch.setattr(writers, "compile_to", wrong)
    error = Differs("", sample=5, batch=(4, 6))
    told = located(error, program, samples, predicted=12, write=writers.compiled(samples))
    assert told.startswith("the layer 1.1 (BatchNorm1d) is the first that differs, by ")
    assert told.endswith("in the model and as it was written")


def test_what_fails_while_it_looks_hides_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Sequence[Any]:
        raise RuntimeError("no")

    monkeypatch.setattr("grappe.verbs.export.work.located", broken)
    told = differs(tmp_path, Layered(), "safetensors")
    assert "sample 0: with the weights" in told
    assert told.endswith("Which layer differs is not known: RuntimeError: no")


def test_which_statistics_of_batch_normalisation_were_exported_is_said(tmp_path: Path) -> None:
    """Each of two processes has its own: the mean is exported, and the manifest says so."""
    task = f"{tasks.__file__}:Layered"
    words = ["train", task, "middle=BatchNorm1d", "--plan", "replicate=2,batchnorm=local", "--steps", "3"]
    done = subprocess.run(
        [sys.executable, "-m", "grappe", *words, "--run", "run"],
        cwd=tmp_path,
        check=False,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "out"
    words = ["export", str(tmp_path / "run"), "--to", str(out), "--format", "safetensors", "--task", task]
    app(words, exit_on_error=False, print_error=False)
    checkpoint = Run(tmp_path / "run").latest()
    assert checkpoint is not None
    tensors = checkpoint.read_tensors()
    own = [tensors.read(f"local.{number}.1.1.running_mean") for number in (0, 1)]
    assert not torch.equal(*own)
    assert torch.equal(weights.load_file(out / "model.safetensors")["1.1.running_mean"], agreed(own))
    assert '"buffers": "the mean over the processes\' own"' in (out / "manifest.json").read_text()
