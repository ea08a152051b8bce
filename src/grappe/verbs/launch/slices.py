"""Spreads a rehearsed script's steps: each process takes its rows of a batch, gradients and values are the whole's.

Every process runs the whole script from the same seeds; what trains nothing runs whole on each of them, so that all
decide the same. Shapes: a batch of N rows, of which a process takes b.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from grappe.checkpoint.weights import gathered
from grappe.data.batch import BatchRows
from grappe.data.sampling import cut
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.errors import DivergedError, TaskError
from grappe.launch.fork import fork_silently
from grappe.launch.terminal import complain
from grappe.launch.world import World
from grappe.parallel.batchnorm import ignoring_padding, synchronise_batchnorm
from grappe.parallel.gradient_average import GradientAverage
from grappe.private_api.torch import BatchNormBase, tree_leaves, tree_map
from grappe.training.random_state import random_digest
from grappe.verbs.launch.interception import (
    INDEX,
    PLANS_FORWARD,
    Begin,
    StepHandler,
    add_gradient,
    cut_rows,
    is_picture,
    modules_alive,
    norms_of,
    parameters_of,
    rows_of,
    saved_part,
)
from grappe.verbs.launch.plan_keys import ROUNDING, PlanKeys, wide
from grappe.verbs.launch.request import USED, Rehearsed, line_of

T = TypeVar("T")
CHECK_EVERY = 100  # steps, after which the processes compare their weights; at first after 1, 2, 4, …
LINEAR = {"AddBackward0": 2, "SubBackward0": 2, "MulBackward0": 1, "DivBackward0": 1, "NegBackward0": 1}
"""Nodes of the graph of a loss that add up terms, or multiply one with a number; and the number of their inputs."""
SAME = 1e-5
"""Of a value that all processes compute, in parts of it: what rounding on a GPU explains."""
TOLERATED = 1e-3
"""Of the first gradient's norms, in parts of the largest: what the rehearsal does not show is larger."""


