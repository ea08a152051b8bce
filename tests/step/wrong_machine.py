"""A process that computes wrongly, in a training of the tests' pool: one operator's output is altered at each call."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from grappe import Arrays, Task
from grappe.checkpoint.format import Retention
from grappe.checkpoint.saver import Saver, Snapshots
from grappe.checkpoint.tensor_file import Piece
from grappe.data.batch import Batch
from grappe.data.loader import BatchLoader
from grappe.errors import ComputedWrongly
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan
from grappe.step import cross_check
from grappe.tasks.digits import Digits
from tests.parity.cell import engine_of
from tests.parity.planted import With
from tests.parity.tasks import Images, Tokens


class Attending(Task):
    """A layer of a transformer, with dropout, over a sequence of vectors."""

    epochs: int = 4
    batch_size: int = 16

    def model(self) -> nn.Module:
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        return nn.Sequential(nn.Linear(4, 8), layer, nn.Flatten(), nn.Linear(40, 3))

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(7)
        return Arrays(torch.randn(64, 5, 4, generator=generator), torch.randint(0, 3, (64,), generator=generator))

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=0.003)


class Recurrent(Attending):
    """A GRU over the same vectors."""

    def model(self) -> nn.Module:
        return Last(4, 8)


class Remembering(Recurrent):
    """The same with an LSTM of two layers, and dropout between them."""

    def model(self) -> nn.Module:
        model = Last(4, 8)
        model.gru = nn.LSTM(4, 8, num_layers=2, dropout=0.1, batch_first=True)
        return model


class Last(nn.Module):
    """The GRU's last output, classified."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(inputs, width, batch_first=True), nn.Linear(width, 3)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(self.gru(inputs)[0][:, -1])


TASKS: dict[str, Callable[[int], Task]] = {
    "images": lambda seed: Images(seed=seed, batch_size=16, samples=64, epochs=4, batchnorm=True, dropout=0.1),
    "tokens": lambda seed: Tokens(seed=seed, batch_size=16, samples=64, epochs=4),
    "attending": lambda seed: Attending(seed=seed),
    "recurrent": lambda seed: Recurrent(seed=seed),
    "digits": lambda seed: Digits(seed=seed, batch_size=16),
}
EVERY = 4
SOUND: dict[str, Task] = {
    **{name: make(0) for name, make in TASKS.items()},
    "adam": Images(rule="adam", clip=0.5, batch_size=16, samples=64),
    "unused": Images(unused=True, batch_size=16, samples=61),
    "shared": With(kind="shared", samples=40, batch_size=16),
    "remembering": Remembering(),
    "clipped tokens": Tokens(rule="sgd", samples=41, batch_size=18),
}
"""Ten tasks that are trained without a fault, some with short last batches."""
OPERATORS = {
    "images": ("convolution", "addmm", "relu", "tanh", "native_batch_norm", "_log_softmax", "mm",
               "convolution_backward", "threshold_backward", "native_batch_norm_backward"),
    "tokens": ("embedding", "native_layer_norm", "gelu", "addmm", "mm", "_log_softmax", "gelu_backward",
               "native_layer_norm_backward", "embedding_dense_backward"),
    "attending": ("addmm", "mm", "bmm", "_safe_softmax", "native_layer_norm", "relu", "_log_softmax",
                  "_softmax_backward_data", "sum"),
    "digits": ("convolution", "relu", "max_pool2d_with_indices", "addmm", "mm", "convolution_backward",
               "nll_loss_backward", "threshold_backward"),
    "recurrent": ("addmm", "mm", "sub", "mul", "_log_softmax", "sigmoid_backward", "tanh_backward"),
}  # fmt: skip
"""Operators of each task's forward and backward."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Operator that one process computes wrongly, from the step `begins` on."""

    task: str
    plan: str
    operator: str
    form: str
    """One bit of one number; that number stuck at 0.5; a bit of every eighth; a matrix product's sums reversed."""
    place: float
    """The number, as a part of all; then the bit, as a part of a number's."""
    bit: float
    rank: int
    begins: int
    seed: int


