"""The shipped tasks: official files in, right splits and shapes out, and a step that learns."""

import importlib.util
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

import grappe
from grappe import Arrays, Task, finder
from grappe.contrib.tune.space import read_space
from grappe.data.draw import sample_keys
from grappe.errors import DataError, TaskError, UsageError
from grappe.task import fields
from grappe.tasks.cifar10 import Cifar10
from grappe.tasks.coatnet import CoAtNet
from grappe.tasks.digits import Digits
from grappe.tasks.fashion_mnist import FashionMnist
from grappe.tasks.pysource import IGNORED, PySource
from grappe.training.run import Run
from tests import idx_files
from tests.rates import rates
from tests.training.test_training import train

GENERATOR = np.random.default_rng(0)
TINY = {"width": 16, "depth": 2, "heads": 2, "context": 32, "megabytes": 0.3}


@pytest.fixture
def fashion(tmp_path: Path) -> Path:
    """24 training and 6 test images, gzipped, as torchvision lays them out."""
    idx_files.write(tmp_path / "FashionMNIST" / "raw", 24, 6)
    return tmp_path


@pytest.fixture(params=["python", "binary"])
def cifar(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Five batches of 8 images and 6 test images, in both versions of the official files."""
    for batch in ["data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch"]:
        count = 6 if batch == "test_batch" else 8
        images = GENERATOR.integers(0, 256, (count, 3072), dtype=np.uint8)
        labels = [(int(batch[-1], 36) + row) % 10 for row in range(count)]
        if request.param == "python":
            path = tmp_path / "cifar-10-batches-py" / batch
            content = pickle.dumps({b"data": images, b"labels": labels}, 2)
        else:
            path = tmp_path / "cifar-10-batches-bin" / f"{batch}.bin"
            content = np.concatenate([np.array(labels, np.uint8)[:, None], images], axis=1).tobytes()
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return tmp_path


def whole(data: Arrays) -> tuple[torch.Tensor, torch.Tensor]:
    return data.gather(np.arange(len(data)))


def mean_loss(task: Task, model: torch.nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    values, counts = task.loss(model(inputs), targets), task.counts(targets)
    return values.mean() if counts is None else (values * counts).sum() / counts.sum()


def losses_around_a_step(task: Task, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
    torch.manual_seed(0)
    model = task.model()
    optimizer = task.optimizer(model.named_parameters())
    before = mean_loss(task, model, inputs, targets)
    before.backward()
    optimizer.step()
    return before.item(), mean_loss(task, model, inputs, targets).item()


# Fashion-MNIST


def test_fashion_mnist_splits(fashion):
    train, validation, test = (FashionMnist().data(split, fashion) for split in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (22, 2, 6)
    assert train.inputs[:, 0, 0, 0].tolist() + validation.inputs[:, 0, 0, 0].tolist() == list(range(24))
    assert train.inputs.dtype == torch.uint8
    inputs, targets = whole(test)
    assert inputs.shape == (6, 1, 28, 28) and inputs.dtype == torch.float32
    assert inputs.min() >= 0 and inputs.max() == 1
    assert targets.tolist() == list(range(6)) and targets.dtype == torch.int64


def test_fashion_mnist_is_split_as_in_the_book(fashion):
    """All training images are trained on, and the test images validate."""
    task = finder.make(FashionMnist, {"holdout": "0"})
    train, validation, test = (task.data(split, fashion) for split in ("train", "validation", "test"))
    assert (len(train), len(validation)) == (24, 6)
    assert np.array_equal(validation.inputs, test.inputs)
    with pytest.raises(TaskError, match=r"holdout=1\.0"):
        FashionMnist(holdout=1.0)


def test_scores_say_that_validation_is_the_test_set(fashion: Path, capfd: pytest.CaptureFixture) -> None:
    task = FashionMnist(holdout=0.0, epochs=1, batch_size=8)
    run = Run(train(fashion / "run", task).run)  # type: ignore[arg-type]
    out, _ = capfd.readouterr()
    assert "  validation (the test set) " in out and "\nvalidation (the test set) loss  " in out
    assert [record["split"] for record in run.records("evaluation")] == ["validation (the test set)"]
    splits = {
        split: grappe.evaluate(run, split, "threads=1", task=task, data=fashion).split
        for split in ("validation", "test")
    }
    assert splits == {"validation": "validation (the test set)", "test": "test"}


def test_fashion_mnist_learns(fashion):
    before, after = losses_around_a_step(FashionMnist(), *whole(FashionMnist().data("train", fashion)))
    assert before == pytest.approx(math.log(10), abs=1e-3)  # weights as small as the chapter's tell nothing
    assert after < before


def test_fashion_mnist_network_is_the_chapters():
    model = FashionMnist().model()
    shapes = [list(parameter.shape) for parameter in model.parameters()]
    assert shapes == [[20, 1, 3, 3], [20], [50, 20, 5, 5], [50], [128, 800], [128], [10, 128], [10]]
    assert all(parameter.abs().max() == 0 for parameter in model.parameters() if parameter.dim() == 1)
    assert model[2][1].weight.std().item() == pytest.approx(0.01, rel=0.02)


def test_cifar10_with_the_optimizer_of_the_pages_scripts():
    task = finder.make(Cifar10, {"optimizer": "adam", "lr": "0.001"})
    optimizer = task.optimizer(task.model().named_parameters())
    assert type(optimizer) is torch.optim.Adam and optimizer.param_groups[0]["lr"] == 0.001
    assert finder.make(Cifar10, {name: str(value) for name, value in fields(task).items()}) == task
    with pytest.raises(TaskError, match=r"momentum=0\.9 is of optimizer=sgd"):
        finder.make(Cifar10, {"optimizer": "adam", "momentum": "0.9"})
    space, fixed = read_space(Cifar10, {"optimizer": "sgd|adam", "lr": "0.1"})
    assert list(space) == ["optimizer_"] and fixed == {"lr": "0.1"}
    with pytest.raises(UsageError, match="did you mean optimizer"):
        finder.make(Cifar10, {"optimiser": "adam"})


# CIFAR-10


def test_cifar10_splits(cifar):
    task = Cifar10()
    train, validation, test = (task.data(split, cifar) for split in ("train", "validation", "test"))
    assert (len(train), len(validation), len(test)) == (36, 4, 6)
    everything = Cifar10(holdout=0.0).data("train", cifar)
    assert torch.equal(everything.inputs, torch.cat([train.inputs, validation.inputs]))
    assert torch.equal(Cifar10(holdout=0.0).data("validation", cifar).inputs, test.inputs)
    assert everything.inputs.dtype == torch.uint8 and everything.inputs.shape == (40, 3, 32, 32)
    assert everything.targets[:9].tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 2]
    inputs, _ = whole(train)
    assert inputs.min() == -1 and inputs.max() == 1


def test_cifar10_says_which_batch_is_missing(cifar):
    batch = next(path for path in cifar.rglob("data_batch_4*"))
    batch.unlink()
    with pytest.raises(DataError, match=rf"not found in {batch.parent}: data_batch_4\."):
        Cifar10().data("train", cifar)


def images(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (count,), generator=generator)
    return torch.randn(count, 3, 32, 32, generator=generator), labels


@pytest.mark.parametrize("network", ["small", "resnet18"])
def test_cifar10_learns(network):
    before, after = losses_around_a_step(Cifar10(network=network, lr=0.02), *images(8))
    assert after < before


def test_cifar10_networks():
    small, resnet = Cifar10(), Cifar10(network="resnet18")
    assert sum(parameter.numel() for parameter in small.model().parameters()) == 62_006
    with torch.device("meta"):
        model = resnet.model()
        assert model(torch.empty(2, 3, 32, 32)).shape == (2, 10)
    assert sum(parameter.numel() for parameter in model.parameters()) == 11_173_962
    assert len(resnet.units(model)) == 10  # stem, eight blocks, head
    optimizer = torch.optim.SGD(small.model().parameters())
    assert small.schedule(optimizer, 10) is None
    assert resnet.schedule(optimizer, 10) is not None


@pytest.mark.parametrize("wrong", [{"mixup": 1.5}, {"mixup": -0.1}, {"holdout": 1.0}])
def test_shares_are_shares(wrong):
    with pytest.raises(TaskError, match="shares"):
        Cifar10(**wrong)


def test_every_image_is_one_of_its_own_crops():
    inputs, targets = images(60)
    keys = torch.from_numpy(sample_keys(0, 0, np.arange(60)))
    augmented, same = Cifar10(flip_and_crop=True).augment(inputs, targets, keys)
    assert torch.equal(same, targets) and augmented.is_contiguous()
    found = set()
    for before, after in zip(inputs, augmented, strict=True):
        padded = torch.nn.functional.pad(torch.stack([before, before.flip(2)]), (4,) * 4)
        places = [
            (flipped, top, left)
            for flipped in range(2)
            for top in range(9)
            for left in range(9)
            if torch.equal(padded[flipped, :, top : top + 32, left : left + 32], after)
        ]
        assert len(places) == 1
        found.add(places[0])
    for choices in zip(*found, strict=True):
        assert len(set(choices)) == (2 if max(choices) == 1 else 9)


def test_mixup_gives_shares_of_classes_to_the_loss():
    inputs, targets = images(5)
    task = Cifar10(mixup=0.5)
    mixed, classes = task.augment(inputs, targets, torch.from_numpy(sample_keys(0, 0, np.arange(5))))
    assert not torch.equal(mixed, inputs) and classes.shape == (5, 10)
    assert 0.5 < classes[0, targets[0]] < 1
    assert task.loss(task.model()(mixed), classes).shape == (5,)


# digits


def test_digits_are_split_in_three_without_overlap() -> None:
    splits = [Digits().data(split, Path()) for split in ("train", "validation", "test")]
    assert [len(split) for split in splits] == [1437, 180, 180]
    images = {bytes(image.numpy()) for split in splits for image in split.inputs}
    assert len(images) == 1797
    assert {len(CoAtNet().data(split, Path())) for split in ("validation", "test")} == {180}


def test_digits_are_those_of_scikit_learns_own_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read without scikit-learn's import; a release that has it elsewhere loads it itself."""
    read = Digits().data("train", Path())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    loaded = Digits().data("train", Path())
    assert torch.equal(read.inputs, loaded.inputs) and torch.equal(read.targets, loaded.targets)


# Python's source


def test_pysource_samples():
    task = PySource(**TINY)
    splits = {split: task.data(split, Path("nowhere")) for split in ("train", "validation", "test")}
    assert len(splits["train"]) > len(splits["validation"]) > 0 and len(splits["test"]) > 0
    for data in splits.values():
        inputs, targets = whole(data)
        assert data.inputs.dtype == torch.uint8 and inputs.dtype == targets.dtype == torch.int64
        assert inputs.shape == targets.shape == (len(data), 32)
        text, following = inputs.flatten(), targets.flatten()
        assert torch.equal(following == IGNORED, text == 0)
        told = following[:-1] != IGNORED
        assert torch.equal(following[:-1][told], text[1:][told])
    assert (splits["train"].targets == IGNORED).any()
    assert torch.equal(splits["train"].inputs, task.data("train", Path("elsewhere")).inputs)
    assert bytes(splits["train"].inputs[0].tolist()).startswith(b'"""Record of phased-in')  # __future__.py


def test_pysource_is_capped():
    small, large = (PySource(**{**TINY, "megabytes": size}).data("train", Path()) for size in (0.3, 0.6))
    assert 0.1e6 < len(small) * 32 < 0.5e6 and len(large) > 1.4 * len(small)
    with pytest.raises(TaskError, match=r"megabytes=0.0 leaves no train sample"):
        PySource(**{**TINY, "megabytes": 0.0}).data("train", Path())


def pysource_batch(task: PySource) -> tuple[torch.Tensor, torch.Tensor]:
    data = task.data("train", Path())
    first = int((data.targets == IGNORED).any(1).nonzero()[0])
    return data.gather(np.arange(first, first + 4))


def test_pysource_learns():
    task = PySource(**TINY)
    inputs, targets = pysource_batch(task)
    before, after = losses_around_a_step(task, inputs, targets)
    assert before == pytest.approx(math.log(256), abs=0.2) and after < before


def test_pysource_counts_have_the_losses_shape():
    task = PySource(**TINY)
    inputs, targets = pysource_batch(task)
    output = task.model()(inputs)
    values, counts = task.loss(output, targets), task.counts(targets)
    assert values.shape == counts.shape == (4, 32)
    assert 0 < (counts == 0).sum() < 4 and (values[counts == 0] == 0).all()
    metric = task.metrics()["bits_per_byte"]
    metric.update(output, targets)
    expected = values.sum().item() / counts.sum().item() / math.log(2)
    assert metric.compute().item() == pytest.approx(expected, rel=1e-5)


def test_pysource_sees_no_byte_that_comes_later():
    model = PySource(**TINY).model()
    text = torch.randint(256, (2, 32))
    changed = text.clone()
    changed[:, 20] ^= 1
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert (before[:, 20:] != after[:, 20:]).any(-1).all()


def test_pysource_names():
    task = PySource(**TINY)
    model = task.model()
    assert task.units(model) == [model.embed, *model.blocks, model.head]
    plan, modules = task.tensor_plan(model), dict(model.named_modules())
    assert len(plan) == 6 * task.depth and all(isinstance(modules[name], torch.nn.Linear) for name in plan)
    optimizer = task.optimizer(model.named_parameters())
    matrices, vectors = optimizer.param_groups
    assert {parameter.dim() for parameter in matrices["params"]} == {2} and matrices["weight_decay"] == 0.1
    assert {parameter.dim() for parameter in vectors["params"]} == {1} and vectors["weight_decay"] == 0.0
    with pytest.raises(TaskError, match="heads=3"):
        PySource(width=16, heads=3).model()


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", 0.8), ("mini", 25.2), ("small", 85), ("medium", 302), ("large", 708), ("xl", 1475)]
)
def test_pysource_sizes(size: str, millions: float):
    """GPT-2's own, without its 50,257 tokens: 12 x depth x width^2 in the blocks."""
    with torch.device("meta"):
        model = PySource(size=size).model()
    assert sum(p.numel() for p in model.blocks.parameters()) / 1e6 == pytest.approx(millions, rel=0.02)


def test_pysource_rate_rises_and_falls():
    task = PySource(**TINY, warmup=0.1)
    optimizer = task.optimizer(task.model().named_parameters())
    schedule = task.schedule(optimizer, 100)
    found = rates(optimizer, schedule, 100)
    assert found[0] == pytest.approx(task.lr / 10) and max(found) == found[9] == found[10] == task.lr
    assert found[10:] == sorted(found[10:], reverse=True) and 0 < found[-1] < task.lr / 100
