"""One model evaluated again and again: `torchrun --nproc-per-node 2 -m benchmarks.evaluating loader` prints JSON.

The page's small CIFAR-10 network on random images, ROWS of them: an odd number, which no two processes share evenly.
Everyone normalises bytes, adds up the loss, and counts right answers; what differs is who brings the rows.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from grappe import Arrays, normalise
from grappe.tasks.cifar10 import Cifar10, Small

ROWS, BATCH, PASSES = 10_001, 512, 5  # images; of all processes; timed, behind one that is not
Pass = Callable[[], tuple[float, float]]  # samples that were counted, their mean loss; on process 0


def images() -> tuple[Tensor, Tensor]:
    """x [ROWS, 3, 32, 32] of bytes, y [ROWS]; the same in every process."""
    source = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (ROWS, 3, 32, 32), generator=source, dtype=torch.uint8)
    return x, torch.randint(10, (ROWS,), generator=source)


def model() -> nn.Module:
    """Makes the model, with the same weights in every process."""
    torch.manual_seed(0)
    return Small()


def normalised(x: Tensor) -> Tensor:
    """[B, 3, 32, 32], from 0 to 255 to -1 to 1."""
    return (x.float() / 255 - 0.5) / 0.5


def process() -> tuple[int, int]:
    """This process's rank, and how many there are."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def total(net: nn.Module, batches: Iterable[Any]) -> tuple[float, float]:
    """The loop as a person writes it, and what the processes add up in the end."""
    net.eval()
    sums = torch.zeros(3, dtype=torch.double)
    with torch.no_grad():
        for x, y in batches:
            output = net(normalised(x))
            right = (output.argmax(1) == y).sum()
            sums += torch.stack([torch.tensor(len(y)), F.cross_entropy(output, y, reduction="sum"), right])
    if dist.is_initialized():
        dist.all_reduce(sums)
    return sums[0].item(), (sums[1] / sums[0]).item()


def handwritten() -> Pass:
    """Rows of a tensor in memory, cut into slices by hand."""
    rank, size = process()
    if size > 1:
        dist.init_process_group("gloo")
    (x, y), net = images(), model()
    x, y = x[rank::size], y[rank::size]
    return lambda: total(net, zip(x.split(BATCH // size), y.split(BATCH // size), strict=True))


def loader() -> Pass:
    """A DataLoader with a DistributedSampler, as the pages have them for training."""
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    _, size = process()
    rows, net = TensorDataset(*images()), model()
    sampler = None
    if size > 1:
        dist.init_process_group("gloo")
        sampler = DistributedSampler(rows, shuffle=False)
    batches = DataLoader(rows, batch_size=BATCH // size, sampler=sampler)
    return lambda: total(net, batches)


def accelerate() -> Pass:
    """Accelerate's prepare, and its gather_for_metrics."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader, TensorDataset

    made, (_, size) = Accelerator(cpu=True), process()
    net, batches = made.prepare(model(), DataLoader(TensorDataset(*images()), batch_size=BATCH // size))

    def once() -> tuple[float, float]:
        net.eval()
        seen, loss, right = 0, 0.0, 0
        with torch.no_grad():
            for x, y in batches:
                output, target = made.gather_for_metrics((net(normalised(x)), y))
                seen += len(target)
                loss += F.cross_entropy(output, target, reduction="sum").item()
                right += (output.argmax(1) == target).sum().item()
        return seen, loss / seen

    return once


def trainer() -> Pass:
    """Lightning's Trainer.validate with torchmetrics."""
    import logging
    import warnings

    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset
    from torchmetrics import MeanMetric
    from torchmetrics.classification import MulticlassAccuracy

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.seen = model(), 0
            self.loss, self.accuracy = MeanMetric(), MulticlassAccuracy(10, average="micro")

        def validation_step(self, batch: Any) -> None:
            x, y = batch
            output = self.net(normalised(x))
            self.loss.update(F.cross_entropy(output, y), len(y))
            self.accuracy.update(output, y)
            self.seen += len(y)
            self.log("loss", self.loss)
            self.log("accuracy", self.accuracy)

    _, size = process()
    made = Trainer(
        accelerator="cpu",
        devices=size,
        strategy="ddp" if size > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module, rows = Module(), DataLoader(TensorDataset(*images()), batch_size=BATCH // size)

    def once() -> tuple[float, float]:
        module.seen = 0
        (found,) = made.validate(module, rows, verbose=False)
        seen = torch.tensor(float(module.seen))
        if size > 1:
            dist.all_reduce(seen)
        return seen.item(), found["loss"]

    return once


class Random(Cifar10):
    """The shipped task on the random images."""

    batch_size: int = BATCH

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(*images(), transform=normalise((0.5,) * 3, (0.5,) * 3))


def grappe() -> Pass:
    """Does the same as each process of `grappe evaluate`."""
    from grappe import engines
    from grappe.checkpoint.initial import built
    from grappe.data import loader
    from grappe.engines.base import EngineSetup
    from grappe.launch.files import rendezvous_folder_of
    from grappe.launch.rank import rank_from_environment
    from grappe.launch.world import ProcessRank, join
    from grappe.plan import Plan

    _, size = process()
    plan = Plan.parse(f"device=cpu,threads=1,replicate={size}")
    where = rank_from_environment() or ProcessRank()
    world = join(plan, where, rendezvous_folder_of(where, None))
    task = Random()
    batches = loader.evaluation_loader(task, task.data("test", Path()), plan, world)
    setup = EngineSetup(
        task=task, plan=plan, world=world, weights=built(task), total_steps=1,
        sample_inputs=batches.example(),
    )  # fmt: skip
    engine = engines.check(plan)(setup)

    def every() -> Iterator[Any]:
        return batches.batches(0, batches.order.steps_per_epoch)

    def once() -> tuple[float, float]:
        found = engine.evaluate(every(), batches.order.length)
        return found.samples, found.loss

    return once


CONTENDERS = {one.__name__: one for one in (handwritten, loader, accelerate, trainer, grappe)}


def main() -> None:
    """Evaluates, and prints what process 0 found: seconds of each pass, samples that were counted, the loss."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.evaluating", description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        os.chdir(folder)  # for what Lightning leaves behind
        once = CONTENDERS[options.contender]()
        seconds, found = [], (0.0, 0.0)
        for _ in range(PASSES + 1):
            began = time.perf_counter()
            found = once()
            seconds.append(time.perf_counter() - began)
        os.chdir("/")
    if process()[0] == 0:
        print(json.dumps({"seconds": seconds[1:], "samples": found[0], "loss": found[1]}), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