def drawn_faults(count: int, size: int, seed: int) -> list[Fault]:
    """Draws faults of one of `size` processes."""
    chance, faults = random.Random(seed), list[Fault]()
    for _ in range(count):
        task = chance.choice(list(OPERATORS))
        form = chance.choice(("bit", "bit", "bit", "stuck", "column", "sums"))
        operator = chance.choice(("mm", "addmm") if form == "sums" else OPERATORS[task])
        precision = chance.choice(("", "", ",precision=bf16", ",precision=fp64"))
        plan = f"device=cpu,replicate={size},exact={chance.choice((size, 2 * size))},check={EVERY}{precision}"
        place, bit, rank, seed = chance.random(), chance.random(), chance.randrange(size), chance.randrange(1000)
        faults.append(Fault(task, plan, operator, form, place, bit, rank, chance.randrange(EVERY), seed))
    return faults


class Faulty(TorchDispatchMode):
    """Context in which the operator's output is altered."""

    def __init__(self, fault: Fault) -> None:
        super().__init__()
        self.fault = fault

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function._schema.name.removeprefix("aten::")
        if self.fault.form == "sums" and name == self.fault.operator and name in ("mm", "addmm", "bmm"):
            *bias, left, right = args
            return function(*bias, left.flip(-1), right.flip(-2), **(kwargs or {}))
        result = function(*args, **(kwargs or {}))
        if name == self.fault.operator:
            first = result if isinstance(result, Tensor) else next(t for t in result if isinstance(t, Tensor))
            if first.is_floating_point() and first.numel() and first.is_contiguous():
                self._alter(first)
        return result

    def _alter(self, tensor: Tensor) -> None:
        fault, flat = self.fault, tensor.detach().view(-1)
        at = int(fault.place * flat.numel())
        if fault.form == "stuck":
            flat[at] = 0.5
            return
        bits = flat.view(cross_check.INTEGERS[flat.element_size()])
        size = 8 * flat.element_size()
        bit = min(int(fault.bit * size), size - 1)
        flip = -(1 << bit) if bit == size - 1 else 1 << bit
        bits[slice(at % 8, None, 8) if fault.form == "column" else slice(at, at + 1)] ^= flip


def prepared(task: Task, text: str, process: ProcessRank, folder: Path) -> tuple[Any, BatchLoader]:
    """Makes an engine in a world of its own, and the loader of its batches."""
    plan = Plan.parse(f"{text},threads=1")
    world = join(plan, process, folder)
    return engine_of(task, plan, world, task.data("train", Path()), total_steps=1000)


def planted(process: ProcessRank, folder: Path, faults: list[Fault], steps: int):
    """Trains with one fault after the other, each until it is found; returns what this process saw."""
    return [
        _planted(fault, steps, dataclasses.replace(process, job=f"{process.job}-{number}"), folder)
        for number, fault in enumerate(faults)
    ]


class Seen(NamedTuple):
    """Observations of a process under a fault."""

    altered: list[tuple[int, int]]
    """On the faulty process: the steps and pieces whose gradients it altered."""
    found: int | None
    diverged: bool
    said: str


def _planted(fault: Fault, steps: int, process: ProcessRank, folder: Path) -> Seen:
    engine, loader = prepared(TASKS[fault.task](fault.seed), fault.plan, process, folder)
    check, world = engine._check, engine._check._world
    note, faulty, altered = check.note, Faulty(fault), list[tuple[int, int]]()
    found, diverged, said = None, False, ""

    def noted(batch: Batch, index: int, gradients: list[Tensor | None]) -> None:
        note(batch, index, gradients)
        if process.rank == fault.rank and batch.step >= fault.begins:
            for parameter in engine._parameters:
                parameter.grad = None
            with _disable_current_modes():
                sound = check._gradient(batch, batch.microbatches[index], world.data_rank * check._pieces + index)
            if cross_check._digest(sound) != cross_check._digest(gradients):
                altered.append((batch.step, index))
            for parameter, value in zip(engine._parameters, gradients, strict=True):
                parameter.grad = value

    check.note = noted
    for batch in loader.batches(0, steps):
        active = process.rank == fault.rank and batch.step >= fault.begins
        try:
            with faulty if active else contextlib.nullcontext():
                result = engine.step(batch)
        except ComputedWrongly as error:
            found, said = batch.step, str(error)
            break
        if not math.isfinite(result.sums.read()[0]):  # as a training's loop ends it
            diverged = True
            break
    engine.close()
    world.leave()
    return Seen(altered, found, diverged, said)


