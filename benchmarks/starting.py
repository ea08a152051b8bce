"""One short training, begun as its users begin it, that says when its first step is done.

    python -m benchmarks.starting plain          torchrun --nproc-per-node 2 -m benchmarks.starting plain

Everyone trains benchmarks.tiny's network on the same rows with the same optimizer, which writes down when its first
step was done: the system's monotonic clock, to the file that FIRST names.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.optim import SGD

from benchmarks import tiny

FIRST = "GRAPPE_BENCH_FIRST"
STEPS = 20


class Told(SGD):
    """SGD that says once, in process 0, when a step is done."""

    _said = False

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        if not self._said:
            self._said = True
            if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
                Path(os.environ[FIRST]).write_text(str(time.monotonic()))
        return found


def batches(rank: int = 0, size: int = 1) -> Any:
    """STEPS batches (x [BATCH, WIDTH], y [BATCH]) of a process."""
    x, y = tiny.samples()
    for ids in torch.randperm(len(x))[rank::size].split(tiny.BATCH)[:STEPS]:
        yield x[ids], y[ids]


def loop(net: Any, optimizer: Any, backward: Any, rows: Any) -> None:
    """The loop as a person writes it."""
    for x, y in rows:
        optimizer.zero_grad()
        loss = F.cross_entropy(net(x), y)
        backward(loss)
        optimizer.step()


def optimizer(net: Any) -> Told:
    """Of a network's parameters."""
    return Told(net.parameters(), lr=tiny.LR)


def plain(processes: int) -> None:
    """PyTorch, with DistributedDataParallel on several processes."""
    net: Any = tiny.network()
    rank = 0
    if processes > 1:
        torch.distributed.init_process_group("gloo")
        rank, net = torch.distributed.get_rank(), torch.nn.parallel.DistributedDataParallel(net)
    loop(net, optimizer(net), torch.Tensor.backward, batches(rank, processes))
    if processes > 1:
        torch.distributed.destroy_process_group()


def fabric(processes: int) -> None:
    """Lightning Fabric."""
    from lightning.fabric import Fabric

    made = Fabric(accelerator="cpu", devices=processes, strategy="ddp" if processes > 1 else "auto")
    made.launch()
    net = tiny.network()
    net, steps = made.setup(net, optimizer(net))
    loop(net, steps, made.backward, batches(made.global_rank, processes))


def accelerate(processes: int) -> None:
    """Accelerate."""
    from accelerate import Accelerator

    made = Accelerator(cpu=True)
    assert made.num_processes == processes
    net = tiny.network()
    net, steps = made.prepare(net, optimizer(net))
    loop(net, steps, made.backward, batches(made.process_index, processes))
    made.end_training()


def trainer(processes: int) -> None:
    """Lightning's Trainer as it is by default, but for its bar: its log of curves and its checkpoint are on."""
    from lightning.pytorch import LightningModule, Trainer
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = tiny.network()

        def training_step(self, batch: Any) -> Any:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return optimizer(self)

    made = Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        max_steps=STEPS,
        enable_progress_bar=False,
    )
    made.fit(Module(), DataLoader(TensorDataset(*tiny.samples()), batch_size=tiny.BATCH, shuffle=True))


CONTENDERS = {one.__name__: one for one in (plain, fabric, accelerate, trainer)}


def main() -> None:
    """Trains."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.starting", description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    CONTENDERS[options.contender](options.processes)


if __name__ == "__main__":
    main()
