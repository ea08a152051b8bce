"""Brings a script back to its checkpoint: it runs again from its beginning, and computes nothing on its way.

Modules return an earlier output of the same shape, loaders their first batch again, optimizers stand still. Each number
that the script reads from a tensor, or from a clock, is the one that it read then: so it takes the same ways. A script
for which the first batch will not do, as one that masks by lengths which it has read, loads each batch again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from grappe.checkpoint.format import Checkpoint
from grappe.contrib.script import surroundings
from grappe.contrib.script.surroundings import CLOCKS, TORCH, by_script, writing_nothing
from grappe.errors import RunError
from grappe.errors.user_line import is_users_file
from grappe.launch.terminal import redirected
from grappe.launch.world import World
from grappe.private_api.torch import skip_batch, tree_map
from grappe.rows.tensor import Rows
from grappe.training.interception import MainThread, copied, parameters_of, replaced, rows_of
from grappe.training.random_state import from_tensor, set_random_state

READS = ("item", "__float__", "__int__", "__index__", "__bool__", "tolist", "numpy")
"""Functions by which a script reads a tensor."""
THROUGH = ("_tensor.py", "_tensor_str.py", "lr_scheduler.py", "torch/overrides.py", "rows/tensor.py")
"""Files through which a script reads a tensor: print(f"{loss:.4f}"), plateau.step(loss)."""
INSIDE = ("/nn/modules/module.py", "/optim/optimizer.py", "/autograd/", "/utils/data/")
"""torch's files under which nothing is read again: modules, optimizers, backwards and datasets do not run."""


@dataclasses.dataclass(kw_only=True)
class Iteration:
    """An iteration of a loader by the script."""

    loader: DataLoader[Any]
    number: int
    """In the order of their beginnings."""
    begin: Callable[[], Iterator[Any]]
    plain: Iterator[Any] | None = None
    """None on the way back to a checkpoint."""
    taken: int = 0
    print: float = 0.0
    """Sum of the first batch, which a resumed script must load again."""

    def __next__(self) -> Any:
        assert self.plain is not None
        batch = next(self.plain)
        if not self.taken:
            self.print = print_of(batch)
        self.taken += 1
        return batch

    def go_to(self, taken: int, state: Mapping[str, Tensor], first: float) -> None:
        """Begins the iteration from a random state, and goes on behind `taken` batches.

        Raises:
            RunError: the first batch is another than it was.
        """
        self.taken = 0
        set_random_state(state, self.loader.generator)
        self.plain = self.begin()
        for _ in range(min(taken, 1)):
            next(self)
        if taken and self.print != first:
            raise RunError("its loader gives other batches than before: it draws from a generator of its own, say")
        for _ in range(self.taken, taken):
            if self.loader.num_workers or isinstance(self.loader.dataset, IterableDataset):
                next(self)
            else:
                skip_batch(self.plain)
        self.taken = taken


def print_of(batch: Any) -> float:
    """Returns a number that tells batches apart."""
    sums: list[float] = []
    tree_map(lambda leaf: sums.append(float(leaf.double().sum())) if isinstance(leaf, Tensor) else None, batch)
    return sum(total * (place + 1) for place, total in enumerate(sums))


