"""A residual network on ImageNet, or any labelled photographs: folders, archives as downloaded, or shards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, Sampling, Task
from grappe.data import CentreCrop, Images, Normalise, RandomResizedCrop, augment
from grappe.errors import DataNotFound, TaskError
from grappe.optimizers.common import LrScaling, scale_factor
from grappe.tasks.images.resnet import convolution, initialise, resnet

if TYPE_CHECKING:
    import torchmetrics
    from torch.distributed.tensor.parallel import ParallelStyle

TRAIN = ("train", "ILSVRC2012_img_train.tar", "train.tar")
VALIDATION = ("validation", "val", "validation.tar", "val.tar")
ARCHIVE, LABELS = "ILSVRC2012_img_val.tar", "LOC_val_solution.csv"
"""The validation archive, whose images are in no class, and Kaggle's file of their classes."""
MEAN = (124, 116, 104)
"""ImageNet's mean colour, which the network sees as 0."""
DEPTHS: dict[str, Any] = {"resnet18": 18, "resnet50": 50, "resnet101": 101}


class ImageNet(Task):
    """A ResNet on ImageNet or other photographs, in the data folder's `train` and `validation`, or its archives."""

    epochs: int = 90
    batch_size: int = 256
    network: Literal["resnet18", "resnet50", "resnet101"] = "resnet50"
    classes: int = 1000
    image_size: int = 224
    """Pixels of a training image's side."""
    area: float = 0.08
    """Least share of a picture that a training image shows."""
    validation_size: int | None = None
    """Pixels of a validation image's side. Default: image_size."""
    validation_resize: int | None = None
    """Pixels of a validation picture's short side before its middle is cut out. Default: 256/224 of its size."""
    lr: float = 0.1
    lr_scaling: LrScaling = "none"
    """Rule for lr when batch_size is k times 256: linear (k times lr) or sqrt."""
    momentum: float = 0.9
    nesterov: bool = False
    weight_decay: float = 5e-5
    """Weight decay of convolutions and the last layer's matrix; normalisation and biases have none."""
    schedule_shape: Literal["onecycle", "cosine", "constant"] = "cosine"
    warmup: float = 0.05
    """Share of the training in which the learning rate rises."""
    smoothing: float = 0.1
    """Label smoothing in the loss."""
    mixup: float = 0.0
    """alpha of mixup's weights, 0.2 say; with cutmix, each for half of the pairs."""
    cutmix: float = 0.0
    """alpha of the areas that are exchanged, 1.0 say."""
    policy: Literal["none", "rand", "trivial", "auto"] = "none"
    """RandAugment, TrivialAugment or AutoAugment."""
    jitter: float = 0.0
    """Brightness, contrast and saturation change by up to this share."""
    erasing: float = 0.0
    """Share of images with an erased rectangle."""
    copies: int = 1
    """Copies of an image in its batch, augmented independently: repeated augmentation."""
    train_images: str = ""
    """Folder, archive or shards in the data folder. Default: train, or ILSVRC2012_img_train.tar."""
    validation_images: str = ""
    """In the same way. Default: validation, val, or ILSVRC2012_img_val.tar with LOC_val_solution.csv."""

    def __post_init__(self) -> None:
        super().__post_init__()
        shares = {"warmup": self.warmup, "smoothing": self.smoothing, "erasing": self.erasing}
        for name, value in shares.items():
            if not 0 <= value <= 1:
                raise TaskError(f"{name}={value}: it is a share, from 0 to 1")
        for name, value in {"mixup": self.mixup, "cutmix": self.cutmix, "jitter": self.jitter}.items():
            if value < 0:
                raise TaskError(f"{name}={value}: it must be at least 0")
        if self.classes < 2:
            raise TaskError(f"classes={self.classes}: it must be at least 2")

    def model(self) -> nn.Module:
        first = nn.Sequential(Normalise(), *convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1))
        network = resnet(DEPTHS[self.network], self.classes, first)
        initialise(network)
        return network

    def data(self, split: str, folder: Path) -> Images:
        train = _find(folder, self.train_images, TRAIN)
        if split == "test":
            raise TaskError(
                "imagenet has no test split, as ImageNet publishes no labels of its test images: use --split validation"
            )
        if split == "train":
            images = Images(train, RandomResizedCrop(size=self.image_size, area=(self.area, 1.0)))
        else:
            size = self.validation_size or self.image_size
            view = CentreCrop(size=size, short=self.validation_resize)
            place = _find(folder, self.validation_images, (*VALIDATION, ARCHIVE))
            labels = folder / LABELS if place.name == ARCHIVE else None
            classes = Images(train, view).classes  # the same numbers as in training
            images = Images(place, view, labels=labels, classes=classes)
        if len(images.classes) != self.classes:
            raise TaskError(f"{train} has {len(images.classes)} classes: set classes={len(images.classes)}")
        return images

    def fake_data(self, split: str) -> Arrays:
        count, size = (1_281_167, None) if split == "train" else (50_000, self.validation_size)
        image = torch.zeros(3, size or self.image_size, size or self.image_size, dtype=torch.uint8)
        return Arrays(image.expand(count, *image.shape), torch.zeros((), dtype=torch.long).expand(count))

    def sampling(self, dataset: Any) -> Sampling | None:
        return Sampling(copies=self.copies) if self.copies != 1 else None

    def augment(self, inputs: Tensor, targets: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        if self.policy == "rand":
            inputs = augment.rand_augment(inputs, keys)
        elif self.policy == "trivial":
            inputs = augment.trivial_augment(inputs, keys)
        elif self.policy == "auto":
            inputs = augment.auto_augment(inputs, keys)
        if self.jitter:
            inputs = augment.colour_jitter(inputs, keys, *(self.jitter,) * 3)
        if self.erasing:
            inputs = augment.erase(inputs, keys, self.erasing, fill=MEAN)
        if self.mixup and self.cutmix:
            return augment.mixup_or_cutmix(inputs, targets, keys, self.classes, self.mixup, self.cutmix)
        if self.mixup:
            return augment.mixup(inputs, targets, keys, self.classes, self.mixup)
        if self.cutmix:
            return augment.cutmix(inputs, targets, keys, self.classes, self.cutmix)
        return inputs, targets

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none", label_smoothing=self.smoothing)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        named = list(named_parameters)
        groups = [
            {"params": [each for each in named if each[1].dim() > 1], "weight_decay": self.weight_decay},
            {"params": [each for each in named if each[1].dim() < 2], "weight_decay": 0.0},
        ]
        return torch.optim.SGD(groups, lr=self._scaled_lr, momentum=self.momentum, nesterov=self.nesterov)

    def schedule(self, optimizer: torch.optim.Optimizer, total_steps: int):  # noqa: ANN201
        if self.schedule_shape == "constant" or total_steps < 3:
            return None
        if self.schedule_shape == "onecycle":
            rise = min(max(self.warmup, 2 / total_steps), 1.0)  # torch divides by its steps less 1
            return torch.optim.lr_scheduler.OneCycleLR(optimizer, self._scaled_lr, total_steps, pct_start=rise)
        warm = max(1, round(self.warmup * total_steps))

        def factor(step: int) -> float:
            rest = max(0, step - warm) / max(1, total_steps - warm)
            return min(1.0, (step + 1) / warm) * 0.5 * (1 + math.cos(math.pi * min(1.0, rest)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, factor)

    @property
    def _scaled_lr(self) -> float:
        return self.lr * scale_factor(self.lr_scaling, batch_size=self.batch_size, base=type(self).batch_size)

    def prediction(self, output: Tensor) -> dict[str, Tensor]:
        probability, number = output.softmax(1).max(1)
        return {"class": number, "probability": probability}

    def metrics(self) -> dict[str, torchmetrics.Metric]:
        from grappe.tasks.images.accuracy import Accuracy  # torchmetrics takes seconds, in evaluations alone

        ranks = {"accuracy": 1} | ({"top5": 5} if self.classes > 5 else {})
        return {name: Accuracy(self.classes, top_k) for name, top_k in ranks.items()}

    def units(self, model: Any) -> list[nn.Module]:
        return list(model)

    def tensor_plan(self, model: Any) -> dict[str, ParallelStyle]:
        from grappe.parallel.tensor import split_convolutions

        return split_convolutions(model)


def _find(folder: Path, name: str, usual: Sequence[str]) -> Path:
    """The source of images that is named, or the first of the usual ones that is there."""
    places = [folder / path for path in ((name,) if name else usual)]
    for place in places:
        if place.exists():
            return place
    raise DataNotFound(
        f"not found in {folder.absolute()}: {' or '.join(path.name for path in places)}. ImageNet's archives come from "
        "https://www.image-net.org, after registration; name their folder with --data. To try without them, "
        "in grappe's repository: python -m benchmarks.photos FOLDER"
    )
