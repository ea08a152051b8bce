"""Defines Task: a model, its data, loss and optimizer. The fields of a task are its hyperparameters."""

from __future__ import annotations

import dataclasses
import inspect
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, dataclass_transform

from grappe.errors import TaskError
from grappe.errors.user_code import calls_users
from grappe.errors.user_line import at, place_in
from grappe.fields import check_values

if TYPE_CHECKING:
    import torchmetrics
    from torch import Tensor, nn
    from torch.distributed.tensor.parallel import ParallelStyle
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler
    from torch.utils.data import Dataset


SPLITS = ("train", "validation", "test")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Download:
    """A file that a task's data come from: what `grappe fetch` downloads, and how it is known to be right.

    It is put below the data folder. Of an archive (.tar, .tar.gz) the `members` are put there in its place.
    """

    url: str
    """An https address."""
    size: int
    """Bytes."""
    sha256: str
    """Checksum: 64 hexadecimal digits."""
    folder: str = ""
    """Folder below the data folder; the name is the last part of `url`."""
    members: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Files to take out of an archive, with their bytes."""


Call = Callable[[Any, Any], Any]
"""A model and a batch of inputs to the model's output: `Task.forward`."""


@dataclass_transform(kw_only_default=True, frozen_default=True)
@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A training's model, data, loss and optimizer, independent of rank and device.

    A subclass becomes a frozen, keyword-only dataclass automatically: write fields, and override methods.
    Only `model`, `data`, `loss` and `optimizer` have no default.
    """

    epochs: int = 10
    batch_size: int = 256
    """Samples per optimizer step over the whole world, independent of the plan."""
    seed: int = 0
    clip: float | None = None
    """Bound on the gradient's global norm."""
    ema: float | None = None
    """Decay of a moving average of the weights, such as 0.999, which is then evaluated, loaded and exported."""
    downloads: ClassVar[tuple[Download, ...]] = ()
    """Files that `grappe fetch` downloads for `data`, on a machine with internet."""
    whole_batch_loss: ClassVar[bool] = False
    """Set where `loss` compares samples (CLIP, SimCLR): it then gets the global batch's outputs and targets."""
    monitor: ClassVar[str] = "loss"
    """The score of each evaluation that a ReduceLROnPlateau is given: the loss, or another by its name."""
    consecutive_batches: ClassVar[bool] = False
    """Set where a batch continues the last one, row by row: evaluations then have batches of `batch_size`."""

    def __init_subclass__(cls, **keywords: Any) -> None:
        super().__init_subclass__(**keywords)
        _refuse_fields(cls)
        dataclasses.dataclass(frozen=True, kw_only=True)(cls)

    def __post_init__(self) -> None:
        for name, least in (("epochs", 1), ("batch_size", 1), ("seed", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise TaskError(f"{name}={value}: it must be a whole number, at least {least}")
        check_values(self)
        if self.clip is not None and not self.clip > 0:
            raise TaskError(f"clip={self.clip}: it bounds the gradient's norm, so it must be above 0 (or none)")
        if self.ema is not None and not 0 < self.ema < 1:
            raise TaskError(f"ema={self.ema}: the decay of an average is between 0 and 1, such as 0.999 (or none)")

    def prepare(self, folder: Path) -> None:
        """Downloads and unpacks what `data` needs: before it, by one process of each node at a time, under a lock."""

    def notes(self) -> Sequence[str]:
        """Returns notes for the user, one line each, which are shown when a training starts."""
        return ()

    @property
    def validated_on(self) -> str:
        """Returns the split that has the validation samples: "validation", or "test" or "train", which scores show."""
        return "validation"

    def model(self) -> nn.Module:
        """Makes the network on the current default device; its weights are drawn from torch's generator."""
        raise NotImplementedError

    def data(self, split: str, folder: Path) -> Dataset:
        """Returns the samples of `split` ("train", "validation" or "test"): a map-style dataset.

        Samples are pairs (input, target), or of any form that `collate` makes batches of.
        """
        raise NotImplementedError

    def fake_data(self, split: str) -> Dataset:
        """Returns zeros in the shapes, types and number of data()'s samples: `grappe foresee` takes them without data.

        Tensors that are expanded take no memory: `torch.zeros(3, 224, 224).expand(1_281_167, 3, 224, 224)`.
        """
        raise NotImplementedError

    def loss(self, output: Any, target: Any) -> Tensor | Mapping[str, Tensor]:
        """Computes one value per example, [B], or per token, [B, ...]; never their mean.

        Several losses are a dictionary of such tensors, all of one shape: their sum is learned, and each is reported by
        evaluations as `loss_NAME`, over the training batches as `training_loss_NAME`. With `counts` by the same names
        each may have a shape of its own, and is divided by its own count.

        A sample's value depends on its own output alone: B samples are a slice of the global batch, or a microbatch.
        With `whole_batch_loss = True` they are the whole batch, whose mean may be returned.
        """
        raise NotImplementedError

    def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
        """Makes the optimizer over the trainable parameters, given as (name, parameter) pairs."""
        raise NotImplementedError

    def counts(self, target: Any) -> Tensor | Mapping[str, Tensor] | None:
        """Returns the weight of each value of `loss`, in the same shape (0: an ignored token). None: equal weights.

        Of several losses a dictionary by the same names: each is then a mean of its own, of classes over images and of
        boxes over boxes, for example, and the sum of the means is learned.
        """
        return None

    def schedule(self, optimizer: Optimizer, total_steps: int) -> LRScheduler | None:
        """Makes a learning-rate schedule, stepped once per optimizer step; a ReduceLROnPlateau once per evaluation."""
        return None

    def after_step(self, model: Any) -> None:
        """Changes parameters after each optimizer step, without gradients: a momentum encoder, a bound on weights.

        `model` is what `model()` returned. Under a plan that shards, its parameters are DTensors: operations between
        parameters of one shape work as they are, `target.lerp_(source, 0.01)`. It must do the same on every process.
        It runs before the average of `ema`, and not after a step that fp16 skips.
        """

    def metrics(self) -> Mapping[str, torchmetrics.Metric]:
        """Metrics that evaluation reports in addition to the loss; each is updated with (output, target)."""
        return {}

    def training_metrics(self) -> Mapping[str, torchmetrics.Metric]:
        """Metrics over the training batches: `training_NAME`. Without it: `metrics`, if --training-metrics is given."""
        return {}

    def sampling(self, dataset: Any) -> Any:
        """Returns a `grappe.Sampling`: which training samples an epoch has, and how often. None: each once."""
        return None

    def augment(self, inputs: Any, targets: Any, keys: Tensor) -> tuple[Any, Any]:
        """Augments a training batch on the device at random; `keys` [B] int64 are arguments of `grappe.draw`.

        If it takes a further argument `training`, it is called for evaluation and prediction, too: for the noise and
        times of a diffusion model.
        """
        return inputs, targets

    @calls_users("collate(): samples of several shapes need one of your own")
    def collate(self, samples: Sequence[Any]) -> Any:
        """Collates the dataset's samples, of any form, into a batch (inputs, targets)."""
        from torch.utils.data import default_collate

        return default_collate(list(samples))

    def forward(self, model: Any, inputs: Any) -> Any:
        """The model's output for a batch of inputs: a dict becomes keywords, `model(**inputs)`.

        A pipeline calls it with the first unit in the model's place.
        """
        return model(**inputs) if isinstance(inputs, Mapping) else model(inputs)

    def scored(self, output: Any) -> Any:
        """Makes what `metrics` get of the model's output for a batch: its sigmoid, its argmax, or output["logits"]."""
        return output

    def prediction(self, output: Any) -> Any:
        """Makes what `grappe predict` shows of the model's output for a batch: tensors with a row per sample.

        A softmax, decoded text, a dict by name. It is cut by row, however it nests; a list of dicts is one a sample.
        """
        return output

    def units(self, model: Any) -> Sequence[nn.Module]:
        """Returns the model's blocks in order, for sharding, activation checkpointing, compilation and pipelining.

        For a pipeline the units must be the whole model: called one after the other, each with the previous unit's
        output, they return what the model returns.

        Without it: the blocks that a model of transformers names; for a pipeline the modules of an nn.Sequential.
        """
        from grappe.private_api.transformers import blocks

        return blocks(model)

    def cuts(self, stages: int) -> Sequence[int] | None:
        """Returns the first units of stages 2, 3, … of a pipeline of `stages`, by number from 0.

        None: the cuts minimise the counted work of the largest stage.
        """
        return None

    def domain(self, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Returns the dimension that `domain` cuts of each tensor of a batch's inputs and targets, nested alike.

        A number, or None for what stays whole. Without it: the height (or depth) of images [B, C, H, …], else the
        length of token ids [B, T]; and of every other tensor that has the same sizes, such as masks of pixels.
        """
        raise NotImplementedError

    def tensor_plan(self, model: Any) -> Mapping[str, ParallelStyle]:
        """Returns the parallel style of each module, by name, over `tensor` processes.

        Without it: what a model of transformers says itself; nothing of any other model.
        """
        return {}


def overrides(task: Task, method: str) -> bool:
    """Returns whether the task overrides `method`."""
    return getattr(type(task), method) is not getattr(Task, method)


def derived(task: Task, **methods: Callable[..., Any]) -> Task:
    """Returns a copy of `task`, of a class derived from the task's, with the same name and other methods."""
    kind = type(task)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__annotations__": {}}
    copy = object.__new__(type(kind.__name__, (kind,), {**names, **methods}))
    copy.__dict__.update(task.__dict__)
    return copy


def split_name(task: Task, split: str) -> str:
    """Returns the name of a split as it is shown with a score."""
    shared = {"test": "validation (the test set)", "train": "validation (training samples)"}
    return shared.get(task.validated_on, split) if split == "validation" else split


def fields(task: Task) -> dict[str, Any]:
    """Returns the task's hyperparameters by name."""
    return {field.name: getattr(task, field.name) for field in dataclasses.fields(task)}


def parts() -> frozenset[str]:
    """Lists the names of a task's methods."""
    return frozenset(
        name for name, value in vars(Task).items() if inspect.isfunction(value) and not name.startswith("_")
    )


def check_signatures(task: Task) -> None:
    """Raises TaskError where a method of the task cannot take what grappe calls it with."""
    for name in parts():
        if not overrides(task, name):
            continue
        meant = list(inspect.signature(getattr(Task, name)).parameters)
        try:
            signature = inspect.signature(getattr(task, name))
            further = {"training": True} if name == "augment" and "training" in signature.parameters else {}
            signature.bind(*meant[1:], **further)
        except (TypeError, ValueError) as error:
            without_self = inspect.isroutine(getattr(type(task), name)) and "invalid method" in str(error)
            if isinstance(error, ValueError) and not without_self:  # torch's own code says nothing of its arguments
                continue
            raise TaskError(
                f"{type(task).__name__}.{name}() does not accept its arguments ({error}): write "
                f"def {name}({', '.join(meant)}){at(task, name)}"
            ) from error


def _refuse_fields(cls: type) -> None:
    """Refuses a field that hides a method, and one without its type, which would keep the value before."""
    for name in inspect.get_annotations(cls):
        if name in parts():
            raise TaskError(
                f"{cls.__name__}: the field '{name}' hides the method '{name}()': call it {name}_, which is typed "
                f"{name}=…"
            )
    bases = [base for base in cls.__mro__[1:] if dataclasses.is_dataclass(base)]
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    for name, value in vars(cls).items():
        if name in inherited and name not in inspect.get_annotations(cls) and not name.startswith("_"):
            raise TaskError(
                f"{cls.__name__}: {name} = {value!r} has no type, so it would not count: write "
                f"{name}: {type(value).__name__} = {value!r} ({place_in(traceback.extract_stack())})"
            )
