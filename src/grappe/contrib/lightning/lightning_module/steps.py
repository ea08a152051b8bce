"""A LightningModule's own steps as a model's forward, without a Trainer: losses and logged values, row by row.

Shapes: B rows; K values that a step logs.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torchmetrics
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from grappe.errors import TaskError
from grappe.private_api.torchmetrics import default_states, last_batch_value, set_default_states


class NoTrainer:
    """The module's trainer: has the facts that are known before training, and refuses any other attribute by name."""

    def __init__(self, epochs: int, steps: int) -> None:
        self.max_epochs = epochs
        self.estimated_stepping_batches = steps

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copying and pickling ask for some
            raise AttributeError(name)
        raise TaskError(
            f"the LightningModule uses its trainer's {name}, which is not available, since there is no Trainer here: "
            "keep what it needs in the module, or train it as it is under Lightning's Trainer"
        )


class Logged:
    """Replacement of `self.log` and `self.log_dict` that keeps one step's values."""

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}

    def log(self, name: str, value: Any, *rest: Any, **options: Any) -> None:
        """Keeps a value."""
        self.values[name] = value

    def log_dict(self, dictionary: Mapping[str, Any], *rest: Any, **options: Any) -> None:
        """Keeps several values."""
        self.values.update(dictionary)

    def read(self, name: str, missing: float | None = None) -> Tensor:
        """Returns a value as a tensor; of a metric, its value for this batch alone.

        Args:
            missing: the value of a name that the step did not log; None: it must.

        Raises:
            TaskError: the step did not log the value, or the value is not one number.
        """
        if name not in self.values and missing is not None:
            return torch.tensor(missing)
        if name not in self.values:
            raise TaskError(
                f"a step logged '{name}' for some batches, and not for others: log it for each, or leave it out: "
                f"from_lightning(…, without=['{name}'])"
            )
        value = self.values[name]
        if isinstance(value, torchmetrics.Metric):
            # Called, it knows its last batch; updated, it has seen nothing else since it was reset.
            last = last_batch_value(value)
            value = last if last is not None else value.compute()
        value = torch.as_tensor(value)
        if value.numel() != 1:
            raise TaskError(
                f"a step logs '{name}' as {list(value.shape)}, and only one number is carried over: log its mean, or "
                f"leave it out: from_lightning(…, without=['{name}'])"
            )
        return value.detach().reshape(())


TRAINING, VALIDATION, TEST = "training_step", "validation_step", "test_step"


class Scoring(NamedTuple):
    """Values of a step that are kept."""

    step: str
    logged: tuple[str, ...]
    """Names of the K logged values, in the order of the task's metrics."""
    loss: str | None
    """The name under which the step logs its loss; None: it returns its loss."""


class Loaders:
    """Bare DataLoaders, as Trainer.fit takes them, in the form of a data module.

    Args:
        module: the LightningModule, whose own loaders stand in for those that are not given.
        train: the training loader.
        validation: the validation loader; None: the module's, if it has one.
        test: the test loader; None: the module's, if it has one.
    """

    def __init__(self, module: Any, train: Any, validation: Any = None, test: Any = None) -> None:
        for name in ("prepare_data", "setup", "val_dataloader", "test_dataloader"):
            if defines(module, name):
                setattr(self, name, getattr(module, name))
        self.train_dataloader = lambda: train
        if validation is not None:
            self.val_dataloader = lambda: validation
        if test is not None:
            self.test_dataloader = lambda: test

    def prepare_data(self) -> None:
        """Prepares nothing: the loaders have their data."""


