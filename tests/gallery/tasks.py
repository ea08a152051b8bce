"""The gallery's tasks, and their plain loops trained on the same batches."""

import atexit
import functools
import inspect
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.gallery_files import file, plain
from torch import Tensor, nn

import grappe
from grappe import finder
from grappe.data.batch import SampleIds, inside
from grappe.data.datasets import training_order
from grappe.data.draw import sample_keys
from grappe.data.sampling import SampleOrder
from grappe.step.fast_paths import seed_dropout


def task(name: str) -> grappe.Task:
    """A task of the gallery with its defaults."""
    return finder.find(file(name))()


@functools.cache
def folder(name: str) -> Path:
    """A folder with what a task of the gallery prepares, if it does."""
    place = Path(tempfile.mkdtemp(prefix=f"grappe-{name}-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    task(name).prepare(place)
    return place


class Batches:
    """A task's sample order and random numbers, for its plain loop."""

    def __init__(self, order: SampleOrder) -> None:
        self._order = order
        self._keys = torch.zeros(0, dtype=torch.int64)

    def shuffled(self, epoch: int) -> Iterator[Tensor]:
        """Ids of each batch of an epoch."""
        for step in range(self._order.steps_per_epoch):
            ids = self._order.ids(epoch, step)
            seed_dropout(self._order.seed, epoch * self._order.steps_per_epoch + step, torch.device("cpu"), 0)
            self._keys = torch.from_numpy(sample_keys(self._order.seed, epoch, ids))
            with inside(SampleIds(self._order.seed, epoch, ids)):  # what grappe.rand_like draws then
                yield torch.from_numpy(ids)

    def rand(self, rows: int, numbers: int) -> Tensor:
        """Stands for torch.rand: the numbers that `augment` draws of the batch's keys."""
        assert rows == len(self._keys)
        return grappe.draw(self._keys, numbers)


def pieces(sample: tuple[dict[str, Tensor], Tensor]) -> list[list[int]]:
    """Returns the pieces of documents of a packed sample, each with the token that its last one predicts."""
    inputs, target = sample
    parts = [inputs["documents"] == number for number in range(1, int(inputs["documents"].max()) + 1)]
    return [[*inputs["input_ids"][part].tolist(), int(target[part][-1])] for part in parts]


def train_plain(name: str, steps: int) -> tuple[list[float], nn.Module]:
    """The losses of a plain loop's first steps, on a task's batches, and what is evaluated then."""
    by_hand, one = plain(name), task(name)
    torch.manual_seed(one.seed)
    net = by_hand.network()
    average = None if one.ema is None else by_hand.copy.deepcopy(net)
    dataset = one.data("train", folder(name))
    batches = Batches(training_order(one, dataset))
    offered = {
        "rand": batches.rand,
        "randn_like": grappe.randn_like,
        "rand_like": lambda like: grappe.rand_like(like, salt=1),
        "average": average,
        "packs": [pieces(dataset[place]) for place in range(len(dataset))] if hasattr(dataset, "sources") else None,
    }
    wanted = inspect.signature(by_hand.train).parameters
    further: dict[str, Any] = {key: value for key, value in offered.items() if key in wanted}
    training = by_hand.train(net, batches.shuffled, one.epochs, **further)
    return [next(training) for _ in range(steps)], average or net
