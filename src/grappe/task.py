"""Defines Task: what is learned. A dataclass: its fields are hyperparameters, its methods are the parts."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, dataclass_transform

from grappe.errors import TaskError
from grappe.fields import check_choices

if TYPE_CHECKING:
    import torchmetrics
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset


SPLITS = ("train", "validation", "test")
Call = Callable[[Any, Any], Any]
"""A model and a batch of inputs to the model's output: `Task.forward`."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """What is learned; knows no rank and no device.

    A subclass becomes a frozen, keyword-only dataclass by itself: write fields, and override methods.
    Only `model`, `data`, `loss` and `optimizer` have no default.
    """

    epochs: int = 10
    batch_size: int = 256
    """Samples per optimizer step over the whole world, whatever the plan."""
    seed: int = 0
    clip: float | None = None
    """Bound on the gradient's global norm."""
    ema: float | None = None
    """Decay of a moving average of the weights, 0.999 say, which is then evaluated, loaded and exported."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _refuse_hidden_methods(cls)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise TaskError(f"{name}={value}: it must be a whole number, at least {least}")
        check_choices(self)
        if self.clip is not None and not self.clip > 0:
            raise TaskError(
                f"clip={self.clip}: it bounds the gradient's norm, so it must be above 0 (or none)"
            )

        if self.ema is not None and not 0 < self.ema < 1:
            raise TaskError(
                f"ema={self.ema}: the decay of an average is between 0 and 1, 0.999 say (or none)"
            )

    def prepare(self, folder: Path) -> None:
        """Downloads and unpacks what `data` needs: before it, by one process of each node at a time, under a lock."""

    def model(self) -> nn.Module:
        """The network, on the current default device, its weights drawn from torch's generator."""
        raise NotImplementedError

    def data(self, split: str, folder: Path) -> Dataset:
        """The samples of `split` ("train", "validation" or "test"): a map-style dataset.

        Samples are pairs (input, target), or of any form that `collate` makes batches of.
        """
        raise NotImplementedError

    def loss(self, output: Any, target: Any) -> Tensor:
        """One value per example, [B], or per token, [B, ...]; never their mean."""
        raise NotImplementedError

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """The optimizer over the trainable parameters, which come with their names."""
        raise NotImplementedError

    def counts(self, target: Any) -> Tensor | None:
        """What each value of `loss` counts, in its shape (0: an ignored token). None: every example the same."""
        return None

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """A learning-rate schedule, stepped once per optimizer step."""
        return None

    def metrics(self) -> Mapping[str, torchmetrics.Metric]:
        """What evaluation reports besides the loss; each is updated with (output, target)."""
        return {}

    def augment(self, inputs: Any, targets: Any, keys: Tensor) -> tuple[Any, Any]:
        """Random changes to a batch for training, on the device; `keys` [B] int64 feed `grappe.draw`.

        Written with a further argument `training`, it is called for evaluation and prediction too: a diffusion
        model's noise and times, say.
        """
        return inputs, targets

    def collate(self, samples: Sequence[Any]) -> Any:
        """Samples as the dataset gave them, of whatever form, to a batch (inputs, targets)."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def forward(self, model: Any, inputs: Any) -> Any:
        """The model's output for a batch of inputs: a dict becomes keywords, `model(**inputs)`.

        A pipeline calls it with the first unit in the model's place.
        """
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    def prediction(self, output: Any) -> Any:
        """What `grappe predict` gives, of the model's output for a batch; each tensor in it has a row a sample.

        A softmax, decoded text, a dict by name. It is cut by row, however it nests; a list of dicts is one a sample.
        """
        return output

    def units(self, model: Any) -> Sequence[nn.Module]:
        """The model's blocks in order: what is sharded, recomputed, compiled, cut into stages.

        For a pipeline they must be the whole model: called one after the other, each with what the one before
        returned, they give what the model gives.
        """
        return ()

    def cuts(self, stages: int) -> Sequence[int] | None:
        """The units that stages 2, 3, … of a pipeline of `stages` begin with, by number from 0.

        None: cut so that the counted work of the largest stage is smallest.
        """
        return None

    def tensor_plan(self, model: Any) -> Mapping[str, ParallelStyle]:
        """How modules, by name, are split over `tensor` processes."""
        return {}


def overrides(task: Task, method: str) -> bool:
    """Whether the task has its own `method` rather than Task's default."""
    return getattr(type(task), method) is not getattr(Task, method)


def fields(task: Task) -> dict[str, Any]:
    """The task's hyperparameters by name."""
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}


def parts() -> frozenset[str]:
    """The names of the methods that make a task."""
    return frozenset(
        name for name, value in vars(Task).items() if inspect.isfunction(value) and not name.startswith("_")
    )


def _refuse_hidden_methods(cls: type) -> None:
    for name in inspect.get_annotations(cls):
        if name in parts():
            raise TaskError(
                f"{cls.__name__}: the field '{name}' hides the method '{name}()': give it another name"
            )
