"""The running step of a hand-written loop: its microbatches, its losses, loss scaling, and whose random numbers it has.

Shapes: a slice or microbatch of b rows on this process, in a global batch of N samples; losses [b] or [b, ...].
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import default_collate

from grappe.data.batch import Batch, BatchRows, Microbatch, entering
from grappe.data.collate import form
from grappe.data.draw import mix
from grappe.data.whole_batch_draws import torchs_generator, whole_batch_draws
from grappe.engines.shared.state import ModelState
from grappe.errors import UsageError
from grappe.errors.user_code import sentence
from grappe.launch.terminal import complain
from grappe.launch.world import World
from grappe.parallel.batchnorm import ignoring_padding
from grappe.parallel.gradient_average import GradientAverage
from grappe.plan import Plan
from grappe.private_api.torch import gradient_hooks
from grappe.profiling.phases import BACKWARD, FORWARD, UPDATE
from grappe.step.clip import backward_scaled, gradient_norm
from grappe.step.exact import Exact
from grappe.step.fast_paths import seed_dropout
from grappe.step.precision import LossScale
from grappe.task import Task

CALLS = 8
"""Calls of `mean` in a step whose losses' widths are compared between the processes."""
NOT_DRAWN = 624
"""Position of a Mersenne twister that was seeded and has drawn nothing."""
EACH = "for inputs, targets in loop.microbatches(batch):"


class Pair(NamedTuple):
    """A model and what trains it under the plan."""

    model: nn.Module
    optimizer: Optimizer
    state: ModelState
    average: GradientAverage | None
    """Of replicas' gradients; None: FSDP2 reduces them, or there is one process, or the plan is exact.

    This and the next two are None for a second optimizer of a model.
    """
    switch: Callable[[bool], None] | None
    """Called at each microbatch of a sharded model (argument: is it the last?)."""
    exact: Exact | None

    def parameters(self) -> list[nn.Parameter]:
        """Lists the parameters that have a gradient."""
        return [each for group in self.optimizer.param_groups for each in group["params"] if each.grad is not None]


def refuse_hooks(model: nn.Module, plan: Plan) -> None:
    """Refuses hooks of gradients that are not the same for the parts of a batch's gradient as for their sum.

    A hook that multiplies (by a mask, a factor) is; it is called with three gradients of made-up numbers.

    Raises:
        UsageError: a hook clips or draws, or changes the parameter after a backward, or FSDP2 would not call it.
    """
    for name, parameter in model.named_parameters():
        added, after = (
            [hook for hook in hooks if not getattr(getattr(hook, "func", hook), "__module__", "").startswith("grappe.")]
            for hooks in gradient_hooks(parameter)
        )
        if after or (added and plan.uses_fsdp) or not all(_adds_up(hook, parameter.detach()) for hook in added):
            raise UsageError(
                f"a hook of the gradient of {name} would have a part of the batch's, or none: do what it does after "
                "backward(), with parameter.grad, or use one process without microbatches"
            )


def _adds_up(hook: Callable[[Tensor], Any], parameter: Tensor) -> bool:
    rising = torch.linspace(0.5, 1.5, parameter.numel(), device=parameter.device).view_as(parameter).to(parameter)
    asked = [rising * by for by in (0.0, 1.0, -1e4)]
    nothing, usual, large = (each if (other := hook(each)) is None else other for each in asked)
    return torch.allclose(large - nothing, -1e4 * (usual - nothing), rtol=1e-2, atol=float(nothing.abs().max()))


class LoopBatches(Task):
    """Description of the batches of a call of `batches` or `evaluate`; their form is what `collate=` returns."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Returns the batch as the inputs, without targets."""
        own = self.__dict__["form"]
        try:
            return (own or default_collate)(list(samples)), ()
        except Exception as error:
            raise UsageError(
                f"samples of the form {form(samples[0])} cannot be put together ({sentence(error)}): "
                + ("mend collate=" if own else "give batches(…, collate=a function of a list of samples)")
            ) from error

    def sampling(self, dataset: Any) -> Any:
        """Returns the call's `sampling=`."""
        return self.__dict__["drawn"]


class _UncutSlice:
    """A slice under a plan of microbatches, which is not to be used whole."""

    def _refused(self, *_: object) -> Any:
        raise UsageError(
            "the plan cuts each process's slice into microbatches: write `for batch in loop.batches(…):`, and in it "
            f"`{EACH}` around forward and backward; optimizer.step() comes after these, once a batch"
        )

    __iter__ = __getitem__ = __len__ = _refused