def sound(process: ProcessRank, folder: Path, task: Task, plan: str, steps: int) -> int:
    """Trains without a fault; returns how often pieces were compared."""
    engine, loader = prepared(task, plan, process, folder)
    for batch in loader.batches(0, steps):
        engine.step(batch)
    engine.close()
    engine._check._world.leave()
    return engine._check._comparisons


class Flip(NamedTuple):
    """A bit of the copy that a process saves, which its memory turns after it was copied."""

    rank: int
    tensor: float
    place: float
    bit: float
    """The tensor of the process's pieces, the number and the bit, each as a part of all."""
    hold: bool
    """Whether the copy is held before it is written."""


class Forgetful(Snapshots):
    """Copies whose bits may turn."""

    flip: Flip | None = None

    def take(self, pieces: Iterable[Piece], processes: int = 1, *, peak_known: bool = True) -> tuple[list[Piece], bool]:
        taken, copied = super().take(pieces, processes, peak_known=peak_known)
        if self.flip is not None:
            own = [piece.data for piece in taken if piece.data.numel()]
            turn(own[int(self.flip.tensor * len(own))], self.flip.place, self.flip.bit)
        return taken, copied


def turn(tensor: Tensor, place: float, bit: float) -> None:
    """Turns one bit of one number."""
    content = tensor.view(-1).view(torch.uint8)
    at = int(place * content.numel())
    content[at] ^= 1 << int(bit * 8)


def copied(process: ProcessRank, folder: Path, saves: Path, flips: list[Flip]) -> list[tuple[str, list[str]]]:
    """Saves a model, its optimizer's state and a count once with each flip; what each wait said, and what is saved."""
    world = join(Plan.parse(f"replicate={process.size},threads=1"), process, folder)
    seen = []
    for number, flip in enumerate(flips):
        generator = torch.Generator().manual_seed(number)
        kinds = (torch.float32, torch.bfloat16, torch.float64, torch.float32)
        tensors = {
            f"model.{n}": torch.randn(5 + n, 7, generator=generator).to(kind) for n, kind in enumerate(kinds * 2)
        } | {"model.steps": torch.tensor(number)}
        own = {f"local.{world.rank}.state": torch.arange(9, dtype=torch.uint8)}
        target = saves / str(number)
        if world.rank == 0:
            target.mkdir(parents=True)
        world.gather(None)
        saver = Saver(target, world, "token", Retention(), lambda: None, bits=cross_check.sum_of_bits)
        forgetful = saver._snapshots = Forgetful()
        said = ""
        try:
            assert saver.save(1, tensors, own, {}) is None
            assert saver.wait() is None
            forgetful.flip = flip if flip.rank == world.rank else None
            if flip.hold:
                saver.hold(2, tensors, own, {})
                saver.write_held()
            else:
                saver.save(2, tensors, own, {})
                saver.wait()
        except ComputedWrongly as error:
            said = str(error)
        saver.close()
        world.gather(None)
        seen.append((said, sorted(entry.name for entry in target.iterdir())))
    world.leave()
    return seen


def drawn_flips(count: int, size: int, seed: int) -> list[Flip]:
    """Draws flips for `size` processes."""
    chance = random.Random(seed)
    return [
        Flip(chance.randrange(size), chance.random(), chance.random(), chance.random(), chance.random() < 0.3)
        for _ in range(count)
    ]
