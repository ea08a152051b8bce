"""A LightningModule as a task: its own steps, optimizer, schedule and data, under any plan."""

from __future__ import annotations

import copy
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader, Dataset, SequentialSampler

from grappe.contrib.lightning.lightning_module import unsupported
from grappe.contrib.lightning.lightning_module.steps import (
    TRAINING,
    VALIDATION,
    EachEpoch,
    Loaders,
    LoggedValue,
    ModuleSteps,
    NoTrainer,
    defines,
    lightnings_class,
)
from grappe.contrib.lightning.lightning_module.unsupported import Refusals, Tried
from grappe.data.datasets import once_at_a_time
from grappe.data.datasets import split as share_of
from grappe.data.sampling import Sampling
from grappe.errors import TaskError
from grappe.private_api.lightning import set_trainer
from grappe.private_api.torch import module_parameters
from grappe.task import Task

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule, LightningModule
    from torch.optim import Optimizer

LOOP = "it is False: its training_step steps its optimizers itself; a loop of your own can be spread by grappe.Loop"
SCHEDULE = "_schedule_of_lightning"
SCORED = 0.1
"""Share of the training samples that is scored where there is no validation data."""
LOADERS = {"train": "train_dataloader", "validation": "val_dataloader", "test": "test_dataloader"}


class LightningSource(NamedTuple):
    """The parts of a LightningModule's task."""

    module: LightningModule
    data: LightningDataModule | LightningModule | Loaders
    tried: Tried
    length: int
    """Number of training samples."""
    shuffle: bool = True
    """Whether the training loader shuffles."""
    held_out: float | None = None
    """The share of the training samples that validates, without a loader of its own."""
    validates: bool = True
    """Whether there is validation data; without, a share of the training samples is scored, which are trained on."""
    without: Collection[str] = ()
    """Names of the features that are left out."""


class _Samples(Dataset):
    """The user's dataset, unchanged: batches always use its loader's collate function."""

    def __init__(self, dataset: Any, *, test: bool = False) -> None:
        self._dataset, self._test = dataset, test

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        sample = self._dataset[index]
        return _Tested(sample) if self._test else sample


class _Tested(NamedTuple):
    """A sample of the test data."""

    sample: Any