class Replay:
    """The way back to a checkpoint.

    Args:
        rank: of this process.
        loads: whether each batch is loaded again.
    """

    def __init__(self, checkpoint: Checkpoint, rank: int, *, loads: bool = False) -> None:
        self.loads, self._rank, self._loading = loads, rank, False
        self.values = checkpoint.read_values()["script"]
        self.tensors = checkpoint.read_tensors()
        self.step, self.first = checkpoint.step, int(self.values["first"])
        """The first iteration whose batches train."""
        self.reads = deque(from_tensor(self.tensors.read("local.0.reads").clone()))
        self.clocks = deque(from_tensor(self.tensors.read("local.0.clocks").clone()))
        self._until, self._uncomputed = contextlib.ExitStack(), contextlib.ExitStack()
        self._outputs: dict[Any, Any] = {}
        self.computes = True
        """Whether it is still before the first batch that trained."""
        self._until.enter_context(writing_nothing(until_left=not rank))
        if not rank:
            self._until.enter_context(redirected(1, 2))

    def begin(self) -> None:
        """Ends computing: the first batch that trained comes now."""
        self.computes = runs = False

        def calling(plain: Callable[..., Any]) -> Callable[..., Any]:
            def called(module: nn.Module, *arguments: Any, **options: Any) -> Any:
                nonlocal runs
                # A module of a dataset, or a worker that was forked meanwhile, and stays.
                if runs or self._loading or get_worker_info() is not None:
                    return plain(module, *arguments, **options)
                key = (id(module), module.training, _shape((arguments, options)))
                if key not in self._outputs:
                    runs = True
                    try:
                        self._outputs[key] = plain(module, *arguments, **options)
                    finally:
                        runs = False
                return copied(self._outputs[key])

            return called

        def zeros(outputs: Any, inputs: Any, *_: Any, **__: Any) -> tuple[Tensor, ...]:
            return tuple(map(torch.zeros_like, [inputs] if isinstance(inputs, Tensor) else inputs))

        functions = replaced((nn.Module, "__call__", calling), (torch.autograd, "grad", lambda _: zeros))
        self._uncomputed.enter_context(functions)

    def batches(self, iteration: Iteration) -> Iterator[Any]:
        """Yields batches of the shapes that a loader has, until the checkpoint is reached."""
        loader = iteration.loader
        if self.loads:
            yield from self._own(iteration)
            return
        if loader.batch_sampler is None or isinstance(loader.dataset, IterableDataset):
            yield from iteration.begin()
            return
        first = None
        for indices in loader.batch_sampler:
            rows = len(indices)
            if first is None or rows > (rows_of(first) or 0):
                first = loader.collate_fn([loader.dataset[index] for index in indices])
                if rows_of(first) is None:
                    yield from iteration.begin()
                    return
            yield copied(_cut(first, rows))

    def _own(self, iteration: Iteration) -> Iterator[Any]:
        """Yields the batches that an iteration gave then."""
        set_random_state(self.random(f"began.{iteration.number}"), iteration.loader.generator)
        batches = iteration.begin()
        while True:
            self._loading = True
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._loading = False
            yield batch

    def read(self) -> Any:
        """Returns the next value that the script read."""
        if not self.reads:
            raise RunError(f"it reads more values up to step {self.step} than it did before")
        return self.reads.popleft()

    def backward(self, optimizers: Sequence[Optimizer]) -> None:
        """Makes gradients, which a script may look at."""
        for each in parameters_of(optimizers):
            if each.grad is None:
                each.grad = torch.zeros_like(each)

    def random(self, name: str) -> dict[str, Tensor]:
        """Returns a random state that this process saved."""
        prefix = f"local.{self._rank}.random.{name}."
        names = [name for name in self.tensors if name.startswith(prefix)]
        return {name.removeprefix(prefix): self.tensors.read(name).clone() for name in names}

    def compute(self) -> None:
        """Lets modules compute again: a dataset's are those that give a batch."""
        self._uncomputed.close()

    def end(self) -> None:
        """Lets the script compute, print and write again."""
        self.compute()
        self._until.close()


LOADING = Replay.batches.__code__
"""Loads a batch of a dataset, also without torch's loader; nothing is read again under it."""


def _shape(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if isinstance(value, Mapping):
        return tuple((key, _shape(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_shape, value))
    return value if isinstance(value, bool | int | float | str) else type(value)


def _cut(batch: Any, rows: int) -> Any:
    """Returns the first rows of a batch of which `rows_of` knows the number."""
    if isinstance(batch, Mapping):
        parts = {name: _cut(value, rows) for name, value in batch.items()}
        return parts if type(batch) is dict else type(batch)(parts)  # type: ignore[call-arg]
    if isinstance(batch, list | tuple) and any(isinstance(each, Tensor | Mapping | list | tuple) for each in batch):
        several = [_cut(value, rows) for value in batch]
        return type(batch)(*several) if hasattr(batch, "_fields") else type(batch)(several)
    return batch[:rows]


@contextlib.contextmanager
def reads_noted(
    world: World, read: Callable[[Tensor, Callable[[Tensor], Any]], Any], clock: Callable[[float], float]
) -> Iterator[None]:
    """Context in which what the script reads goes through `read`, of a tensor, and `clock`, of process 0's.

    Args:
        read: read(tensor, plain) returns the value that plain(tensor) would.
    """
    main = MainThread()

    def reading(plain: Callable[..., Any]) -> Callable[..., Any]:
        def function(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
            frame: types.FrameType | None = sys._getframe(1)
            while frame is not None and frame.f_code.co_filename.endswith(THROUGH):
                frame = frame.f_back
            if get_worker_info() is not None or not repeats(frame):
                return plain(tensor, *arguments, **options)
            return read(tensor, lambda each: plain(each, *arguments, **options))

        return function

    def noting(plain: Callable[[], float]) -> Callable[[], float]:
        def read_clock() -> float:
            value, frame = plain(), sys._getframe(1)
            if world.size > 1 and by_script(frame) and main:
                shared = torch.tensor(value, dtype=torch.int64 if isinstance(value, int) else torch.float64)
                dist.broadcast(shared, 0, group=world.control)
                value = shared.item()
            return clock(value) if repeats(frame) else value

        return read_clock

    own = [(kind, name) for kind in (Tensor, Rows) for name in READS if name in vars(kind) or kind is Tensor]
    with replaced(*((kind, name, reading) for kind, name in own), *((owner, name, noting) for owner, name in CLOCKS)):
        yield


def repeats(frame: types.FrameType | None) -> bool:
    """Returns whether what is read at a frame is read again on the way back: by the script, and not in a module."""
    while frame is not None and frame.f_code.co_filename == surroundings.__file__:  # a date, made of a clock
        frame = frame.f_back
    if frame is None or not is_users_file(frame.f_code.co_filename):
        return False
    while frame is not None:
        if frame.f_code is LOADING:
            return False
        if frame.f_code.co_filename.startswith(TORCH) and any(part in frame.f_code.co_filename for part in INSIDE):
            return False
        frame = frame.f_back
    return True