class SlicedSteps(StepHandler):
    """Handles a script's steps on one of several processes.

    Args:
        rehearsed: what its rehearsal has measured.
        synchronised: whether batch normalisation takes all processes' rows.
        keys: of the plan, for the models.
        check_every: steps after which a step's gradient is compared with that of one process; None: the first alone.
    """

    def __init__(
        self,
        world: World,
        rehearsed: Rehearsed,
        keys: PlanKeys,
        *,
        synchronised: bool,
        check_every: int | None = None,
    ) -> None:
        self._world, self._rehearsed, self._keys = world, rehearsed, keys
        self._group, self._synchronised = world.data_group, synchronised
        self.counts = rehearsed.counts
        """Places whose counts depend on numbers."""
        self._tolerated = max(TOLERATED, ROUNDING[keys.plan.precision])
        self.unsaved = ""
        """Why the script's state cannot be saved."""
        if keys.plan.shard > 1:
            self.unsaved = "shard=… cuts its tensors into pieces: replicate=… has checkpoints"
        elif keys.scale.is_dynamic:
            self.unsaved = "precision=fp16 leaves out steps by what it sees: take bf16"
        self._optimizers: list[Optimizer] = []
        self._check_every, self._averages = check_every, list[GradientAverage]()
        self._pipe: int | None = None
        """From the process that computes a step's gradient alone, or, in that process, to the one that compares."""
        self._alone = False
        """Whether this is the process that computes a step's gradient alone."""
        self._measures = True
        """Whether the running step's gradient is noted."""
        self._averaged: set[int] = set()
        """Parameters whose gradients are averaged, by id."""
        self._place: BatchRows | None = None
        """Of the running step's rows in its batch; None: everything is whole."""
        self._share = 0.0
        self._counted = 1 / world.data_size
        """This process's part of what the last cross-entropy counts; before the first, of a value that all share."""
        self._last: BatchRows | None = None
        """The rows of the last batch that trained, until a loader's next one: the script still has them."""
        self._after = contextlib.ExitStack()
        """Draws after the loop of training, which are for the last batch."""
        self._buffers: list[Tensor] = []
        self._norms = nn.ModuleList()
        """Batch normalisations over all processes."""
        self._noted: dict[int, Tensor] = {}
        """What the step's backwards have added, until an optimizer steps, by the number of the parameter."""
        self._losses: list[tuple[Tensor, float]] = []
        """Losses of the last batch's backwards, and this process's part of each."""
        self._loads = False
        """Whether a loader loads a batch: what is read there is no batch's."""
        self._said: set[str] = set()
        """Lines that read a process's own rows."""
        self._most_rows = 0
        self.steps = 0
        self.replaying = False
        """Whether nothing is computed: the script comes back to its checkpoint."""

    def batches(self, loader: DataLoader[Any], place: str, begin: Begin) -> Iterator[Any]:
        """Yields this process's rows of each batch that trains, and other batches whole."""
        outer = self._place, self._share
        trains = place == self._rehearsed.loader and outer[0] is None
        taken, plain = None, self._loaded(begin())
        if trains:
            self._after.close()
        try:
            self._last = None
            if not trains:
                self._place = None
                with whole_batch_draws(None):  # the loading too, which reads and draws for whole batches
                    for batch in plain:
                        yield self._keys.batch(batch)
                return
            for batch in plain:
                alone = self._world.data_size == 1
                rows = rows_of(batch) or int(alone)
                if not rows:
                    raise TaskError(f"a batch of the loader ({line_of(place)}) is without a row for each sample")
                first, last = cut(rows, self._world.data_size, self._world.data_rank)
                self._share = (last - first) / rows
                self._prepare()
                if self._check_every and self.steps % self._check_every == 0 < self.steps and not self.replaying:
                    self._begin_check()
                    if self._alone:
                        with whole_batch_draws(None):
                            yield self._keys.batch(batch)
                        self._note_step()
                        os._exit(0)  # no optimizer has stepped: there is nothing to compare
                padding = first == last  # fewer rows than processes: the first one, which counts nothing
                if padding:
                    first, last = 0, 1
                self._losses.clear()
                self._place = taken = BatchRows(first, last - first, rows)
                self._most_rows = max(self._most_rows, last - first)
                with (
                    whole_batch_draws(self._place, others_alike=True),
                    ignoring_padding(self._norms) if padding else contextlib.nullcontext(),
                ):
                    whole_batch = self._keys.batch(batch)
                    yield whole_batch if alone else cut_rows(whole_batch, first, last)
                self._note_step()
                self._place = None  # the next batch is loaded whole
                self._end_step()
        finally:
            self._place, self._share = outer
            self._last = taken
            if taken is not None:  # the script still has its rows of the last batch
                self._after.enter_context(whole_batch_draws(taken, others_alike=True))

    def _loaded(self, batches: Iterator[Any]) -> Iterator[Any]:
        while True:
            before, self._loads = self._loads, True
            try:
                batch = next(batches)
            except StopIteration:
                return
            finally:
                self._loads = before
            yield batch

    def backward(self, place: str, loss: Tensor, run: Callable[[float], None]) -> float:
        """Runs a backward, which averages the gradients over the processes; returns this process's part of the loss."""
        size = self._world.data_size
        if self._place is None and not self._alone:
            run(1.0)
            return 1 / size
        rules = self._rehearsed.losses
        rule = rules.get(place) or (next(iter(rules.values())) if len(set(rules.values())) == 1 else None)
        if rule is None and size > 1:
            raise TaskError(f"the backward in {line_of(place)} did not run with the first batch: its loss is not known")
        weight = 1 / size if self._alone or size == 1 else self._weight(rule)
        self._losses.append((loss, weight))
        if not self._measures or self.replaying:
            self._keys.backward(self._optimizers, run, weight * size)
            return weight
        parameters = parameters_of(self._optimizers)
        before = [None if each.grad is None else each.grad.clone() for each in parameters]
        self._keys.backward(self._optimizers, run, weight * size)
        for number, (each, old) in enumerate(zip(parameters, before, strict=True)):
            if each.grad is not None:
                added = each.grad.detach() if old is None else each.grad.detach() - old
                add_gradient(self._noted, number, gathered(added))
        return weight

    def read(self, tensor: Tensor, place: str, read: Callable[[Tensor], T]) -> T:
        """Returns the whole batch's value of what a line reads. Collective in a step."""
        value = read(gathered(tensor))
        if self._alone or self._world.data_size == 1 or self._loads:
            return value
        if not isinstance(value, bool | int | float | list | np.ndarray):
            return value
        rule = None if self._place is None else self._rehearsed.values.get(place)
        if place.endswith(INDEX) and rule not in ("sum", "most", "least"):
            return value
        # "same": the first batch's losses may be alike whatever its rows are, by a head of zeros, say.
        if rule in (None, "same") and (weight := self._weight_of_loss(tensor)) is not None:
            return self._combined(value, "sum", tensor, weight, place)
        if rule is None and self._place is not None:
            rule = self._likely(value, place)
        if rule is None or rule == "same":
            if not is_picture(value, place):
                self._check_same(value, place)
            elif self._is_apart(np.asarray(value)):
                self._say_own_rows(place)
            return value
        if rule in ("first", "own"):
            if rule == "own" or self._has_fewer_rows:
                self._say_own_rows(place)
            return self._world.share(value)
        return self._combined(value, rule, tensor, self._weight(rule), place)

    def check_saved(self, saved: T, place: str) -> T:
        """Returns what the script saves, with the whole batch's loss for a loss. Collective.

        Raises:
            DivergedError: a tensor comes from each process's own rows.
        """
        if self._alone or self._world.data_size == 1 or self.replaying:
            return saved
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        weights = [*parameters_of(self._optimizers), *self._buffers]
        alike = {id(each) for each in (*weights, *tree_leaves(states))} | {each.data_ptr() for each in weights}
        numbers = itertools.count()

        def check(leaf: Any) -> Any:
            number = next(numbers)
            if not isinstance(leaf, Tensor) or id(leaf) in alike or leaf.data_ptr() in alike:
                return leaf
            weight = self._weight_of_loss(leaf)
            if weight is not None:
                return torch.full_like(leaf, self._combined(float(leaf), "sum", leaf, weight, place))
            part = saved_part(place, number)
            if self._place is not None and part in self._rehearsed.values:
                return torch.as_tensor(self.read(leaf, part, wide)).to(leaf)
            if self._spread(wide(leaf)):
                raise DivergedError(
                    f"{line_of(place)} saves a tensor that is not the same on all processes: it is made of each one's "
                    "own rows. Save what is read of it in each step: loss.item(), output.tolist()"
                )
            return leaf

        return cast("T", tree_map(check, saved))

    def _weight_of_loss(self, tensor: Tensor) -> float | None:
        """Returns this process's part of a loss of the last batch, or of terms of it; None: the tensor is neither."""
        for loss, weight in self._losses:
            if loss.numel() == tensor.numel() == 1 and loss.data_ptr() == tensor.data_ptr():
                return weight
        weights = {weight for _, weight in self._losses}
        return weights.pop() if len(weights) == 1 and _is_linear(tensor, [loss for loss, _ in self._losses]) else None

    def _combined(self, value: T, rule: str, tensor: Tensor, weight: float, place: str) -> T:
        """Returns the whole batch's value, in the type of this process's. Collective.

        Raises:
            DivergedError: the processes' values have different shapes.
        """
        own = np.asarray(value)
        if own.ndim or rule in ("most", "least"):
            everyone = [each for each in self._world.gather((own, weight) if self._share else None) if each is not None]
            arrays = [array for array, _ in everyone]
            if rule == "rows":
                numbers = np.concatenate(arrays)
            elif len({array.shape for array in arrays}) > 1:
                raise DivergedError(
                    f"{line_of(place)} reads an array whose shape depends on the rows of a process, which the first "
                    "batch did not show. Give it the same shape for all: torch.bincount(…, minlength=10)"
                )
            elif rule in ("most", "least"):
                numbers = (np.maximum if rule == "most" else np.minimum).reduce(arrays)
            else:
                numbers = np.sum([array * part for array, part in everyone if part], axis=0)
        else:
            total = torch.tensor(value * weight if weight else 0.0, dtype=torch.float64)  # type: ignore[operator]
            dist.all_reduce(total, group=self._world.control)
            numbers = total.numpy()
        if rule in ("mean", "counted", "sum"):  # to the precision of the tensor
            total = torch.as_tensor(numbers)
            exact = tensor.is_floating_point() or tensor.is_complex()
            numbers = (total.to(tensor.dtype).to(total.dtype) if exact else total.round()).numpy()
        numbers = numbers.astype(own.dtype)
        return cast("T", numbers if isinstance(value, np.ndarray) else numbers.tolist())

    def count(self, counted: Tensor, of: int, *, special: bool) -> None:
        """Notes this process's part of what a cross-entropy of a step divides by. Collective.

        Raises:
            DivergedError: it leaves out padding, and did not in the first batch, or another one counts otherwise.
        """
        if self._place is None or self._alone:
            return
        own, rules = float(counted) if self._share else 0.0, self._rehearsed.losses.values()
        if "counted" not in rules:
            if own not in (0.0, of) and "mean" in rules:
                raise DivergedError(
                    f"a cross-entropy counts {own:g} of {of} targets, and all of them in the first batch: it was taken "
                    "for a mean over rows. Give it an ignore_index, or begin with a batch that has padding"
                )
            return
        total = sum(self._world.gather(own))
        self._counted = own / total if total else 1 / self._world.data_size

    def _weight(self, rule: str | None) -> float:
        """Returns this process's part of a value of the whole batch."""
        return {"mean": self._share, "counted": self._counted}.get(rule or "", float(self._share > 0))

    def _check_same(self, value: object, place: str) -> None:
        """Raises DivergedError if a value comes from each process's own rows. Collective."""
        if apart := self._spread(value):
            least, most = apart
            raise DivergedError(
                f"{line_of(place)} reads a value that is not the same on all processes ({least:g} to {most:g}): it "
                "adds up, compares or is what each has of its own rows. Read a number in each step, and add or compare "
                "that: total += loss.item()"
            )

    def _spread(self, value: object) -> tuple[float, float] | None:
        """Returns the least and most of a value, if it is not the same on all processes and a step runs. Collective."""
        numbers = np.asarray(value)
        if (not self.steps and self._place is None) or numbers.dtype.kind not in "biuf":
            return None
        exact, numbers = numbers.dtype.kind != "f", numbers.ravel().astype(np.float64)
        places = 1 + np.modf(np.arange(numbers.size) * 0.618)[0]  # so that another order has another sum
        total, size = float(numbers @ places), float(np.abs(numbers) @ places)
        if not np.isfinite(size):
            total, size = -1.0, 0.0
        both = torch.tensor([total, -total, size], dtype=torch.float64)
        dist.all_reduce(both, dist.ReduceOp.MAX, group=self._world.control)
        most, least, size = both.tolist()
        return (-least, most) if most + least > (0 if exact else SAME) * size else None

    def _is_apart(self, picture: NDArray[Any]) -> bool:
        """Returns whether a process's picture is not process 0's, of whose colours rounding moves a few by 1."""
        first = self._world.share(picture)
        tolerated = 1.0 if picture.dtype == np.uint8 else SAME * np.abs(first).max(initial=0)
        alike = picture.shape == first.shape and np.abs(picture * 1.0 - first).max(initial=0) <= tolerated
        return not all(self._world.gather(bool(alike)))

    def _likely(self, value: object, place: str) -> str:
        """Returns the rule for a line that the first batch did not reach. Collective."""
        if isinstance(value, bool):
            return "same"
        if is_picture(value, place):
            return "own"
        if not self._spread(value):
            self._note(
                place,
                f"grappe: {line_of(place)} reads a value that it did not read with the first batch: it is the same on "
                "all processes, and taken as it is",
            )
            return "same"
        raise TaskError(
            f"{line_of(place)} reads a value that it did not read with the first batch, so it is not known whether it "
            "is a mean or a sum over rows: read it in each step"
        )

    @property
    def _has_fewer_rows(self) -> bool:
        return self._place is not None and self._place.size < self._most_rows

    def _say_own_rows(self, place: str) -> None:
        self._note(
            place,
            f"grappe: {line_of(place)} reads process 0's rows, not the whole batch's: what it prints or writes may "
            "differ from that of one process",
        )

    def _note(self, place: str, text: str) -> None:
        """Tells the user of a line, once."""
        line = line_of(place)
        if line not in self._said and not self._world.rank:
            complain(text)
        self._said.add(line)

    def length(self, value: int, tensor: object, place: str) -> int:
        """Returns what is counted of the whole batch, where the gradient does not depend on it. Collective."""
        rows, rehearsed, last = self._place, self._rehearsed, self._last
        if rows is None and last is not None and isinstance(tensor, Tensor) and value == last.size < last.of:
            self._say_own_rows(place)
        if rows is None or self._alone or self._world.data_size == 1 or place in rehearsed.parts_counts:
            return value
        if place in self.counts:
            return self._combined(value, "sum", torch.tensor(value), self._weight("sum"), place)
        if place in rehearsed.own_counts:
            self._say_own_rows(place)
            return value
        if place not in rehearsed.lengths:  # the first batch did not reach it
            if place.endswith(USED) or not (tensor is None or isinstance(tensor, Tensor)):
                return value
            if value != rows.size and self._spread(value):
                self._say_own_rows(place)
        return rows.of if value == rows.size else value

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer, whose parameters' gradients are to be averaged."""
        self._optimizers.append(optimizer)
        optimizer.register_step_pre_hook(self._note_step)
        self._keys.add_optimizer(optimizer)

    def _note_step(self, *_: object) -> None:
        """Compares a noted gradient, before the weights change or the next batch adds to it."""
        if not self._measures or (self._place is None and not self._alone) or self.replaying:
            return
        norms = norms_of(self._noted, len(parameters_of(self._optimizers)))
        self._noted.clear()
        self._measures = False
        if self._alone:
            assert self._pipe is not None
            os.write(self._pipe, json.dumps(norms).encode())
            os._exit(0)
        if self._pipe is not None:
            with open(self._pipe, "rb") as pipe:  # noqa: PTH123
                text = pipe.read()
            os.waitpid(self._child, 0)
            self._pipe = None
            if text:
                self._compare(norms, json.loads(text), f"the gradient of step {self.steps + 1}")
        elif not self.steps:
            self._compare(norms, self._rehearsed.norms, "the first gradient")

    def _begin_check(self) -> None:
        """Begins to note a step's gradient, which a process forked from the first one computes alone."""
        self._measures = True
        if self._world.rank:
            return
        self._child, self._pipe = fork_silently()
        if self._child:
            return
        self._alone, self._place = True, None
        torch.set_num_threads(1)  # the threads of a pool are not forked
        for average in self._averages:
            average.deferred = True
        for module in self._norms:
            del module.forward  # that over all processes

    def _prepare(self) -> None:
        """Averages the gradients of parameters that are new; synchronises batch normalisation."""
        if not self._keys.on:
            if not self.replaying:
                self.check_weights()
            self._keys.apply(self._optimizers)
        new = [each for each in parameters_of(self._optimizers) if id(each) not in self._averaged]
        if not new:
            return
        self._averaged |= {id(each) for each in new}
        modules = modules_alive()
        self._buffers = [buffer for module in modules for buffer in module.buffers(recurse=False) if buffer.numel()]
        if self._group is None:
            return
        replicas = [each for each in new if not isinstance(each, DTensor)]  # shards' are averaged by FSDP2
        if replicas:
            self._averages.append(GradientAverage(cast("list[nn.Parameter]", replicas), self._group))
        if self._synchronised:
            for module in modules:
                if isinstance(module, BatchNormBase) and module not in PLANS_FORWARD:
                    synchronise_batchnorm(module, self._group)
                    PLANS_FORWARD.add(module)
                    self._norms.append(module)

    def _end_step(self) -> None:
        if not self.steps and self._rehearsed.drawn and not self.replaying:
            everyone = self._world.gather(random_digest())
            if set(everyone) != {self._rehearsed.drawn}:
                raise DivergedError(
                    "the first step draws other random numbers than one process does: as many as a process has rows, "
                    "say, where one process draws no more. Take another batch size, or a torch.Generator for these"
                )
        self.steps += 1
        self._keys.end_step()
        if self.replaying:
            return
        if self.steps % CHECK_EVERY == 0 or self.steps & (self.steps - 1) == 0:
            self.check_weights()

    def _compare(self, norms: Sequence[float], alone: Sequence[float], which: str) -> None:
        """Compares a gradient with that of one process, which took the whole batch.

        Raises:
            DivergedError: they differ.
        """
        apart = max((abs(a - b) for a, b in zip(norms, alone, strict=True)), default=0.0)
        if apart > self._tolerated * max(alone, default=0.0):
            raise DivergedError(
                f"{which} is not that of one process: its norms are up to {apart:.1e} apart. Something in the step "
                "depends on which rows a process has, and the rehearsal did not show it"
            )

    def check_weights(self) -> None:
        """Compares the processes' weights. Collective.

        Raises:
            DivergedError: they differ.
        """
        tensors = [each for each in parameters_of(self._optimizers) if not isinstance(each, DTensor)] + self._buffers
        sums = [float(each.detach().double().sum()) for each in tensors]
        if len({repr(each) for each in self._world.gather(sums)}) > 1:
            raise DivergedError(
                "the processes began with different weights: the script seeds by the time, or by something else that is"
                " not the same in each"
                if not self.steps
                else f"the processes' weights or buffers differ after {self.steps} steps: the script changes them by "
                "something that depends on a process's own rows"
            )


def _is_linear(tensor: Tensor, losses: Sequence[Tensor]) -> bool:
    """Returns whether a tensor is made of the terms of losses by sums and by products with numbers."""
    if tensor.grad_fn is None:  # nor have losses one on the way back to a checkpoint
        return False
    terms: set[Any] = set()
    waiting = [loss.grad_fn for loss in losses]
    while waiting:
        node = waiting.pop()
        terms.add(node)
        waiting += _terms(node)
    waiting = [tensor.grad_fn]
    while waiting:
        node = waiting.pop()
        if node not in terms:
            if not _terms(node):
                return False
            waiting += _terms(node)
    return True


def _terms(node: Any) -> list[Any]:
    """Returns what a node of the graph adds up, or multiplies with a number; []: it does something else."""
    parts = [part for part, _ in node.next_functions if part is not None] if node is not None else []
    name = type(node).__name__
    return parts if LINEAR.get(name) == len(parts) else []