class Carried(Task):
    """A task whose parts are a LightningModule's."""

    source: ClassVar[LightningSource]

    def model(self) -> ModuleSteps:
        steps = max(1, self.epochs * -(-self.source.length // self.batch_size))
        module = _fresh(self.source.module, NoTrainer(self.epochs, steps))
        return ModuleSteps(module, self.source.tried.scorings)

    @property
    def validated_on(self) -> str:
        return "validation" if self.source.validates else "train"

    def notes(self) -> Sequence[str]:
        notes = []
        if not self.source.validates:
            notes.append(
                "there is no validation loader: the validation scores are those of a tenth of the "
                "training samples, which are also trained on; hold out a share: from_lightning(…, validation=0.1)"
            )
        if unkept := self.source.tried.unkept:
            notes.append(f"training_step logs {', '.join(unkept)}: not kept")
        return notes

    def prepare(self, folder: Path) -> None:
        if defines(self.source.data, "prepare_data"):
            self.source.data.prepare_data()

    def data(self, split: str, folder: Path) -> Dataset:
        share = self.source.held_out
        if split == "test" or (share is None and self.source.validates):
            return _Samples(_loader(self.source.data, split).dataset, test=split == "test")
        samples = _Samples(_loader(self.source.data, "train").dataset)
        if share is None and split == "train":
            return samples
        return share_of(samples, split, validation=share or SCORED)

    def sampling(self, dataset: Any) -> Sampling | None:
        return None if self.source.shuffle else Sampling(shuffle=False)

    def collate(self, samples: Sequence[Any]) -> Any:
        tested = isinstance(samples[0], _Tested)
        plain = [marked.sample for marked in samples] if tested else list(samples)
        batch = _loader(self.source.data, "train").collate_fn(plain)
        marks = torch.full((len(samples),), float(tested))
        return (batch, marks), marks

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return output[:, 0]

    def metrics(self) -> dict[str, LoggedValue]:
        validation = self.source.tried.scorings.get(VALIDATION)
        names = validation.logged if validation is not None else ()
        return {name: LoggedValue(index) for index, name in enumerate(names, start=1)}

    def training_metrics(self) -> dict[str, LoggedValue]:
        names = self.source.tried.scorings[TRAINING].logged
        shown = [unsupported.SPLIT.sub("", name).lstrip("_/") for name in names]
        shown = shown if len(set(shown)) == len(shown) else list(names)
        return {name: LoggedValue(index, partial=True) for index, name in enumerate(shown, start=1)}

    def optimizer(self, named_parameters: Any) -> Optimizer:
        """Makes the optimizer of configure_optimizers over the engine's parameters instead of the module's."""
        module = self.model().module
        passed = {}
        for name, parameter in named_parameters:
            path, _, leaf = name.removeprefix("module.").rpartition(".")
            module_parameters(module.get_submodule(path))[leaf] = parameter
            passed[id(parameter)] = parameter
        # from_lightning has refused what is not carried over, or was told to leave it out.
        supported = unsupported.optimizers(
            module.configure_optimizers(), Refusals(type(module).__name__, self.source.without)
        )
        assert supported is not None
        optimizer, schedule = supported
        # Frozen parameters, and second names of tied ones, are the engine's own.
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if id(parameter) in passed]
        vars(optimizer)[SCHEDULE] = schedule
        return optimizer

    def schedule(self, optimizer: Optimizer, total_steps: int) -> Any:
        schedule = vars(optimizer).get(SCHEDULE)
        plateau = schedule is not None and isinstance(schedule["scheduler"], ReduceLROnPlateau)
        if schedule is None or plateau or schedule["interval"] == "step":
            return schedule and schedule["scheduler"]
        return EachEpoch(schedule["scheduler"], total_steps // self.epochs)


def from_lightning(
    module: LightningModule,
    datamodule: LightningDataModule | DataLoader | Sequence[DataLoader] | None = None,
    *loaders: DataLoader,
    epochs: int = 10,
    batch_size: int | None = None,
    seed: int = 0,
    clip: float | None = None,
    validation: float | None = None,
    without: Collection[str] = (),
) -> type[Task]:
    """A task class of a LightningModule with automatic optimization, and of its data.

    The task's initial weights are `module`'s. Evaluation reports the values that validation_step logs. Training
    samples are shuffled where the training loader shuffles.

    Args:
        datamodule: a LightningDataModule; or the training loader as `Trainer.fit` takes it, or (training, validation)
            or (training, validation, test) loaders. None, or for a loader that is not given: the module's own.
        loaders: the validation and the test loader, after the training loader.
        batch_size: samples per optimizer step over all processes; None: the training loader's.
        clip: the value of Trainer(gradient_clip_val=…).
        validation: the share of the training samples that validates, where there is no val_dataloader. Without both,
            all are trained on, and a tenth of them is scored, too.
        without: names of unsupported features to leave out.

    Raises:
        TaskError: a feature is not supported; the message names all of them. Or `without` names none.
    """
    name = type(module).__name__
    base = lightnings_class(module, "LightningModule")
    if base is None:
        raise TaskError(f"from_lightning({name}): give a LightningModule, of the package lightning")
    refusals = Refusals(name, without)
    if not module.automatic_optimization:
        refusals.add("automatic_optimization", LOOP, needed=True)
    unsupported.overridden(module, base, refusals)
    bare = (datamodule, *loaders) if isinstance(datamodule, DataLoader) else datamodule
    if (loaders and bare is datamodule) or len(loaders) > 2:
        raise TaskError(f"from_lightning({name}, …): give a data module, or one to three loaders, training's first")
    data = Loaders(module, *bare) if isinstance(bare, Sequence) else module if bare is None else bare
    if (data_base := lightnings_class(data, "LightningDataModule")) is not None:
        unsupported.overridden(data, data_base, refusals)
    refusals.check()
    if defines(data, "prepare_data"):
        with once_at_a_time():  # every process of a task's file comes here
            data.prepare_data()
    train = unsupported.loader(_users_loader(data, "train"), LOADERS["train"], True, refusals)
    validates = validation is not None or defines(data, LOADERS["validation"])
    if validation is None and validates:
        unsupported.loader(_users_loader(data, "validation"), LOADERS["validation"], False, refusals)
    refusals.check()
    assert train is not None
    size = batch_size or train.batch_size or 1
    held = train.dataset if validation is None else share_of(train.dataset, "train", validation=validation)
    length = len(held)  # type: ignore[arg-type]
    steps = epochs * -(-length // size)
    copied = _fresh(module, NoTrainer(epochs, steps))
    made = unsupported.optimizers(copied.configure_optimizers(), refusals)
    trial_result = unsupported.tried(copied, train, refusals, without)
    monitor = unsupported.monitored(made, trial_result.scorings.get(VALIDATION), refusals)
    refusals.check()
    refusals.check_without(trial_result.left_out)
    shuffle = not isinstance(train.sampler, SequentialSampler)
    source = LightningSource(
        module=copy.deepcopy(module),
        data=data,
        tried=trial_result,
        length=length,
        shuffle=shuffle,
        held_out=validation,
        validates=validates,
        without=tuple(without),
    )
    kinds = {"epochs": int, "batch_size": int, "seed": int, "clip": float | None}
    body = {"epochs": epochs, "batch_size": size, "seed": seed, "clip": clip, "__annotations__": kinds}
    body |= {"source": source, "monitor": monitor, "__doc__": f"{name}, made for Lightning."}
    # As if it stood where from_lightning was called, as named tuples do: `grappe train FILE` finds it there.
    body["__module__"] = sys._getframe(1).f_globals.get("__name__", __name__)
    return type(f"{name}Task", (Carried,), body)


def _fresh(module: LightningModule, trainer: NoTrainer) -> Any:
    """Copies the module, ready to be used."""
    fresh: Any = copy.deepcopy(module)
    set_trainer(fresh, trainer)
    if defines(fresh, "setup"):
        fresh.setup("fit")
    for hook in ("configure_sharded_model", "configure_model"):
        if defines(fresh, hook):
            getattr(fresh, hook)()
    return fresh


def _users_loader(data: Any, split: str) -> Any:
    """Returns the split's loader from the user's class."""
    if not defines(data, LOADERS[split]):
        owner = "from_lightning(…)" if isinstance(data, Loaders) else type(data).__name__
        raise TaskError(f"{owner} has no {LOADERS[split]}(): a task needs its {split} data: write it")
    if defines(data, "setup"):
        data.setup("test" if split == "test" else "fit")
    return getattr(data, LOADERS[split])()


def _loader(data: Any, split: str) -> Any:
    loader = _users_loader(data, split)
    return loader[0] if isinstance(loader, list | tuple) else loader
