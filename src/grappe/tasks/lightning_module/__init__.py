"""A LightningModule as a task: its own steps, optimizer, schedule and data, under any plan."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset, SequentialSampler

from grappe.data.prepare import once_at_a_time
from grappe.data.sampling import Sampling
from grappe.data.split import split as share_of
from grappe.errors import TaskError
from grappe.private_api.lightning import set_trainer
from grappe.private_api.torch import module_parameters
from grappe.task import Task
from grappe.tasks.lightning_module import unsupported
from grappe.tasks.lightning_module.steps import Column, EachEpoch, NoTrainer, Steps, defines
from grappe.tasks.lightning_module.unsupported import Refusals

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule
    from torch.optim import Optimizer

LOOP = "it is False: its training_step steps its optimizers itself; a loop of your own can be spread by grappe.Loop"
SCHEDULE = "_schedule_of_lightning"
LOADERS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}


class Source(NamedTuple):
    """The parts of a LightningModule's task."""

    module: LightningModule
    data: LightningDataModule | LightningModule
    logged: tuple[str, ...]
    """Names logged by validation_step that become metrics."""
    loss: str | None
    """The name under which validation_step logs its loss; None: validation_step returns the loss."""
    length: int
    """Number of training samples."""
    shuffle: bool = True
    """Whether the training loader shuffles."""
    held_out: float | None = None
    """The share of the training samples that validates, without a loader of its own."""


