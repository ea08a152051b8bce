"""Streams without a training: how their place is found again, and what is refused or called not repeatable."""

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from grappe.data import Stream
from grappe.data.datasets import dataset_of, training_order
from grappe.data.loader import training_loader
from grappe.data.stream import repeatable_head
from grappe.errors import DataError, TaskError
from grappe.plan import Plan
from tests.data.test_loader import Plain, world


class Counting(IterableDataset):
    """Numbers from a place on; `state` is what is in its state_dict."""

    def __init__(self, state: Callable[[int], Any] = lambda place: place, first: int = 0) -> None:
        self.state, self.first, self.place = state, first, 0

    def __iter__(self) -> Iterator[tuple]:
        for place in range(self.place, 1000):
            self.place = place
            yield torch.tensor([float(self.first + place)]), place
        self.place = 0

    def state_dict(self) -> dict:
        return {"place": self.state(self.place)}

    def load_state_dict(self, state: dict) -> None:
        self.place = state["place"] + 1 if state["place"] else 0


def inputs(stream: Stream, start: int, stop: int, saved: Any = None, workers: int = 0) -> tuple[list[float], Any, Any]:
    """Reads steps of 4 samples; what came, the place after them, and what the user is told."""
    stream.samples = 1000
    loader = training_loader(Plain(batch_size=4), stream, Plan(workers=workers), world(0, 1))
    loader.begin_stream(start, saved)
    read = [value for batch in loader.batches(start, stop) for value in batch.microbatches[0].inputs.flatten().tolist()]
    loader.stream.close()
    return read, json.loads(json.dumps(loader.stream.position(stop))), loader.notes


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (lambda place: place, "by its own state"),
        (lambda place: place and place + 5, "by skipping: 12 samples"),  # a state that is of another place
        (lambda place: (place, 1), "by skipping: 12 samples"),  # JSON would make it a list
        (torch.tensor, "by skipping: 12 samples"),
    ],
)
def test_a_stream_goes_on_by_its_state_or_by_skipping(state: Callable[[int], Any], words: str) -> None:
    first, place, notes = inputs(Stream(Counting(state)), 0, 3, workers=1)
    assert first == list(range(12))
    assert notes == ["the training data is a stream: process 0 reads it"]
    rest, _, notes = inputs(Stream(Counting(state)), 3, 4, place)
    assert rest == [12, 13, 14, 15]
    assert words in notes[1]


class Epochs(IterableDataset):
    """Six numbers, others in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple]:
        return ((torch.tensor([10.0 * self.epoch + place]), place) for place in range(6))


@pytest.mark.parametrize("step", [1, 2, 3, 4, 5])
def test_a_stream_goes_on_in_the_turn_that_it_was_in(step: int) -> None:
    first, place, _ = inputs(Stream(Epochs()), 0, step)
    rest, _, notes = inputs(Stream(Epochs()), step, 6, place)
    assert first + rest == [10.0 * turn + number for turn in range(4) for number in range(6)]
    assert "not repeatable" not in notes[1]


def test_a_stream_that_has_changed_is_called_not_repeatable() -> None:
    _, place, _ = inputs(Stream(Counting()), 0, 3)
    _, _, notes = inputs(Stream(Counting(first=100)), 3, 4, place)
    assert "gives other samples than before: its order is not repeatable" in notes[1]


def test_a_stream_said_not_to_be_repeatable_goes_on_with_what_comes() -> None:
    numbers = ((torch.tensor([float(i)]), i) for i in itertools.count())
    first, place, notes = inputs(Stream(numbers, repeatable=False), 0, 3)
    assert first == list(range(12))
    assert "its order is not repeatable: another training sees other samples" in notes[0]
    rest, _, notes = inputs(Stream(numbers, repeatable=False), 3, 4, place)
    assert rest == [12, 13, 14, 15]
    assert "resumed with what it gives now" in notes[1]


def test_draws_in_a_stream_depend_on_their_place() -> None:
    def drawn() -> Iterator[tuple]:
        while True:
            yield torch.rand(1), random.random()

    first = inputs(Stream(drawn()), 0, 4)
    again = inputs(Stream(drawn()), 3, 4, inputs(Stream(drawn()), 0, 3)[1])
    assert first[0][12:] == again[0]


def test_a_generator_that_ends_is_one_message() -> None:
    with pytest.raises(DataError, match="has ended, and gives nothing when it is iterated again"):
        inputs(Stream((torch.ones(1), 0) for _ in range(6)), 0, 2)


def test_verify_calls_a_stream_not_repeatable() -> None:
    assert repeatable_head(lambda: Stream(Counting()), 3)[2][1] == 2
    numbers = itertools.count()
    for make in (lambda: Stream((next(numbers), 0) for _ in range(9)), lambda: Stream(Counting(), repeatable=False)):
        with pytest.raises(TaskError, match="is not repeatable: two trainings see other samples"):
            repeatable_head(make, 3)


class Streamed(Plain):
    def data(self, split: str, folder: Path) -> object:
        return Counting()


def test_a_training_on_a_stream_needs_its_length_and_an_evaluation_a_list(tmp_path: Path) -> None:
    stream = dataset_of(Streamed(), "train", tmp_path)
    with pytest.raises(TaskError, match="a stream of unknown length: say how long to train, --steps N"):
        training_order(Streamed(), stream)
    with pytest.raises(TaskError, match=r"list\(itertools.islice\(stream, 1000\)\)"):
        dataset_of(Streamed(), "validation", tmp_path)
