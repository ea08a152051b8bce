"""Faults, planted into engines, the loader and tasks, for verify to find; and the processes they are planted in."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset

from grappe.data.batch import Batch, Microbatch
from grappe.data.draw import mix
from grappe.data.loader import BatchLoader
from grappe.data.sampling import SampleOrder
from grappe.engines import native
from grappe.engines.shared import microbatch
from grappe.launch.rank import ProcessRank
from grappe.plan import Plan
from grappe.rows import exchange
from grappe.rows.context import NOW
from grappe.rows.exchange import RowExchange
from grappe.step.loss import Losses
from grappe.step.whole_batch_loss import WholeBatchLosses
from tests.parity.tasks import Images, Tokens
from tests.processes import Pool

Planted = Callable[[], contextlib.AbstractContextManager]


def runner(pool: Pool, fault: str = "") -> Callable[[str, Any, Plan], Any]:
    """Starts processes for verify: a pool's, with a planted fault."""

    def run(function: str, request: Any, plan: Plan) -> Any:
        return pool.run(f"{__name__}:planted", plan.processes, function, request, fault)[0]

    return run


def planted(process: ProcessRank, rendezvous_folder: Path, function: str, request: Any, fault: str) -> Any:
    """One process."""
    import importlib

    module, _, name = function.partition(":")
    work = getattr(importlib.import_module(module), name)
    with FAULTS[fault]() if fault else contextlib.nullcontext():
        return work(request, process, rendezvous_folder)


# ---- In engines and the loader; one plain process shares none of these -------------------------------------


def no_synchronised_batchnorm() -> Any:
    return mock.patch("grappe.parallel.parallelize.synchronise_batchnorm", lambda *_: None)


def alike_dropout() -> Any:
    """Every process draws the same masks."""
    return mock.patch.object(microbatch, "whole_batch_draws", lambda _: contextlib.nullcontext())


def still_dropout() -> Any:
    """Every step draws the same masks."""

    def seed(seed: int, step: int, device: torch.device, *place: int) -> None:
        torch.manual_seed(mix(seed, *place))

    return mock.patch.object(microbatch, "seed_dropout", seed)


def fresh_dropout() -> Any:
    """Every start draws other masks."""
    return mock.patch.object(microbatch, "seed_dropout", lambda *_: torch.seed())


def means_of_means() -> Any:
    """Each process divides by its own slice's size, as a loss that averages under DDP does."""
    gradient = Losses._output_gradient

    def local(self: Losses, values: Any, micro: Microbatch, batch: Batch, scale: float) -> Any:
        mine = batch._replace(count=float(2 * len(batch.ids)))
        return gradient(self, values, micro, mine, scale)

    return mock.patch.object(Losses, "_output_gradient", local)


def counts_of_slices() -> Any:
    """Each process divides by what counts in its own slice, twice over."""
    return mock.patch("grappe.data.batch._total", lambda mine, exact, group: 2 * mine.sum(0))


def silent_bf16() -> Any:
    return mock.patch.object(native, "autocast", lambda *_: torch.autocast("cpu", torch.bfloat16))


def no_division_by_microbatches() -> Any:
    gradient = Losses._output_gradient

    def summed(self: Losses, values: Any, micro: Microbatch, batch: Batch, scale: float) -> Any:
        return gradient(self, values, micro, batch, scale * len(batch.microbatches))

    return mock.patch.object(Losses, "_output_gradient", summed)


def larger_loss() -> Any:
    """Process 1's loss is a tenth too large, in its curve and in its gradient."""
    loss = Losses.__call__

    def larger(self: Losses, *arguments: Any) -> Any:
        found = loss(self, *arguments)
        if not dist.is_initialized() or dist.get_rank() != 1:
            return found
        return found._replace(output_gradient=found.output_gradient * 1.1, total=found.total * 1.1)

    return mock.patch.object(Losses, "__call__", larger)


def larger_gradient() -> Any:
    """Process 1's gradient is a hundredth too large, its loss is right."""
    gradient = Losses._output_gradient

    def larger(self: Losses, *arguments: Any) -> Any:
        return gradient(self, *arguments) * (1.01 if dist.is_initialized() and dist.get_rank() == 1 else 1.0)

    return mock.patch.object(Losses, "_output_gradient", larger)


