"""Steps of hand-written loops: batches as rows, backwards, and their losses and times."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from grappe.data.arrays import in_memory, one_by_one
from grappe.data.batch import Batch
from grappe.data.collate import form
from grappe.data.datasets import check
from grappe.data.loader import BatchLoader
from grappe.data.sampling import Sampling, cut
from grappe.data.seeded import seeded
from grappe.errors import UsageError
from grappe.errors.user_code import sentence
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import tree_leaves, tree_map
from grappe.rows.context import RowsContext
from grappe.rows.plans import activate
from grappe.rows.tensor import Placement, from_local
from grappe.task import Task, fields
from grappe.training.interception import StepHandler, intercepted
from grappe.training.own_loop_run import StepLog
from grappe.training.own_loop_world import Joined
from grappe.training.plan_keys import PlanKeys, gradients_summed
from grappe.training.random_state import random_state, set_random_state
from grappe.training.rows_step import SpreadSteps, rows_context

SHAPES = 1 << 20
"""Number of hashes of shapes: the square of one is exact in float64, summed over processes, too."""


class LoopSteps(StepHandler):
    """Handles the steps of the loops that are open in this process; the last's end puts back what it replaces."""

    now: LoopSteps | None = None
    """None: no loop is open."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.world, self.keys = world, PlanKeys(plan, world)
        if world.size > 1 and Joined.context is None:
            Joined.context = rows_context(world, Path(sys.argv[0]).absolute().parent)
            Joined.until_left.enter_context(activate(Joined.context))
            if plan.uses_fsdp:
                Joined.until_left.enter_context(gradients_summed(world))
        self.inner = self.spread = SpreadSteps(world, self.keys, Joined.context or RowsContext())
        self._undo = contextlib.ExitStack()
        self._undo.callback(torch.set_default_dtype, torch.get_default_dtype())  # which precision=fp64 sets
        self._undo.enter_context(intercepted(self))
        self._undo.enter_context(self.spread.running())
        self._open: list[StepLog] = []
        """The logs of the loops that have not ended."""
        self.running: StepLog | None = None
        """That of the loop whose body runs."""
        self.shapes = 0
        """A hash of the shapes and types of the last batch's samples, which are alike on all processes."""

    @classmethod
    def of(cls, plan: Plan, world: World, began: float) -> tuple[LoopSteps, StepLog]:
        """Returns the steps of the open loops, and the log of one that joins them. All draw alike then. Collective."""
        steps = cls.now = cls.now or cls(plan, world)
        log = StepLog(plan, world, began, steps.spread)
        steps._open.append(log)
        if world.size > 1:
            set_random_state(world.share(random_state()))
        return steps, log

    def end(self, log: StepLog, error: BaseException | None) -> None:
        """Ends a loop, once. Collective without an error."""
        if log not in self._open:
            return
        self._open.remove(log)
        if self._open:
            return
        try:
            if error is None:
                self.spread.close()
        finally:
            LoopSteps.now = None
            self._undo.close()

    def backward(self, loss: Tensor, run: Callable[[float], None]) -> None:
        """Runs a backward; in a loop's body its time and its loss are noted."""
        if self.running is None:
            super().backward(loss, run)
        else:
            self.running.backward(loss, run)

    def loader(
        self,
        make: Callable[..., BatchLoader],
        call: LoopBatches,
        dataset: Dataset,
        collate: Callable[[list[Any]], Any] | None,
        sampling: Sampling | None,
    ) -> tuple[BatchLoader, bool]:
        """Returns the loader of a call, and whether it gives this process's own rows; otherwise whole batches.

        A batch is whole where the form of its parts may depend on all samples, or is none of rows; and of tensors in
        memory, since labels that each process has need no messages.
        """
        arrays = in_memory(dataset) if collate is None and sampling is None else None
        plain = arrays is not None
        call.__dict__.update({"form": collate, "drawn": sampling})
        task = Task(**fields(call)) if plain else call  # of a plain Task rows in memory are gathered at once
        check(dataset, "train", task)
        # With dropout=local no loader pads parts alike: rows of several lengths are refused.
        plan, world = dataclasses.replace(self.keys.plan, channels_last=False, dropout="local"), self.world
        plan = dataclasses.replace(plan, validation_batch=plan.validation_batch or task.batch_size)
        if collate is not None:
            plan = dataclasses.replace(plan, loading="processes")  # threads share the generators that it may draw from
        samples = dataset if plain else one_by_one(dataset)
        source = make(task, samples, plan, world)
        own = arrays is not None and arrays.transform is not None
        if world.data_size > 1 and collate is None and arrays is None:  # own if each tensor has a row for each sample
            with self.spread.loading():
                rows, leaves = min(2, len(source.dataset)), tree_leaves(source.example_batch())  # type: ignore[arg-type]
            own = all(isinstance(leaf, Tensor) and leaf.dim() > 0 and len(leaf) == rows for leaf in leaves)
        if own or world.data_size == 1:
            return source, True
        world = dataclasses.replace(world, data_rank=0, data_size=1, data_group=None)
        return make(task, samples, dataclasses.replace(plan, replicate=1, shard=1), world), False

    def load(self, loader: BatchLoader, own: bool, start: int, stop: int) -> Iterator[tuple[Batch, Any]]:
        """Yields the batches of steps `start` to `stop`, each with what a body gets of it.

        Args:
            own: whether the loader gives this process's rows alone.
        """
        taken = loader.batches(start, stop)
        try:
            while True:
                with self.spread.loading():
                    batch = next(taken, None)
                if batch is None:
                    return
                yield batch, self._rows(batch, own)
        finally:
            taken.close()  # type: ignore[attr-defined]
            if loader.loads:
                loader.sources.close()

    def _rows(self, batch: Batch, own: bool) -> Any:
        micro, size = batch.microbatches[0], self.world.data_size
        without_targets = isinstance(micro.targets, tuple) and not micro.targets  # as LoopBatches makes it
        taken = micro.inputs if without_targets else (micro.inputs, micro.targets)
        if size == 1:
            return taken
        if not own:
            return self.spread.split(taken)
        spans = [cut(batch.samples, size, rank) for rank in range(size)]
        placement = Placement(0, tuple(end - begin for begin, end in spans))
        shapes = [(tuple(each.shape[1:]), each.dtype) for each in tree_leaves(taken)]
        self.shapes = zlib.crc32(repr(shapes).encode()) % SHAPES
        return tree_map(lambda leaf: from_local(leaf[: micro.rows], placement), taken)


class LoopBatches(Task):
    """Description of the batches of a call of `batches` or `evaluate`; their form is what `collate=` returns."""

    def collate(self, samples: Sequence[Any]) -> Any:
        """Returns the batch as the inputs, without targets. A user's draws depend on the samples' numbers alone."""
        own = self.__dict__["form"]
        try:
            with contextlib.nullcontext() if own is None else seeded(samples.key):  # type: ignore[attr-defined]
                return (own or default_collate)(list(samples)), ()
        except Exception as error:
            raise UsageError(
                f"samples of the form {form(samples[0])} cannot be put together ({sentence(error)}): "
                + ("mend collate=" if own else "give batches(…, collate=a function of a list of samples)")
            ) from error

    def sampling(self, dataset: Any) -> Any:
        """Returns the call's `sampling=`."""
        return self.__dict__["drawn"]
