"""The ResNet on photographs: its network, recipe, sources of data and what it refuses."""

from pathlib import Path

import numpy as np
import pytest
import torch

from grappe.data.draw import sample_keys
from grappe.errors import DataError, TaskError
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.imagenet import ImageNet
from grappe.tasks.images.resnet import Residual
from tests.data.images.pictures import CLASSES, archive, files, folder
from tests.rates import rates

KINDS = len(CLASSES)


@pytest.mark.parametrize(
    ("network", "parameters", "units"),
    [("resnet18", 11_689_512, 10), ("resnet50", 25_557_032, 18), ("resnet101", 44_549_160, 35)],
)
def test_networks_have_the_papers_parameters(network, parameters, units):
    """Counts of torchvision's documentation."""
    with torch.device("meta"):
        task = ImageNet(network=network)
        model = task.model()
        assert sum(one.numel() for one in model.parameters()) == parameters
        images = torch.empty(2, 3, 224, 224, dtype=torch.uint8)
        assert model(images).shape == (2, 1000)
        assert len(task.units(model)) == units


def test_each_block_begins_as_its_shortcut():
    torch.manual_seed(0)
    for network, blocks in (("resnet18", 8), ("resnet50", 16)):
        model = ImageNet(network=network, classes=3).model().eval()
        found = [module for module in model.modules() if isinstance(module, Residual)]
        assert len(found) == blocks and not any(one.path[-1].weight.any() for one in found)
        x = torch.rand(1, 64 if network == "resnet18" else 256, 8, 8)
        assert torch.equal(found[1](x), x)
    assert all(one.path[-1].weight.all() for one in Cifar10(network="resnet18").model() if isinstance(one, Residual))


def test_weight_decay_leaves_normalisation_and_biases_out():
    task = ImageNet(network="resnet18", classes=3, weight_decay=0.1)
    names = dict(task.model().named_parameters())
    decayed, rest = task.optimizer(names.items()).param_groups
    assert decayed["weight_decay"] == 0.1 and rest["weight_decay"] == 0
    assert {one.dim() for one in decayed["params"]} == {2, 4} and {one.dim() for one in rest["params"]} == {1}
    assert len(decayed["params"]) + len(rest["params"]) == len(names)


@pytest.mark.parametrize("shape", ["onecycle", "cosine"])
@pytest.mark.parametrize(("steps", "warmup"), [(100, 0.3), (7, 0.0), (3, 0.4), (40, 0.025), (20, 1.0)])
def test_the_rate_rises_and_falls(shape, steps, warmup):
    task = ImageNet(lr=0.4, schedule_shape=shape, warmup=warmup)
    optimizer = task.optimizer(torch.nn.Linear(2, 2).named_parameters())
    schedule = task.schedule(optimizer, steps)
    found = rates(optimizer, schedule, steps)
    peak = int(np.argmax(found))
    assert found[peak] == pytest.approx(0.4) and abs(peak - warmup * steps) <= 2
    assert found[: peak + 1] == sorted(found[: peak + 1])
    assert found[peak:] == sorted(found[peak:], reverse=True)


def test_onecycle_is_torchs():
    optimizers = [torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1, momentum=0.9) for _ in range(2)]
    ours = ImageNet(schedule_shape="onecycle", warmup=0.3).schedule(optimizers[0], 50)
    theirs = torch.optim.lr_scheduler.OneCycleLR(optimizers[1], 0.1, epochs=5, steps_per_epoch=10)
    for _ in range(49):
        assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]
        assert optimizers[0].param_groups[0]["momentum"] == optimizers[1].param_groups[0]["momentum"]
        for one in (*optimizers, ours, theirs):
            one.step()
    assert ImageNet(schedule_shape="constant").schedule(optimizers[0], 50) is None
    assert ImageNet().schedule(optimizers[0], 1) is None


def test_every_kind_of_source(tmp_path: Path):
    task = ImageNet(classes=KINDS, image_size=16, validation_size=20, validation_resize=24)
    archive(tmp_path / "train.tar", files())
    folder(tmp_path / "val", files())
    train, validation = (task.data(split, tmp_path) for split in ("train", "validation"))
    assert train.source.name == "train.tar" and validation.source.name == "val"
    with pytest.raises(TaskError, match=r"imagenet has no test split.*--split validation"):
        task.data("test", tmp_path)
    assert train[0][0].shape == (3, 16, 16) and validation[0][0].shape == (3, 20, 20)
    assert list(train.classes) == list(validation.classes)
    folder(tmp_path / "mine", files())
    assert ImageNet(classes=KINDS, train_images="mine").data("train", tmp_path).source.name == "mine"
    with pytest.raises(TaskError, match=rf"has {KINDS} classes: set classes={KINDS}"):
        ImageNet().data("train", tmp_path)
    with pytest.raises(DataError, match=r"train or ILSVRC2012_img_train.tar.*--data.*benchmarks\.photos"):
        task.data("train", tmp_path / "none")
    with pytest.raises(DataError, match="packed"):
        ImageNet(train_images="packed").data("train", tmp_path)


@pytest.mark.parametrize(
    "fields",
    [{"warmup": 1.5}, {"smoothing": -0.1}, {"erasing": 2.0}, {"mixup": -1.0}, {"jitter": -1.0}, {"classes": 1}],
)
def test_fields_out_of_range_are_named(fields):
    with pytest.raises(TaskError, match=next(iter(fields))):
        ImageNet(**fields)


@pytest.mark.parametrize(
    "fields", [{}, {"policy": "rand"}, {"policy": "trivial"}, {"policy": "auto"}, {"jitter": 0.4}, {"erasing": 1.0}]
)
def test_bytes_stay_bytes_and_losses_take_what_was_mixed(fields):
    images = torch.randint(0, 256, (6, 3, 16, 16), dtype=torch.uint8)
    keys = torch.from_numpy(sample_keys(0, 0, np.arange(6)))
    targets = torch.arange(6)
    inputs, same = ImageNet(classes=6, **fields).augment(images, targets, keys)
    assert inputs.dtype == torch.uint8 and torch.equal(same, targets)
    assert torch.equal(inputs, images) == (not fields)
    for mixing in ({"mixup": 0.2}, {"cutmix": 1.0}, {"mixup": 0.2, "cutmix": 1.0}):
        task = ImageNet(classes=6, **fields, **mixing)
        mixed, shares = task.augment(images, targets, keys)
        assert mixed.shape == images.shape and shares.shape == (6, 6)
        assert task.loss(torch.randn(6, 6), shares).shape == (6,)


def test_copies():
    assert ImageNet().sampling(None) is None
    assert ImageNet(copies=3).sampling(None).copies == 3


def test_accuracy_of_mixed_images_is_that_of_the_larger_part():
    task = ImageNet(classes=6)
    accuracy, top5 = task.metrics()["accuracy"], task.metrics()["top5"]
    outputs = torch.eye(6)[[0, 1, 2, 3]]
    for targets in (torch.tensor([0, 1, 2, 4]), torch.tensor([[0.9, 0.1], [0.4, 0.6], [0.0, 0.0], [0.0, 0.0]])):
        shares = torch.nn.functional.pad(targets, (0, 4)) if targets.dim() > 1 else targets
        if targets.dim() > 1:
            shares[2, 2] = shares[3, 4] = 1.0
        accuracy.update(outputs, shares)
        top5.update(outputs, shares)
    assert accuracy.compute() == 0.75 and top5.compute() >= 0.75
    assert "top5" not in ImageNet(classes=4).metrics()