def larger_gradient_of_the_whole_batch() -> Any:
    """Process 1's gradient of a loss that compares samples is a tenth too large."""
    own_gradient = WholeBatchLosses._own_gradient

    def larger(self: WholeBatchLosses, gradient: Any) -> Any:
        factor = 1.1 if dist.is_initialized() and dist.get_rank() == 1 else 1.0
        return None if gradient is None else own_gradient(self, gradient) * factor

    return mock.patch.object(WholeBatchLosses, "_own_gradient", larger)


def shuffled_targets() -> Any:
    """Process 1's targets are one place away from their inputs."""
    microbatch = BatchLoader._microbatch

    def moved(self: BatchLoader, *arguments: Any) -> Microbatch:
        found = microbatch(self, *arguments)
        if self._world.rank != 1:
            return found
        target, places = found.targets
        rolled = [target[-1], *target[:-1]] if isinstance(target, list) else target.roll(1, 0)
        return found._replace(targets=(rolled, places))

    return mock.patch.object(BatchLoader, "_microbatch", moved)


def off_by_one() -> Any:
    blocks = SampleOrder.blocks

    def shifted(self: SampleOrder, start: int, stop: int) -> Iterator:
        for step, epoch, ids in blocks(self, start, stop):
            first = step % self.steps_per_epoch * self.batch_size + 1
            yield step, epoch, self.order(epoch, 0, self.length)[first : first + len(ids)]

    return mock.patch.object(SampleOrder, "blocks", shifted)


def doubled_sample() -> Any:
    """The second slice's first sample is the first slice's last."""
    slices = BatchLoader.slices

    def doubled(self: BatchLoader, start: int, stop: int) -> Iterator:
        for part in slices(self, start, stop):
            if self._world.data_rank == 1:
                ids = part.ids.copy()
                everyone = self.order.ids(part.epoch, part.step % self.order.steps_per_epoch)
                ids[0] = everyone[len(everyone) - len(ids) - 1]
                yield part._replace(ids=ids, pieces=(ids,))
            else:
                yield part

    return mock.patch.object(BatchLoader, "slices", doubled)