class _Samples(Dataset):
    """The user's dataset, unchanged: batches always use its loader's collate function."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        return self._dataset[index]


class Carried(Task):
    """A task whose parts are a LightningModule's."""

    source: ClassVar[Source]

    def model(self) -> Steps:
        steps = max(1, self.epochs * -(-self.source.length // self.batch_size))
        module = _fresh(self.source.module, NoTrainer(self.epochs, steps))
        return Steps(module, self.source.logged, self.source.loss)

    def prepare(self, folder: Path) -> None:
        if defines(self.source.data, "prepare_data"):
            self.source.data.prepare_data()

    def data(self, split: str, folder: Path) -> Dataset:
        share = self.source.held_out
        if share is None or split == "test":
            return _Samples(_loader(self.source.data, split).dataset)
        return share_of(_Samples(_loader(self.source.data, "train").dataset), split, validation=share)

    def sampling(self, dataset: Any) -> Sampling | None:
        return None if self.source.shuffle else Sampling(shuffle=False)

    def collate(self, samples: Sequence[Any]) -> Any:
        batch = _loader(self.source.data, "train").collate_fn(list(samples))
        marks = torch.zeros(len(samples))
        return (batch, marks), marks

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output if output.dim() == 1 else output[:, 0]

    def metrics(self) -> dict[str, Column]:
        return {name: Column(index) for index, name in enumerate(self.source.logged, start=1)}

    def optimizer(self, named_parameters: Any) -> Optimizer:
        """Makes the optimizer of configure_optimizers over the engine's parameters instead of the module's."""
        module = self.model().module
        given = {}
        for name, parameter in named_parameters:
            path, _, leaf = name.removeprefix("module.").rpartition(".")
            module_parameters(module.get_submodule(path))[leaf] = parameter
            given[id(parameter)] = parameter
        refusals = Refusals(type(module).__name__, ())
        found = unsupported.optimizers(module.configure_optimizers(), refusals)
        refusals.check()
        assert found is not None
        optimizer, schedule = found
        for (
            group
        ) in optimizer.param_groups:  # frozen ones, and second names of tied ones, are the engine's own
            group["params"] = [one for one in group["params"] if id(one) in given]
        vars(optimizer)[SCHEDULE] = schedule
        return optimizer

    def schedule(self, optimizer: Optimizer, total_steps: int) -> Any:
        found = vars(optimizer).get(SCHEDULE)
        if found is None or found["interval"] == "step":
            return found and found["scheduler"]
        return EachEpoch(found["scheduler"], total_steps // self.epochs)


def from_lightning(
    module: LightningModule,
    datamodule: LightningDataModule | None = None,
    *,
    epochs: int = 10,
    batch_size: int | None = None,
    seed: int = 0,
    clip: float | None = None,
    validation: float | None = None,
    without: Collection[str] = (),
) -> type[Task]:
    """A task class of a LightningModule with automatic optimization, and of its data.

    The task's initial weights are those of `module`. Evaluation reports the values that validation_step logs. Training
    samples are shuffled where the training loader shuffles.

    Args:
        datamodule: None: the module has the dataloaders itself.
        batch_size: samples per optimizer step over all processes; None: the training loader's.
        clip: the value of Trainer(gradient_clip_val=…).
        validation: the share of the training samples that validates, where there is no val_dataloader.
        without: names of unsupported features to leave out.

    Raises:
        TaskError: a feature is not supported; the message names all of them. Or `without` names none.
    """
    from lightning.pytorch import LightningDataModule, LightningModule

    name = type(module).__name__
    if not isinstance(module, LightningModule):
        raise TaskError(f"from_lightning({name}): give a LightningModule, of the package lightning")
    refusals = Refusals(name, without)
    if not module.automatic_optimization:
        refusals.add("automatic_optimization", LOOP)
    unsupported.overridden(module, LightningModule, refusals)
    if datamodule is not None:
        unsupported.overridden(datamodule, LightningDataModule, refusals)
    refusals.check()
    data = module if datamodule is None else datamodule
    if defines(data, "prepare_data"):
        with once_at_a_time():  # every process of a task's file comes here
            data.prepare_data()
    train = unsupported.loader(_given(data, "train"), LOADERS["train"], True, refusals)
    if validation is None:
        unsupported.loader(_given(data, "validation"), LOADERS["validation"], False, refusals)
    refusals.check()
    assert train is not None
    size = batch_size or train.batch_size or 1
    held = train.dataset if validation is None else share_of(train.dataset, "train", validation=validation)
    length = len(held)  # type: ignore[arg-type]
    steps = epochs * -(-length // size)
    copied = _fresh(module, NoTrainer(epochs, steps))
    unsupported.optimizers(copied.configure_optimizers(), refusals)
    logged, loss, left_out = _tried(copied, train, refusals, without)
    refusals.check()
    refusals.check_without(left_out)
    shuffle = not isinstance(train.sampler, SequentialSampler)
    source = Source(copy.deepcopy(module), data, logged, loss, length, shuffle, validation)
    return _task_class(name, source, epochs=epochs, batch_size=size, seed=seed, clip=clip)


def _task_class(name: str, source: Source, **defaults: Any) -> type[Task]:
    kinds = {"epochs": int, "batch_size": int, "seed": int, "clip": float | None}
    body = {"__annotations__": kinds, "source": source, "__doc__": f"{name}, made for Lightning.", **defaults}
    # As if it stood where from_lightning was called, as named tuples do: `grappe train FILE` finds it there.
    body["__module__"] = sys._getframe(2).f_globals.get("__name__", __name__)
    return type(f"{name}Task", (Carried,), body)


def _fresh(module: LightningModule, trainer: NoTrainer) -> Any:
    """Copies the module, ready to be used."""
    fresh: Any = copy.deepcopy(module)
    set_trainer(fresh, trainer)
    if defines(fresh, "setup"):
        fresh.setup("fit")
    if defines(fresh, "configure_model"):
        fresh.configure_model()
    return fresh


def _tried(
    module: Any, train: Any, refusals: Refusals, without: Collection[str]
) -> tuple[tuple[str, ...], str | None, tuple[str, ...]]:
    """Runs validation_step: its metrics' names, its loss's and those left out; refuses values that are no means."""
    length = len(train.dataset)
    samples = [train.dataset[index] for index in range(min(length, unsupported.ROWS))]
    plain = Steps(module).eval()
    loss, left_out = None, ()
    with torch.no_grad():
        if not defines(module, "validation_step"):
            names: list[str] = []
        else:
            plain._log.values = {}
            plain._reset_metrics()
            result = module.validation_step(train.collate_fn(samples), 0)
            names = [name for name in plain._log.values if name not in without]
            left_out = tuple(name for name in plain._log.values if name in without)
            if result is None:
                losses = [name for name in names if "loss" in name.lower()]
                if len(losses) != 1:
                    refusals.add("validation_step", "it neither returns its loss nor logs just one '…loss…'")
                    return (), None, left_out
                loss = losses[0]
                names.remove(loss)
        unsupported.mean_over_rows(
            Steps(module, names, loss).eval(), samples, train.collate_fn, names, refusals
        )
    return tuple(names), loss, left_out


def _given(data: Any, split: str) -> Any:
    """Returns the split's loader from the user's class."""
    if not defines(data, LOADERS[split]):
        share = ", or hold a share of the training samples out: from_lightning(…, validation=0.1)"
        raise TaskError(
            f"{type(data).__name__} has no {LOADERS[split]}(): a task needs its {split} data: write it"
            + (share if split == "validation" else "")
        )
    if defines(data, "setup"):
        data.setup("test" if split == "test" else "fit")
    return getattr(data, LOADERS[split])()


def _loader(data: Any, split: str) -> Any:
    found = _given(data, split)
    return found[0] if isinstance(found, list | tuple) else found
