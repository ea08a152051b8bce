"""Every augmentation at once: the same samples, losses and weights under every plan, and after a kill."""

from pathlib import Path

import pytest
import torch
from torch import nn

from grappe import Arrays
from grappe.data import Normalise, augment
from grappe.plan import Plan
from grappe.tasks.imagenet import ImageNet
from grappe.verbs.verify.verify import verify
from tests.data.images.pictures import CLASSES, files, folder
from tests.faults.resuming import check_same_bits
from tests.parity import planted
from tests.parity.cell import TOLERANCE, difference
from tests.parity.tasks import Images
from tests.processes import Pool

STEPS = 5
SIDE = 8


class Augmented(Images):
    """Bytes that pass through all of grappe.data.augment; the last batch of an epoch is short."""

    batch_size: int = 16
    samples: int = 40

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(Normalise(), nn.Conv2d(3, 8, 3, padding=1), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU()),
            nn.Sequential(nn.Flatten(), nn.Linear(8 * 9, 16), nn.Tanh()),
            nn.Linear(16, 5),
        )

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(5)
        images = torch.randint(0, 256, (self.samples, 3, SIDE, SIDE), dtype=torch.uint8, generator=generator)
        return Arrays(images, torch.arange(self.samples) % 5)

    def augment(self, inputs, targets, keys):
        inputs = augment.pad_and_crop(augment.flip(inputs, keys), keys, 2)
        inputs = augment.random_resized_crop(inputs, keys, SIDE, area=(0.3, 1.0))
        inputs = augment.colour_jitter(inputs, keys, hue=0.1)
        inputs = augment.trivial_augment(augment.rand_augment(inputs, keys), keys)
        inputs = augment.erase(augment.auto_augment(inputs, keys), keys)
        return augment.mixup_or_cutmix(inputs, targets, keys, 5)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none", label_smoothing=0.1)


def plain() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights of a loop written by hand, which augments each global batch as a whole."""
    from grappe.data.draw import sample_keys
    from grappe.data.sampling import SampleOrder

    task = Augmented()
    torch.manual_seed(task.seed)
    model, data = task.model(), task.data("train", Path())
    order = SampleOrder(seed=task.seed, length=len(data), batch_size=task.batch_size)
    optimizer = task.optimizer(model.named_parameters())
    schedule = task.schedule(optimizer, task.epochs * order.steps_per_epoch)
    losses = []
    for step in range(STEPS):
        epoch, within = divmod(step, order.steps_per_epoch)
        ids = order.ids(epoch, within)
        keys = torch.from_numpy(sample_keys(task.seed, epoch, ids))
        inputs, targets = task.augment(data.inputs[ids], data.targets[ids], keys)
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets).mean()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses, {name: tensor.detach() for name, tensor in model.named_parameters()}


@pytest.mark.parametrize(
    "plan",
    [
        "replicate=3", "shard=2,microbatches=2", "pipeline=2,microbatches=4", "exact=4,replicate=2",
        "engine=textbook,replicate=2", "engine=lightning,replicate=2", "engine=deepspeed,shard=2,zero=1",
    ],
)  # fmt: skip
def test_every_plan_learns_what_a_plain_loop_does(pool: Pool, plan: str) -> None:
    losses, weights = plain()
    found = pool.run("tests.parity.cell:train", Plan.parse(plan).processes, Augmented(), plan, STEPS)[0]
    mine = {name: tensor for name, tensor in found["weights"].items() if name in weights}
    gap, name = difference(weights, mine)
    assert gap <= TOLERANCE, f"{plan}: {name} is {gap:.1e} away"
    assert found["losses"] == pytest.approx(losses, rel=1e-5)


def test_verify_finds_nothing(pool: Pool) -> None:
    [found] = verify(Augmented(samples=64), ["replicate=2,threads=1"], run=planted.runner(pool, ""))
    assert found.verdict == "same", found


@pytest.mark.parametrize("plan", ["workers=2", "replicate=2,workers=0"])
def test_imagenet_with_everything_goes_on_to_the_same_bits_after_a_kill(pool: Pool, tmp_path: Path, plan: str) -> None:
    task = ImageNet(
        epochs=2, batch_size=10, network="resnet18", classes=len(CLASSES), image_size=32, ema=0.9,
        mixup=0.2, cutmix=1.0, policy="trivial", jitter=0.4, erasing=0.25, schedule_shape="onecycle",
    )  # fmt: skip
    for part in ("train", "validation"):
        folder(tmp_path / part, files())
    check_same_bits(pool, task, plan, tmp_path, (2, 3, 2))
