"""grappe predict: what a model gives is shown, whatever kind of tensor it is; what is none is said."""

import functools
import json
import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from grappe.checkpoint.foreign_training import Begin
from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.initial import build
from grappe.errors import DataError, GrappeError, TaskError, UsageError
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.training.run import Run
from grappe.training.short_run import short_run
from grappe.training.task_reference import TaskReference
from grappe.verbs.evaluate import checkpoint_scores
from grappe.verbs.load import load
from grappe.verbs.predict import predict as verb
from grappe.verbs.predict.predict import as_json, rows, save
from tests.parity.tasks import Images
from tests.processes import Pool
from tests.training.test_training import train

GIVES: dict[str, Callable[[torch.Tensor], Any]] = {}


class Giving(nn.Module):
    """A model with a weight, whose output is what `GIVES` makes of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 8 * 8, 5)

    def forward(self, x: torch.Tensor) -> Any:
        found = self.layer(x.flatten(1).float())
        return GIVES["now"](found) if "now" in GIVES else found


class Outputs(Images):
    """Whatever the model gives."""

    def model(self) -> nn.Module:
        return Giving()

    def units(self, model: nn.Module) -> list[nn.Module]:
        return [model.layer]  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    GIVES.clear()
    return Run(train(tmp_path_factory.mktemp("predict") / "run", Outputs(epochs=1), steps=1).run)


@pytest.fixture
def lines(run: Run, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    def read(inputs: Any, gives: Callable[[torch.Tensor], Any] | None = None) -> list[dict[str, Any]]:
        if gives is not None:
            monkeypatch.setitem(GIVES, "now", gives)
        found = [verb.as_json(one) for one in verb.predict(run, inputs, task=Outputs(), data=run.folder)]
        return [json.loads(json.dumps(one, allow_nan=False)) for one in found]

    return read


ARRAY = np.random.default_rng(0).normal(size=(3, 3, 8, 8))


def test_gradients_are_on_between_predictions(run: Run) -> None:
    found = verb.predict(run, ARRAY, task=Outputs(), data=run.folder)
    next(found)
    assert torch.is_grad_enabled()


@pytest.mark.parametrize("kind", [">f4", "<f4", ">f8", "f2", "g", ">i4", "u1", "?", ">u2", "u4", "u8", "i8"])
@pytest.mark.parametrize("in_file", [False, True])
def test_arrays_of_any_numbers(lines, tmp_path: Path, kind: str, in_file: bool) -> None:
    array = (ARRAY * 9).astype(kind)
    if in_file:
        np.save(tmp_path / "a.npy", array)
    expected = lines(torch.as_tensor(array.astype(np.float32)))
    found = lines(tmp_path / "a.npy" if in_file else array)
    assert [np.argmax(one["output"]) for one in found] == [np.argmax(one["output"]) for one in expected]


def test_fortran_order_and_odd_strides(lines) -> None:
    assert lines(np.asfortranarray(ARRAY)) == lines(ARRAY) == lines(ARRAY[::-1])[::-1]


@pytest.mark.parametrize(
    ("gives", "first"),
    [
        (lambda x: x.argmax(1), None),
        (lambda x: x.long(), None),
        (lambda x: x > 0, None),
        (lambda x: x.bfloat16(), None),
        (lambda x: x.half(), None),
        (lambda x: x.to(torch.complex64), None),
        (lambda x: x * float("nan"), {"output": [None] * 5}),
        (lambda x: x[:, 0] * float("inf"), {"output": None}),
        (lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8), None),
        (lambda x: x[:, :0], {"output": []}),
        (lambda x: x[:, None], None),
    ],
    ids=["classes", "long", "bool", "bf16", "fp16", "complex", "nan", "inf", "quantized", "empty", "nested"],
)  # fmt: skip
def test_tensors_of_any_kind_are_shown(lines, run: Run, tmp_path: Path, gives, first) -> None:
    found = lines(ARRAY, gives)
    assert len(found) == 3
    if first is not None:
        assert found[0] == first
    save(tmp_path / "out.npy", verb.predict(run, ARRAY, task=Outputs()))
    assert len(np.load(tmp_path / "out.npy")) == 3


@pytest.mark.parametrize(
    ("gives", "words"),
    [
        (lambda x: x.to_sparse(), "nested or sparse tensor"),
        (lambda x: object(), "cannot be written as JSON"),
        (lambda x: x[:2], r"has \[2, 5\], no row for each of 3 samples"),
    ],
)
def test_what_is_no_tensor_of_outputs_is_said(lines, gives, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        lines(ARRAY, gives)


def test_nothing_to_predict(lines, run: Run, tmp_path: Path) -> None:
    assert lines(ARRAY[:0]) == []
    with pytest.raises(DataError, match="there is no sample"):
        save(tmp_path / "out.npy", verb.predict(run, ARRAY[:0], task=Outputs()))


@pytest.mark.parametrize("content", [b"", b"\x93NUMPY", b"\x93NUMPY\x01\x00\xff\xff", b"PK\x03\x04", b"\x80\x04."])
def test_files_that_are_no_arrays(lines, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.npy").write_bytes(content)
    with pytest.raises(DataError, match=r"a\.npy"):
        lines(tmp_path / "a.npy")


@pytest.mark.parametrize(
    "header",
    [
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 1099511627776)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (1073741824, 3, 8, 8)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (-1,)}",
        "{'descr': '<f4', 'fortran_order': False, 'shape': ()}",
        "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
        "{'descr': '<M8[D]', 'fortran_order': False, 'shape': (1,)}",
        "(" * 3000,
        "__import__('os').mkdir('ran')",
        "{'descr': '<f" + "9" * 5000 + "', 'fortran_order': False, 'shape': (1,)}",
    ],
)
def test_headers_that_lie(lines, tmp_path: Path, header: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = header.encode() + b"\n"
    (tmp_path / "a.npy").write_bytes(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + bytes(64))
    with pytest.raises(DataError, match=r"a\.npy"):
        lines(tmp_path / "a.npy")
    assert not (tmp_path / "ran").exists()


def test_a_pipe_is_not_waited_for(lines, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.npy")
    with pytest.raises(DataError, match="is not a file"):
        lines(tmp_path / "a.npy")


A, B = torch.arange(6.0).view(3, 2), torch.arange(3)


@pytest.mark.parametrize(
    ("output", "count", "last"),
    [
        (A, 3, {"output": [4.0, 5.0]}),
        (B, 3, {"output": 2}),
        ((A, B), 3, {"output": [[4.0, 5.0], 2]}),
        ((A[:2], B[:2]), 2, {"output": [[2.0, 3.0], 1]}),  # as many as there are samples, and yet columns
        ([A[:2], B[:2]], 2, {"output": [[2.0, 3.0], 1]}),
        ({"logits": A, "hidden": (A, None)}, 3, {"logits": [4.0, 5.0], "hidden": [[4.0, 5.0], None]}),
        (OrderedDict(loss=torch.tensor(1.5), logits=B), 3, {"loss": 1.5, "logits": 2}),
        ([{"boxes": torch.ones(n, 4)} for n in (1, 0, 2)], 3, {"boxes": [[1.0] * 4] * 2}),
        ({"text": ["a", "b", "c"], "score": B}, 3, {"text": "c", "score": 2}),
        (["a", "b", "c"], 3, {"output": "c"}),
    ],
)
def test_a_row_each(output: Any, count: int, last: dict[str, Any]) -> None:
    found = list(rows(output, count, "Mine"))
    assert len(found) == count
    assert json.loads(json.dumps(as_json(found[-1]))) == last


def test_what_has_no_row_each_is_refused() -> None:
    with pytest.raises(TaskError, match=r"Mine's model has \[6\], no row for each of 3 samples: give Mine a pred"):
        list(rows({"a": A, "b": torch.ones(6)}, 3, "Mine"))
    with pytest.raises(TaskError, match="a prediction is a object"):
        as_json(object())


def test_what_makes_no_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"predictions have a, b: give a file that ends in .npz"):
        save(tmp_path / "two.npy", rows({"a": A, "b": B}, 3, "Mine"))
    with pytest.raises(UsageError, match="several forms or shapes"):
        save(tmp_path / "x.npy", rows([torch.ones(n) for n in (1, 2)], 2, "Mine"))


def test_a_tensor_without_numbers_is_said() -> None:
    with pytest.raises(TaskError, match="a tensor on the device meta"):
        as_json({"score": torch.ones(2, device="meta")})


def computed(process: ProcessRank, rendezvous_folder: Path, work: Any) -> list[Any]:
    return work(process, rendezvous_folder)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "replicate=2,shard=2", "shard=2,zero=2"])
@pytest.mark.parametrize("samples", [3, 600])
def test_several_processes_predict_what_one_does(pool: Pool, run: Run, plan: str, samples: int) -> None:
    """To the bit, each sample once, in order; in one batch, and in three of 256, 256 and 88."""
    inputs = np.random.default_rng(0).normal(size=(samples, 3, 8, 8)).astype("float32")
    wanted = list(verb.predict(run, inputs, task=Outputs(), data=run.folder))
    parts = Plan.parse(f"{plan},threads=1,device=cpu")
    reference = TaskReference.of(Outputs(), {})
    work = functools.partial(verb.worker, run, reference, parts, inputs, run.folder, 1, False)
    first, *others = pool.run("tests.verbs.predict.test_predict:computed", parts.processes, work)
    found = [row for output, count in first for row in rows(output, count, "Outputs")]
    assert torch.equal(torch.stack(found), torch.stack(wanted)) and len(found) == samples
    assert not any(others)


@pytest.mark.parametrize(
    ("plan", "inputs", "words"),
    [
        ("pipeline=2", ARRAY, "has no pipeline= in its plan"),
        ("replicate=2,microbatches=2", ARRAY, "has no microbatches= in its plan, but backend, cut, device, domain"),
        ("engine=deepspeed,replicate=2", ARRAY, "has no engine="),
        ("replicate=2", "-", "lines on the standard input go to one process"),
    ],
)
def test_other_plans_are_refused(run: Run, plan: str, inputs: Any, words: str) -> None:
    with pytest.raises(GrappeError, match=words):
        list(verb.predict(run, inputs, plan, task=Outputs(), data=run.folder))


def test_a_model_in_float64_keeps_each_bit_where_a_plan_says_so(pool: Pool, tmp_path: Path) -> None:
    """Compares what evaluate, predict and load make of a training in float64, and of another one with its weights."""
    task, plan = Images(epochs=1), Plan.parse("precision=fp64,threads=1,device=cpu")
    run = Run(train(tmp_path / "run", task, str(plan)).run)
    last = list(run.records("evaluation"))[-1]
    reference, data = TaskReference.of(task, {}), run.folder
    scores = functools.partial(checkpoint_scores, data, last["step"], "validation", False, "fp32")

    def pooled(function: str, work: Any, _: Plan) -> Any:
        return pool.run("tests.parity.planted:planted", 1, function, work, "")[0]

    assert short_run(scores, reference, plan, data, run=pooled).loss == last["loss"]

    images = np.random.default_rng(0).normal(size=(3, 3, 8, 8))
    work = functools.partial(verb.worker, run, reference, plan, images, data, last["step"], False)
    [(found, count)] = pool.run("tests.verbs.predict.test_predict:computed", 1, work)[0]
    with torch.no_grad():
        wanted = load(run, task, precision="fp64")(torch.from_numpy(images))
    assert count == 3 and found.dtype == torch.float64 and torch.equal(found, wanted)
    rounded = torch.stack(list(verb.predict(run, images, task=task, data=data)))
    assert rounded.dtype == torch.float32 and 0 < (rounded - found).abs().max() < 1e-5

    other = tmp_path / "other"
    build(task, other / "checkpoints", Begin(source=data), kind=torch.float64)
    weights = load(run, task, precision="fp64").state_dict()
    taken = list_checkpoints(other / "checkpoints")[0].read_model()
    assert all(torch.equal(taken.read(name), weight) for name, weight in weights.items())
