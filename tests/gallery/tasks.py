"""The gallery's tasks by name, and the plain loops beside them."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

import grappe
from grappe import tasks
from grappe.data.draw import sample_keys
from grappe.data.order import SampleOrder
from grappe.data.rand_like import SampleIds, inside

FOLDER = Path(__file__).parents[2] / "examples" / "gallery"
NAMES = tuple(sorted(path.stem for path in FOLDER.iterdir() if path.suffix in (".py", ".ipynb")))


@functools.cache
def file(name: str) -> str:
    """A task's file; a notebook's cell with the task is written to one."""
    if (FOLDER / f"{name}.py").exists():
        return str(FOLDER / f"{name}.py")
    written = Path(tempfile.mkdtemp(prefix="grappe-gallery-")) / f"{name}.py"
    written.write_text("\n".join(cells(name)[:2]))
    return str(written)


def cells(name: str) -> list[str]:
    """The code cells of a notebook."""
    notebook = json.loads((FOLDER / f"{name}.ipynb").read_text())
    return ["".join(one["source"]) for one in notebook["cells"] if one["cell_type"] == "code"]


def task(name: str) -> grappe.Task:
    """A task of the gallery with its defaults."""
    return tasks.find(file(name))()


def lines(name: str) -> int:
    """The lines of a task's file, blank ones too; of a notebook those of the cell with the task."""
    if (FOLDER / f"{name}.py").exists():
        return len((FOLDER / f"{name}.py").read_text().splitlines())
    return sum(len(one.splitlines()) for one in cells(name)[:2])


def plain(name: str) -> ModuleType:
    """The plain loop that a task replaces, as a module."""
    spec = importlib.util.spec_from_file_location(f"plain_{name}", FOLDER / "plain" / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Batches:
    """A task's sample order and random numbers, for its plain loop."""

    def __init__(self, seed: int, length: int, batch_size: int) -> None:
        self._order = SampleOrder(seed=seed, length=length, batch_size=batch_size)
        self._keys = torch.zeros(0, dtype=torch.int64)

    def shuffled(self, epoch: int) -> Iterator[Tensor]:
        """Ids of each batch of an epoch."""
        for step in range(self._order.steps_per_epoch):
            ids = self._order.ids(epoch, step)
            self._keys = torch.from_numpy(sample_keys(self._order.seed, epoch, ids))
            with inside(SampleIds(self._order.seed, epoch, ids)):  # what grappe.rand_like draws then
                yield torch.from_numpy(ids)

    def rand(self, rows: int, numbers: int) -> Tensor:
        """Stands for torch.rand: the numbers that `augment` draws of the batch's keys."""
        assert rows == len(self._keys)
        return grappe.draw(self._keys, numbers)


def train_plain(name: str, steps: int) -> tuple[list[float], nn.Module]:
    """The losses of a plain loop's first steps, on a task's batches, and what is evaluated then."""
    by_hand, one = plain(name), task(name)
    torch.manual_seed(one.seed)
    net = by_hand.network()
    average = None if one.ema is None else by_hand.copy.deepcopy(net)
    batches = Batches(one.seed, len(one.data("train", Path())), one.batch_size)  # type: ignore[arg-type]
    offered = {
        "rand": batches.rand,
        "randn_like": grappe.randn_like,
        "rand_like": lambda like: grappe.rand_like(like, salt=1),
        "average": average,
    }
    wanted = inspect.signature(by_hand.train).parameters
    further: dict[str, Any] = {key: value for key, value in offered.items() if key in wanted}
    training = by_hand.train(net, batches.shuffled, one.epochs, **further)
    return [next(training) for _ in range(steps)], average or net
