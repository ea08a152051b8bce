"""Samples of any form: what collate gives is a pair, and what it gives otherwise gets one message."""

import sys
from collections import UserDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from grappe import Task, draw
from grappe.data.collate import at_rows, collated, form, takes_training
from grappe.data.datasets import dataset_of
from grappe.data.loader import evaluation_loader, training_loader
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.training.watchers.console import sample_word
from tests.commands import ran
from tests.parity.structured import Boxes, Graphs, Texts
from tests.parity.tasks import Images

PLAN = Plan.parse("workers=0")
WORLD = World(process=ProcessRank(), device=torch.device("cpu"))


class Plain(Task):
    """Has the default collate."""


class Triples(Task):
    """Gives three things."""

    def collate(self, samples: Sequence[Any]) -> Any:
        return 1, 2, 3


@pytest.mark.parametrize(
    ("task", "sample", "words"),
    [
        (Plain(), (torch.ones(3),), r"samples of the form \(Tensor \[3\],\) do not show which part is input"),
        (Plain(), {"input_ids": [1, 2], "labels": 0}, r"\{'input_ids': \[int, int\], 'labels': int\} do not show"),
        (Plain(), torch.ones(3), r"the form Tensor \[3\] do not show"),
        (Plain(), Graphs().data("train", Path())[0], "Graph cannot be put together by themselves"),
        (Triples(), 0, r"Triples.collate\(\) gave \(int, int, int\): it must give a pair"),
    ],
)
def test_what_is_no_pair_gets_one_message(task: Task, sample: Any, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        collated(task, [sample, sample])


def test_arrays_that_torch_does_not_take_are_copied_and_masked_ones_are_refused() -> None:
    values = np.arange(4, dtype="f4")
    inputs, _ = collated(Plain(), [(values, 0), (values[::-1], 1), (values.astype(">f4"), 2)])
    assert inputs.tolist() == [[0, 1, 2, 3], [3, 2, 1, 0], [0, 1, 2, 3]]
    assert collated(Plain(), [(np.ma.masked_array(values), 0)] * 2)[0].tolist() == [[0, 1, 2, 3]] * 2
    with pytest.raises(TaskError, match="a masked array has values that are missing"):
        collated(Plain(), [(np.ma.masked_array(values), 0), (np.ma.masked_equal(values, 2), 0)])


def test_an_error_in_collate_names_the_users_line() -> None:
    class Wrong(Task):
        def collate(self, samples: Sequence[Any]) -> Any:
            return samples[0]["image"], 0

    with pytest.raises(TaskError, match=r"Wrong.collate\(\) failed: KeyError: 'image' .*test_collate.py, line"):
        collated(Wrong(), [{"picture": 1}])


@pytest.mark.parametrize("workers", [0, 1])
def test_a_workers_message_comes_without_its_traceback(workers: int) -> None:
    class Wrong(Graphs):
        def collate(self, samples: Sequence[Any]) -> Any:
            return None

    task = Wrong()
    loader = training_loader(task, task.data("train", Path()), Plan.parse(f"workers={workers}"), WORLD)
    with pytest.raises(TaskError) as caught:
        next(loader.batches(0, 1))
    said = str(caught.value)
    assert said.startswith("Wrong.collate() gave NoneType: it must give a pair, `return inputs, targets` (")
    assert "Traceback" not in said and "\n" not in said


@pytest.mark.parametrize("task", [Graphs(), Boxes(), Texts()], ids=lambda task: type(task).__name__)
def test_the_loader_counts_samples_not_nodes(task: Task) -> None:
    dataset = task.data("train", Path())
    loader = training_loader(task, dataset, PLAN, WORLD)
    batches = list(loader.batches(0, loader.order.steps_per_epoch))
    assert [batch.microbatches[0].size for batch in batches] == [12, 12, 12, 12, 12, 4]
    assert sample_word(dataset) == "samples"
    loader.example()


def test_forms_are_short() -> None:
    assert form([{"a": torch.ones(2, 3), "b": ("x", 1.5)}]) == "[{'a': Tensor [2, 3], 'b': (…)}]"
    assert form(tuple(range(9))) == "(int, int, int, int, …)"


class Noised(Graphs):
    """Noise for evaluation too."""

    batch_size: int = 8

    def data(self, split: str, folder: Path) -> Dataset:
        return torch.utils.data.TensorDataset(torch.zeros(20, 3), torch.zeros(20))

    def collate(self, samples: Sequence[Any]) -> Any:
        return Task.collate(self, samples)

    def augment(self, inputs: Any, targets: Any, keys: torch.Tensor, training: bool) -> Any:  # pyrefly: ignore
        noise = draw(keys, 3)
        return (inputs + noise, torch.full((len(keys),), training)), targets


def test_augment_that_takes_training_is_called_in_evaluation() -> None:
    task = Noised()
    assert takes_training(task) and not takes_training(Plain())
    loader = evaluation_loader(task, task.data("validation", Path()), PLAN, WORLD)
    first, again = (next(loader.batches(0, 1)).microbatches[0].inputs for _ in range(2))
    assert first[0].any() and torch.equal(first[0], again[0]) and not first[1].any()
    training = next(training_loader(task, task.data("train", Path()), PLAN, WORLD).batches(0, 1))
    assert training.microbatches[0].inputs[1].all()
    noised = loader.example()[0]
    assert torch.equal(noised, first[0][: len(noised)])


class Doubled(Images):
    """Samples in memory, and a collate of its own."""

    def collate(self, samples: Sequence[Any]) -> Any:
        inputs, targets = torch.utils.data.default_collate(samples)
        return inputs, torch.stack([targets, 2 * targets], 1)


@pytest.mark.parametrize("kind", ["Arrays", "TensorDataset"])
def test_a_tasks_own_collate_gets_samples_in_memory_too(kind: str, tmp_path: Path) -> None:
    class Held(Doubled):
        def data(self, split: str, folder: Path) -> Any:
            arrays = super().data(split, folder)
            return arrays if kind == "Arrays" else TensorDataset(arrays.inputs, arrays.targets)

    task = Held()
    dataset = dataset_of(task, "train", tmp_path)
    [first, *_] = training_loader(task, dataset, PLAN, WORLD).batches(0, 2)
    targets = first.microbatches[0].targets
    assert targets.shape == (12, 2) and torch.equal(targets[:, 1], 2 * targets[:, 0])


TF32 = """
import torch
from grappe.data.collate import _in_full_precision
matmul = torch.backends.cuda.matmul
matmul.{name} = {allowed!r}
with torch.autocast("cpu"):
    with _in_full_precision(torch.device("cpu")):
        inside = matmul.{name}
print(inside, matmul.{name})
"""


@pytest.mark.parametrize(
    ("name", "allowed", "seen"), [("allow_tf32", True, "False True"), ("fp32_precision", "tf32", "ieee tf32")]
)
def test_tf32_is_off_by_the_name_that_the_task_has_set(name: str, allowed: object, seen: str, tmp_path: Path) -> None:
    if name == "fp32_precision" and not hasattr(torch.backends.cuda.matmul, name):
        pytest.skip("this torch has no torch.backends.cuda.matmul.fp32_precision")
    (tmp_path / "tf32.py").write_text(TF32.format(name=name, allowed=allowed))
    done = ran(sys.executable, "tf32.py", cwd=tmp_path)
    assert done.stdout.strip() == seen, done.stderr


class Pair(NamedTuple):
    first: torch.Tensor
    second: torch.Tensor


class Fields(UserDict[str, torch.Tensor]):
    """Output of a tokenizer, whose fields are attributes, too."""

    def __getattr__(self, name: str) -> torch.Tensor:
        return self.data[name]


def test_rows_keep_the_batchs_type() -> None:
    numbers = torch.arange(4)
    pair = at_rows(Pair(numbers, numbers * 10), [1, 3], 4)
    assert [pair.first.tolist(), pair.second.tolist()] == [[1, 3], [10, 30]]
    fields = at_rows(Fields(ids=numbers), [2], 4)
    assert fields.ids.tolist() == [2]
    assert type(fields) is Fields