def dropped_last_batch() -> Any:
    return mock.patch.object(
        SampleOrder, "steps_per_epoch", property(lambda self: max(1, self.length // self.batch_size))
    )


def no_halos() -> Any:
    """The rows of neighbours are zeros."""
    bring = RowExchange.bring

    def zeros(self: RowExchange, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        head, middle, tail = bring(self, own)
        fake = (torch.zeros_like(head), middle, torch.zeros_like(tail))
        return fake if self.purpose == "halos" else (head, middle, tail)

    return mock.patch.object(RowExchange, "bring", zeros)


def halos_of_the_other_side() -> Any:
    """The rows of neighbours are a process's own, of its other side."""
    bring = RowExchange.bring

    def own_rows(self: RowExchange, own: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        head, middle, tail = bring(self, own)
        if self.purpose != "halos":
            return head, middle, tail
        before, after, length = head.shape[self.dim], tail.shape[self.dim], own.shape[self.dim]
        return own.narrow(self.dim, length - before, before).clone(), middle, own.narrow(self.dim, 0, after).clone()

    return mock.patch.object(RowExchange, "bring", own_rows)


def halos_without_gradient() -> Any:
    """Loses the gradients of neighbours' rows."""
    send = exchange.send

    def lost(to: dict[int, torch.Tensor], arriving: dict[int, torch.Tensor], purpose: str) -> None:
        send(to, arriving, purpose)
        if inspect.stack()[1].function == "give_back":
            for rows in arriving.values():
                rows.zero_()

    return mock.patch.object(exchange, "send", lost)


def norms_of_parts() -> Any:
    """Each process normalises its own part by itself."""
    return mock.patch("grappe.rows.norms.summed", lambda own, *_: own * NOW.context.size)


def gradient_times_the_degree() -> Any:
    gradient = Losses._output_gradient

    def larger(self: Losses, *arguments: Any) -> Any:
        return self._processes * gradient(self, *arguments)

    return mock.patch.object(Losses, "_output_gradient", larger)


def mask_that_is_shifted() -> Any:
    """Queries of the second part see one key fewer than they may."""
    brought = RowExchange.brought

    def shifted(self: RowExchange, own: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        rows = brought(self, own, *arguments, **options)
        return torch.cat([rows[:, :, :1], rows[:, :, :-1]], 2) if self.purpose == "attention" else rows

    return mock.patch.object(RowExchange, "brought", shifted)


FAULTS: dict[str, Planted] = {
    name: globals()[name]
    for name in (
        "no_synchronised_batchnorm", "alike_dropout", "still_dropout", "fresh_dropout", "means_of_means",
        "counts_of_slices", "silent_bf16", "larger_loss", "larger_gradient",
        "larger_gradient_of_the_whole_batch", "shuffled_targets",
        "no_halos", "halos_of_the_other_side", "halos_without_gradient", "norms_of_parts",
        "gradient_times_the_degree", "mask_that_is_shifted",
        "no_division_by_microbatches", "off_by_one", "doubled_sample", "dropped_last_batch",
    )
}  # fmt: skip


# ---- In the user's task ------------------------------------------------------------------------------------


class Averaging(Tokens):
    """A loss that divides by how many tokens count in the rows it is given, and says nothing of counts."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        values = super().loss(output, target)
        return values * (values.numel() / (target >= 0).sum())

    def counts(self, target: torch.Tensor) -> None:
        return None


class Placed(Images):
    """A loss whose weights go by the rows' places in the batch."""

    samples: int = 64

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        values = super().loss(output, target)
        return values * torch.linspace(0.5, 1.5, len(values))


class Moody(Dataset):
    """Noise from a generator that no attribute holds, and that continues from sample to sample."""

    def __init__(self, arrays: Any) -> None:
        self._arrays, self._draw = arrays, np.random.default_rng(1).normal

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: int) -> tuple:
        inputs, target = self._arrays[index]
        return inputs + float(self._draw()) / 4, target


class Noisy(Images):
    def data(self, split: str, folder: Path) -> Dataset:
        return Moody(super().data(split, folder))


class Jittery(Images):
    """Augmentation from torch's global generator, not from the samples' keys."""

    def augment(self, inputs: Any, targets: Any, keys: Any) -> Any:
        return inputs + torch.randn(len(inputs), 1, 1, 1) / 4, targets


class Centre(nn.Module):
    """Subtracts what it has seen on average so far, in this process."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = x - self.seen
        with torch.no_grad():
            self.seen = self.seen.lerp(x.mean(0), 0.5)
        return out


class Centred(Images):
    def model(self) -> nn.Module:
        model = super().model()
        model[2].append(Centre())
        return model


class Whitening(nn.Module):
    """Batch normalisation by another name, the same in training and evaluation."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3)


class Whitened(Images):
    def model(self) -> nn.Module:
        model = super().model()
        model[2].insert(2, Whitening())
        return model


# ---- Models without a fault --------------------------------------------------------------------------------


class Twice(Images):
    """A normalisation of what is normalised already: the mean that it keeps is nothing but rounding."""

    def model(self) -> nn.Module:
        norm = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1, bias=False), nn.BatchNorm2d(3))
        return nn.Sequential(norm, *super().model())


class Attending(nn.Module):
    """Self-attention with dropout; the bias of its keys has a gradient of nothing but rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, dropout=0.3, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = torch.stack([x, x.roll(1, -1), x * x], 1)
        return x + self.attention(tokens, tokens, tokens)[0].mean(1)


class Gumbel(nn.Module):
    """Draws from an exponential distribution."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 4 * torch.nn.functional.gumbel_softmax(x)


class Shared(nn.Module):
    """One batch normalisation, called twice in a forward."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.narrow = nn.BatchNorm1d(16), nn.Linear(16, 16, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.narrow(self.norm(x)))


class With(Images):
    """Images with one module more."""

    kind: Literal["attending", "gumbel", "shared", "spectral"] = "shared"

    def model(self) -> nn.Module:
        model = super().model()
        more = {
            "attending": Attending,
            "gumbel": Gumbel,
            "shared": Shared,
            "spectral": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16)),
        }
        model[2].insert(2, more[self.kind]())
        return model