class LoopStep:
    """The step that a loop's body is in. Its methods with the names of the Loop's are described there."""

    def __init__(self, plan: Plan, world: World, seed: int, phase: Callable[[int], None]) -> None:
        self._plan, self._world, self._seed, self._phase = plan, world, seed, phase
        self.averaged = 1 if plan.exact else world.data_size
        """Number by which the gradients' sum is divided."""
        self.scale = LossScale(plan.precision)
        self.pairs: list[Pair] = []
        self.parts: list[Tensor] = []
        """This process's parts of the step's losses, in the order of the calls of `mean` and `sum`."""
        self.skipped = False
        """Whether an update of this step was left out, since an fp16 gradient had an infinity."""
        self._widths: list[list[float]] = []
        """For each call of `mean`: microbatches, sums of their losses' widths and of these squared."""
        self._batch: Batch | None = None
        self._micro: Microbatch | None = None
        self._step = self._call = self._loops = self._unhooked = 0
        self._count: Tensor | None = None
        self._updated = self._scaled = self._unfinished = self._said = False

    @property
    def is_running(self) -> bool:
        """Returns whether a body is running."""
        return self._batch is not None

    @property
    def in_piece(self) -> bool:
        """Returns whether the body is inside `microbatches`."""
        return self._micro is not None

    @contextlib.contextmanager
    def running(self, batch: Batch, step: int) -> Iterator[Any]:
        """Context of the body of a step, with the batch for it: its random numbers are those of the slice's rows."""
        self._batch, self._step, self._call, self._loops = batch, step, 0, 0
        self.skipped = self._updated = self._unfinished = False
        self.parts, self._widths = [], []
        for pair in self.pairs:
            if pair.average is not None:
                pair.average.renew()
        first = batch.microbatches[0]
        self._micro = None if self._cuts else first
        place = first.place
        if place is not None:
            place = BatchRows(place.first, max(1, sum(micro.rows for micro in batch.microbatches)), place.of)
        own = 0 if place is not None or self._cuts else self._world.data_rank
        seed_dropout(self._seed, step, self._world.device, own)
        same = mix(self._seed, step) % (1 << 32)
        random.seed(same)
        np.random.seed(same)
        try:
            with contextlib.ExitStack() as contexts:
                if self._micro is not None:
                    self._enter(contexts, first)
                contexts.enter_context(whole_batch_draws(place))
                self._phase(FORWARD)
                yield _UncutSlice() if self._cuts else as_given(first)
            self._look_at_draws(step)
            if self._unfinished:
                raise UsageError("loop.microbatches(batch) was left before its end: every microbatch counts")
            if self._updated:
                self.scale.update(self.skipped)
        finally:
            self._batch = self._micro = None

    def _look_at_draws(self, step: int) -> None:
        """Says once that the body draws from a generator that draws for no rows; looks at steps 0, 1, 2, 4, 8, …."""
        if self._said or step & (step - 1) or (self._world.data_size == 1 and not self._cuts):
            return
        drew = np.random.get_state()[2] != NOT_DRAWN or random.getstate()[1][-1] != NOT_DRAWN  # pyrefly: ignore
        if drew and self._world.rank == 0:
            complain(
                "grappe: the loop's body draws from NumPy's or Python's generator, the same numbers in all processes: "
                "right for one number a step, wrong for one a row; for those take torch.rand or torch.randn"
            )
        self._said = drew

    @property
    def _cuts(self) -> bool:
        return self._plan.microbatches > 1 or self._plan.exact > 0

    def _enter(self, contexts: contextlib.ExitStack, micro: Microbatch) -> None:
        entering(micro)
        for pair in self.pairs if not micro.rows else ():
            contexts.enter_context(ignoring_padding(pair.model))

    def microbatches(self, batch: Any, counts: Callable[[Any], Tensor] | None) -> Iterator[Any]:
        running = self._running("microbatches")
        self._count = None if counts is None else self._summed(running, counts)
        if not self._cuts:
            yield batch
            return
        self._unfinished = True
        generator, first = torchs_generator(self._world.device), self._call
        start = generator.get_state() if self._plan.draws_whole_batches else None
        seed, self._loops = mix(self._seed, self._loops), self._loops + 1
        if start is None:
            seed_dropout(seed, self._step, self._world.device, self._world.data_rank)
        before = [self._taken(pair) if pair.exact is not None else {} for pair in self.pairs]
        for index, micro in enumerate(running.microbatches):
            self._micro, self._call = micro, first
            with contextlib.ExitStack() as contexts:
                for pair in self.pairs:
                    _begin(pair, last=micro is running.microbatches[-1])
                    if pair.exact is not None:
                        contexts.enter_context(pair.exact.piece(index, self._step, seed))
                if start is not None:  # each begins where one process begins, and so draws the same numbers
                    generator.set_state(start)
                    contexts.enter_context(whole_batch_draws(micro.place))
                self._enter(contexts, micro)
                self._phase(FORWARD)
                yield as_given(micro)
            for pair in self.pairs:
                self._end(pair, micro)
        self._micro, self._unfinished = None, False
        for pair, gradients in zip(self.pairs, before, strict=True):
            if pair.average is not None:
                pair.average.finish()
            if pair.exact is not None:
                pair.exact.reduce(0.0, running.samples)
            for parameter, gradient in gradients.items():
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient

    def _end(self, pair: Pair, micro: Microbatch) -> None:
        """Puts a piece's gradients into the tree of an exact plan's sums; those of a row of padding are left out."""
        if pair.exact is not None and not micro.rows and not pair.exact.every_piece:
            self._taken(pair)
            pair.exact.add(None)
        elif pair.exact is not None:
            pair.exact.add(torch.zeros((), device=self._world.device))

    def _taken(self, pair: Pair) -> dict[nn.Parameter, Any]:
        """Takes the gradients off the model's parameters, and returns them."""
        taken = {each: each.grad for each in pair.model.parameters() if each.grad is not None}
        for parameter in taken:
            parameter.grad = None
        return taken

    def _summed(self, batch: Batch, counts: Callable[[Any], Tensor]) -> Tensor:
        """Sums the counts of the global batch. Collective."""
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for micro in batch.microbatches:
            if micro.rows:
                total += counts(as_given(micro)).sum()
        if self._world.data_group is not None:
            dist.all_reduce(total, group=self._world.data_group)
        return total

    def mean(self, losses: Tensor, counts: Tensor | None) -> Tensor:
        batch, micro = self._checked("mean", losses)
        if counts is None:
            each = losses.numel() // micro.size
            self._widen(float(each))
            return self._part(losses.sum() * (self.averaged / (batch.samples * each) if micro.rows else 0.0))
        if counts.shape != losses.shape:
            raise UsageError(f"mean(): counts {tuple(counts.shape)} must have the losses' shape {tuple(losses.shape)}")
        if self._count is None and self._cuts:
            raise UsageError(
                "mean(losses, counts) divides by the counts of all microbatches, of which one is here: give the counts "
                "before, loop.microbatches(batch, counts=a function of a microbatch)"
            )
        weights = counts.detach().to(losses.dtype) * float(bool(micro.rows))
        total = self._count
        if total is None:
            total = weights.sum(dtype=torch.float64)
            if self._world.data_group is not None:
                dist.all_reduce(total, group=self._world.data_group)
        factor = torch.where(total > 0, self.averaged / total, 0.0).to(losses.dtype)
        return self._part((losses * weights).sum() * factor)

    def sum(self, losses: Tensor) -> Tensor:
        _, micro = self._checked("sum", losses)
        return self._part(losses.sum() * (float(self.averaged) if micro.rows else 0.0))

    def _running(self, name: str) -> Batch:
        if self._batch is None:
            raise UsageError(f"{name}() is for inside the loop over batches()")
        return self._batch

    def _checked(self, name: str, losses: Tensor) -> tuple[Batch, Microbatch]:
        """Returns the running batch and microbatch; refuses losses that are not one row for each of its samples."""
        batch, micro = self._running(name), self._micro
        if micro is None:
            raise UsageError(f"{name}() is for inside `{EACH}` under this plan")
        self._phase(BACKWARD)
        if not losses.dim() or losses.shape[0] != micro.size:
            raise UsageError(
                f"{name}() takes the losses of all {micro.size} rows of the slice, shape [{micro.size}] or "
                f'[{micro.size}, ...], not {list(losses.shape)}: give the loss function reduction="none"; to leave '
                "values out, keep the shape and give mean(losses, counts) 0 for them"
            )
        return batch, micro

    def _widen(self, each: float) -> None:
        if self._call == len(self._widths):
            self._widths.append([0.0, 0.0, 0.0])
        if self._call < len(self._widths):
            for place, value in enumerate((1.0, each, each * each)):
                self._widths[self._call][place] += value

    def _part(self, part: Tensor) -> Tensor:
        if self._call == len(self.parts):
            self.parts.append(part.detach())
        else:
            self.parts[self._call] = self.parts[self._call] + part.detach()
        self._call += 1
        if self.scale.is_dynamic and part.requires_grad:
            part.register_hook(self._refuse_unscaled)
        return part

    def _refuse_unscaled(self, gradient: Tensor) -> None:
        if not self._scaled:
            raise UsageError(
                "precision=fp16 scales each loss, or small gradients would be zeros: write loop.backward(loss) in "
                "place of loss.backward()"
            )

    def backward(self, loss: Tensor) -> None:
        def run(by: float) -> None:
            self._scaled = self.scale.is_dynamic
            try:
                (loss if by == 1.0 else loss * by).backward()
            finally:
                self._scaled = False

        backward_scaled(self.scale, lambda: [each for pair in self.pairs for each in pair.parameters()], run)

    # ---- The update ----

    def before_update(self, *_: object) -> None:
        """Refuses an update that would not be the whole batch's; before each `optimizer.step()` of the body."""
        self._phase(UPDATE)
        if self._batch is None:
            return
        if self._unhooked < len(self.pairs) and (self._world.data_size > 1 or self._cuts):
            for pair in self.pairs[self._unhooked :]:  # hooks that were registered after parallelize()
                refuse_hooks(pair.model, self._plan)
            self._unhooked = len(self.pairs)
        if self._cuts and self._micro is not None:
            raise UsageError("optimizer.step() comes after the loop over microbatches(), once a batch")
        if not self.parts and (self._world.data_size > 1 or self._cuts):
            raise UsageError(
                "optimizer.step() without loop.mean(losses) or loop.sum(losses): the mean of a slice weighs a short "
                "slice's samples more than others', so this would not be one process's step"
            )

    def updating(self, pair: Pair, update: Callable[..., Any]) -> Callable[..., Any]:
        """Returns the optimizer's `step` for fp16: it is left out everywhere where a gradient has an infinity."""

        def step(_: Optimizer, *arguments: Any, **options: Any) -> Any:
            parameters = pair.parameters()
            if parameters and self._batch is not None:
                self._updated = True
                if not torch.isfinite(gradient_norm(parameters)):
                    self.skipped = True
                    return None
            return update(*arguments, **options)

        return step

    def unless_skipped(self, step: Callable[..., None]) -> Callable[..., None]:
        """Returns a schedule's `step`, which does nothing in the body of a step whose update was left out."""
        return lambda *arguments: None if self._batch is not None and self.skipped else step(*arguments)

    # ---- What the processes compare at the step's end ----

    def widths(self) -> list[float]:
        """Lists the widths of the losses of the first CALLS calls of `mean`, to be summed over the processes."""
        numbers = [number for width in self._widths[:CALLS] for number in width]
        return numbers + [0.0] * (3 * CALLS - len(numbers))

    def check_widths(self, sums: Sequence[float]) -> None:
        """Raises UsageError where slices had losses of different widths: each would weigh its own otherwise."""
        for place in range(0, len(sums), 3):
            number, total, squares = sums[place : place + 3]
            if number * squares != total * total:
                raise UsageError(
                    "mean(): parts of a batch have losses of different widths, as where collate pads each part to its "
                    "own longest sample; their mean is not the batch's: give mean(losses, counts), with 0 for padding"
                )


def _begin(pair: Pair, *, last: bool) -> None:
    """Reduces a model's gradients over the processes in the `last` microbatch's backward; before, they add up here."""
    if pair.average is not None:
        pair.average.deferred = not last
    if pair.switch is not None:
        pair.switch(last)


def as_given(micro: Microbatch) -> Any:
    """Returns a microbatch in the form in which a loop's body gets it: a pair, or what its collate= has made."""
    if isinstance(micro.targets, tuple) and not micro.targets:
        return micro.inputs
    return micro.inputs, micro.targets
