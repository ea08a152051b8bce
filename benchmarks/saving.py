"""One training that saves every twenty steps, timed: `python -m benchmarks.saving grappe` prints seconds of ten steps.

The network is four layers of 1,024 units with Adam, 50 MB of state, on one thread; a step takes about 0.1 s. Every
contender takes the same steps on the same kind of batch, and differs in how it saves. Ten steps with a save in them
are held against the ten steps that follow, of the same process.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Adam, Optimizer

WIDTH, LAYERS, BATCH, EVERY = 1024, 4, 256, 20
NEVER = 10**9


def network() -> nn.Module:
    """Makes the network, with the same weights in every process."""
    torch.manual_seed(0)
    layers = [layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers)


def samples() -> tuple[Tensor, Tensor]:
    """x [64 BATCH, WIDTH], y [64 BATCH]."""
    source = torch.Generator().manual_seed(0)
    return torch.randn(64 * BATCH, WIDTH, generator=source), torch.randint(WIDTH, (64 * BATCH,), generator=source)


class Clock:
    """Told of each step's end. Every twentieth step saves: ten steps from there on are held against the ten behind."""

    def __init__(self) -> None:
        self._ends: list[float] = []

    def tick(self) -> None:
        self._ends.append(time.perf_counter())

    def stretches(self) -> list[tuple[float, float]]:
        """Seconds of ten steps that a save lies in, and of the ten steps behind them; the first save is left out."""
        found = []
        for save in range(2 * EVERY, len(self._ends) - EVERY + 1, EVERY):
            first, middle, last = (self._ends[save - 2 + steps] for steps in (0, EVERY // 2, EVERY))
            found.append((middle - first, last - middle))
        return found


def by_hand(steps: int, clock: Clock, save: Callable[[int, dict[str, Any]], None]) -> None:
    """The plain loop; `save` gets a step and the state."""
    net, (x, y) = network(), samples()
    optimizer = Adam(net.parameters())
    for step in range(1, steps + 1):
        rows = torch.randint(len(x), (BATCH,))
        optimizer.zero_grad()
        F.cross_entropy(net(x[rows]), y[rows]).backward()
        optimizer.step()
        if step % EVERY == 0:
            save(step, {"model": net.state_dict(), "optimizer": optimizer.state_dict()})
        clock.tick()


def torch_save(steps: int, folder: Path, clock: Clock) -> None:
    """torch.save as a person writes it: no flush to disk, one file that is written over."""
    by_hand(steps, clock, lambda step, state: torch.save(state, folder / "checkpoint.pt"))


def dcp(steps: int, folder: Path, clock: Clock) -> None:
    """torch.distributed.checkpoint in the background, the save before waited for."""
    import torch.distributed as dist
    from torch.distributed import checkpoint

    dist.init_process_group("gloo", init_method=f"file://{folder / 'meet'}", rank=0, world_size=1)
    pending: list[Any] = []

    def save(step: int, state: dict[str, Any]) -> None:
        if pending:
            pending.pop().result()
        pending.append(checkpoint.async_save(state, checkpoint_id=folder / f"step-{step}"))

    by_hand(steps, clock, save)
    if pending:
        pending.pop().result()
    dist.destroy_process_group()


def lightning(steps: int, folder: Path, clock: Clock) -> None:
    """Lightning's Trainer with its ModelCheckpoint, everything else that can be off, off."""
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint
    from torch.utils.data import DataLoader, TensorDataset

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = network()

        def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return Adam(self.parameters())

    class Tick(Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            clock.tick()

    trainer = Trainer(
        accelerator="cpu",
        max_steps=steps,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=folder, every_n_train_steps=EVERY), Tick()],
    )
    # ModelCheckpoint is moved behind all other callbacks, so a save counts to the step behind it: one of the same ten.
    trainer.fit(Module(), DataLoader(TensorDataset(*samples()), batch_size=BATCH, shuffle=True))


def grappe(steps: int, folder: Path, clock: Clock) -> None:
    """Does the same as each process of `grappe train`, with checkpoints flushed, hashed and committed."""
    from grappe import Arrays, Task
    from grappe.launch.world import ProcessRank
    from grappe.plan import as_plan
    from grappe.training.loop import Training
    from grappe.training.options import Options
    from grappe.training.request import Request
    from grappe.training.task_reference import TaskReference
    from grappe.training.worker import worker

    class Wide(Task):
        def model(self) -> nn.Module:
            return network()

        def data(self, split: str, folder: Path) -> Arrays:
            return Arrays(*samples())

        def loss(self, output: Tensor, target: Tensor) -> Tensor:
            return F.cross_entropy(output, target, reduction="none")

        def optimizer(self, named_parameters: Iterable[tuple[str, nn.Parameter]]) -> Optimizer:
            return Adam(named_parameters)

    after = Training.after

    def timed(self: Training, result: Any) -> bool:
        stop = after(self, result)
        clock.tick()
        return stop

    Training.after = timed  # type: ignore[method-assign]
    # One step more than is timed: the last one evaluates and waits for the disk.
    task = Wide(epochs=NEVER, batch_size=BATCH)
    options = Options(evaluate_every=NEVER, save_every=EVERY, steps=steps + 1, keep=1)
    request = Request(
        task=TaskReference.of(task), plan=as_plan("device=cpu,threads=1"), run=folder / "run", options=options
    )
    process = ProcessRank(rank=0, size=1, local_rank=0, local_size=1, launcher="torchrun")
    worker(request, process, folder)
    clock._ends.pop()


CONTENDERS = {one.__name__: one for one in (torch_save, dcp, lightning, grappe)}


def main() -> None:
    """Trains and prints."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.saving", description=__doc__)
    parser.add_argument("contender", choices=CONTENDERS)
    parser.add_argument("--steps", type=int, default=4 * EVERY)
    options = parser.parse_args()
    torch.set_num_threads(1)
    clock = Clock()
    with tempfile.TemporaryDirectory(prefix="grappe-bench-", dir=".") as folder:
        CONTENDERS[options.contender](options.steps, Path(folder).resolve(), clock)
    print(json.dumps(clock.stretches()))


if __name__ == "__main__":
    main()