class ModuleSteps(nn.Module):
    """The module's steps as forward: each gives the loss and the logged values.

    Args:
        scorings: by step. Without training_step's, its loss alone is kept; without validation_step's, training_step
            scores; without test_step's, rows that are marked 1 are scored as validation's are.
    """

    def __init__(self, module: Any, scorings: Mapping[str, Scoring] | None = None) -> None:
        super().__init__()
        self.module, self.scorings = module, scorings or {}
        self.logged = Logged()
        """Values that the last step logged."""
        module.log, module.log_dict = self.logged.log, self.logged.log_dict
        metrics = [metric for metric in module.modules() if isinstance(metric, torchmetrics.Metric)]
        for metric in metrics:
            metric.sync_on_compute = False
        # Their states are neither parameters nor buffers: nothing would fill them on another device.
        self._fresh = [(metric, copy.deepcopy(default_states(metric))) for metric in metrics]

    def forward(self, inputs: tuple[Any, Tensor]) -> Tensor:
        """Maps the batch and B marks, one per row, to [B, 1 + K], means in each row; NaN: not logged in training."""
        batch, marks = inputs
        step = TRAINING if self.training else TEST if TEST in self.scorings and bool(marks.any()) else VALIDATION
        loss, logged = self.step(batch, step)
        scoring, missing = self.scorings.get(step), torch.nan if self.training else None
        names = scoring.logged if scoring is not None else ()
        columns = torch.stack([loss, *[logged.read(name, missing).to(loss) for name in names]])
        return columns.expand(len(marks), -1)

    def step(self, batch: Any, step: str, *, index: int = 0) -> tuple[Tensor, Logged]:
        """Runs one of the module's steps; returns its loss, a scalar, and the logged values.

        Raises:
            TaskError: there is no loss, or the loss is not one number.
        """
        scoring = self.scorings.get(step)
        name = TRAINING if scoring is None else scoring.step
        result = self.run(batch, name, index)
        if scoring is not None and scoring.loss is not None:
            return self.logged.read(scoring.loss), self.logged
        loss = loss_in(result)
        if loss is None:
            raise TaskError(
                f"{type(self.module).__name__}.{name}() returned no loss that is one number: return the mean over the "
                "batch, for each batch"
            )
        return loss.reshape(()), self.logged

    def run(self, batch: Any, name: str, index: int = 0) -> Any:
        """Runs the module's step `name` with fresh metrics; returns what it returns."""
        self.logged.values = {}
        for metric, defaults in self._fresh:
            own = {
                name: value.to(metric.device) if isinstance(value, Tensor) else list(value)
                for name, value in defaults.items()
            }
            set_default_states(metric, own)
            metric.reset()
        step = getattr(self.module, name)
        return step(batch, index) if len(inspect.signature(step).parameters) > 1 else step(batch)


def loss_in(result: Any) -> Tensor | None:
    """Returns the loss in what a step returned; None if there is none that is one number."""
    loss = result.get("loss") if isinstance(result, Mapping) else result
    return loss if isinstance(loss, Tensor) and loss.numel() == 1 else None


def defines(module: Any, name: str) -> bool:
    """Returns whether the user's class overrides Lightning's `name`; of bare loaders, whether there is one."""
    if isinstance(module, Loaders):
        return name in vars(module)
    bases = [lightnings_class(module, base) for base in ("LightningModule", "LightningDataModule")]
    return any(base and getattr(type(module), name) is not getattr(base, name, None) for base in bases)


def lightnings_class(instance: Any, name: str) -> Any:
    """Returns the class `name` that `instance` derives from, of either of Lightning's packages; None: of neither."""
    packages = [sys.modules.get(package) for package in ("lightning.pytorch", "pytorch_lightning")]
    classes = [getattr(package, name, None) for package in packages]
    return next((kind for kind in classes if kind is not None and isinstance(instance, kind)), None)


class LoggedValue(torchmetrics.Metric):
    """The mean over rows of one column of the output [B, 1 + K].

    Args:
        partial: whether rows whose value is NaN do not count: their step did not log it.
    """

    total: Tensor
    rows: Tensor

    def __init__(self, index: int, *, partial: bool = False) -> None:
        super().__init__()
        self._index, self._partial = index, partial
        self.add_state("total", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("rows", default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        column = output[:, self._index].double()
        self.total += column.nansum() if self._partial else column.sum()
        self.rows += (~column.isnan()).sum() if self._partial else len(column)

    def compute(self) -> Tensor:
        return self.total / self.rows


class EachEpoch(LRScheduler):
    """A schedule of Lightning's interval "epoch", stepped each optimizer step: advances after every `steps`-th step."""

    def __init__(self, inner: LRScheduler, steps: int) -> None:
        self.optimizer, self.last_epoch = inner.optimizer, 0
        self._inner, self._steps = inner, steps

    def step(self, epoch: int | None = None) -> None:
        self.last_epoch += 1
        if self.last_epoch % self._steps == 0:
            self._inner.step()

    def get_last_lr(self) -> list[Any]:
        return self._inner.get_last_lr()
