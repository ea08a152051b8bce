"""Spreads a script's steps over processes: a batch becomes rows, gradients are sums of the processes' terms.

Every process runs the whole script, unedited or around a grappe.Loop. What its tensors are, whoever has the rows,
`grappe.rows` says; where they are split is a matter of speed alone, as any tensor may be.
"""

from __future__ import annotations

import contextlib
import functools
import time
import weakref
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from torch.optim import Optimizer
from torch.utils.data import DataLoader, default_collate

from grappe.errors import DivergedError, TaskError
from grappe.launch.terminal import complain
from grappe.launch.world import World
from grappe.private_api.torch import (
    BatchNormBase,
    LossBase,
    MapFetcher,
    has_backward_hooks,
    is_observed,
    transforms_active,
    tree_leaves,
    tree_map,
)
from grappe.rows.context import RowsContext
from grappe.rows.entries import entries
from grappe.rows.functions import weight
from grappe.rows.gradients import GradientSums
from grappe.rows.own import OwnRows, as_own, as_rows, local_of, new_own, with_own_rows
from grappe.rows.plans import activate
from grappe.rows.tensor import Rows, are_rows, full, split
from grappe.training.interception import Begin, MainThread, StepHandler, parameters_of, replaced
from grappe.training.plan_keys import PlanKeys
from grappe.training.shared_workers import begun, fetching, loaded_rows

CHECK_EVERY = 100  # steps, after which the processes compare their weights; at first after 1, 2, 4, …
REPORTED = 20  # steps, after which it is said what was gathered


def rows_context(world: World, folder: Path) -> RowsContext:
    """Makes the context of the processes that share a script's rows. Collective.

    Args:
        folder: the script's, whose lines are named.
    """
    group = world.data_group
    if group is not None and dist.get_backend(group) == "nccl":  # what a script does on the CPU needs gloo
        group = dist.new_group(backend="cpu:gloo,cuda:nccl")
    return RowsContext(rank=world.data_rank, size=world.data_size, group=group, script_folder=f"{folder.absolute()}/")


def is_checked(step: int) -> bool:
    """Returns whether the processes compare what they have after a step."""
    return step % CHECK_EVERY == 0 or step & (step - 1) == 0


class SpreadSteps(StepHandler):
    """Handles a script's steps on one of several processes; on one, it applies the plan's keys."""

    def __init__(self, world: World, keys: PlanKeys, context: RowsContext) -> None:
        self._world, self._keys, self._context = world, keys, context
        self.group, self._several = context.group, world.data_size > 1
        self._changes = self._several or bool(keys.names)
        self._is_local = keys.plan.batchnorm == "local" and self._several
        self._optimizers: list[Optimizer] = []
        # Dictionaries, as the order in a set is each process's own. When the garbage collector takes a module is each
        # process's own, too: no message depends on how many are left.
        self._modules = weakref.WeakKeyDictionary[nn.Module, int]()
        """Numbers of the modules that the script calls, outside of any other, in the order of their first calls."""
        self._trainable = weakref.WeakKeyDictionary[nn.Module, bool]()
        """Whether a module has parameters: a loss, which joins rows, has none."""
        self._registered = 0
        self._norms = weakref.WeakKeyDictionary[nn.Module, None]()
        """Batch normalisations of own rows."""
        self._moved: dict[nn.Module, None] = {}
        """Those of the running step, whose running statistics are averaged after it."""
        self._time_major = weakref.WeakKeyDictionary[nn.Module, bool]()
        self._sums = GradientSums()
        context.twin = self._sums.twin
        self._parameters: list[Tensor] = []
        self._sizes: tuple[int, ...] = ()
        self._batches: list[tuple[str, int]] = []
        """Lines at which the next step to be checked has split a tensor, and checksums."""
        on_one_machine = self._several and world.process.local_size == world.size
        self._workers = cast("dist.ProcessGroup", dist.new_group(backend="gloo")) if on_one_machine else None
        self._main = MainThread()
        self._depth = self._rows = 0
        self._is_compared = False
        self._began = time.perf_counter()
        self.steps = 0
        self.replaying = False
        """Whether nothing is computed: the script is replayed up to its checkpoint."""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context in which the script runs."""
        functions: list[tuple[Any, str, Any]] = [(nn.Module, "__call__", self._calling)] if self._changes else []
        if self._several:
            functions += [
                *entries(self._sums),
                (MapFetcher, "fetch", fetching),
                (torch, "compile", self._uncompiled),
                (nn.DataParallel, "forward", _undivided),
            ]
        if self._is_local:
            kinds = (BatchNormBase, *BatchNormBase.__subclasses__())
            functions += [(kind, "forward", self._normalising) for kind in kinds if "forward" in vars(kind)]
        with activate(self._context), replaced(*functions):
            yield

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Context in which batches are loaded: what modules of a dataset get, such as an image's channels, is whole."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1

    # ---- Where rows come from ------------------------------------------------------------------------------

    def begun(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """Begins an iteration of a loader, whose workers the processes of a machine share."""
        return begun(loader, begin, self._workers) if self._workers is not None and self._main else begin()

    def batches(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """Returns a loader's batches, of which one process without a key changes nothing."""
        return self._changed(loader, begin) if self._changes else begin()

    def _changed(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """Yields a loader's batches, whose tensors with as many rows as most of them have are rows."""
        iterator = begin()
        while self._main:
            with self.loading():
                try:
                    batch = self._keys.batch(next(iterator))
                except StopIteration:
                    return
            # Another collate function may give a view of the data set, which an in-place write must reach.
            shared = loader.collate_fn is not default_collate and not loader.num_workers
            yield self.split(batch, shared=shared) if self._several else batch
        yield from iterator  # in a data worker

    def split(self, batch: Any, *, shared: bool = False) -> Any:
        """Returns a batch that all processes have, with rows in place of tensors of as many rows as most have."""
        rows = loaded_rows(batch)
        if rows < self._world.data_size:
            return batch
        self._rows = rows

        def taken(each: Any) -> Any:
            if not are_rows(each, 0, rows):
                return each
            self._note(each)
            return split(each, shared=shared)

        return tree_map(taken, batch)

    def _calling(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Splits what an outermost module gets where no argument is rows: noise, or a batch that no loader made."""

        def call(module: nn.Module, *arguments: Any, **options: Any) -> Any:
            if self._depth or not self._main:  # data workers and threads have no part in messages
                if has_backward_hooks(module) or isinstance(module, torch.jit.ScriptModule):
                    arguments, options = tree_map(as_rows, (arguments, options))
                    self._context.is_watched = True
                return plain(module, *arguments, **options)
            self._depth += 1
            try:
                if module not in self._modules:
                    self._modules[module] = self._registered
                    self._registered += 1
                self._keys.prepare(module, self._optimizers)
                is_derived = transforms_active() or torch.jit.is_tracing()
                if self._several and not (is_derived or isinstance(module, LossBase)):
                    arguments, options = self._arguments(module, arguments, options)
                    if module not in self._trainable:
                        self._trainable[module] = next(module.parameters(), None) is not None
                    # Whether functions within it run on own rows is a matter of speed alone.
                    if self._trainable[module] and not self._keys.plan.uses_fsdp and not is_observed():
                        return with_own_rows(functools.partial(plain, module), arguments, options)
                return plain(module, *arguments, **options)
            finally:
                self._depth -= 1

        return call

    def _arguments(self, module: nn.Module, arguments: Any, options: Any) -> tuple[Any, Any]:
        leaves = [each for each in tree_leaves((arguments, options)) if isinstance(each, Tensor)]
        packed = any(
            isinstance(each, PackedSequence) or (isinstance(each, list | tuple) and len(each) == self._rows)
            for each in arguments
        )  # which hold a tensor for all samples, or for each
        if packed or not leaves or any(type(each) is Rows for each in leaves):
            return arguments, options
        if module not in self._time_major:
            kinds = (nn.RNNBase, nn.MultiheadAttention)
            self._time_major[module] = any(
                isinstance(each, kinds) and not each.batch_first for each in module.modules()
            )
        dim = int(self._time_major[module] and leaves[0].dim() > 1)
        rows = leaves[0].shape[dim] if leaves[0].dim() > dim else 0
        if rows < self._world.data_size or (leaves[0].dim() == 1 and rows != self._rows):
            return arguments, options

        def taken(each: Any) -> Any:
            if not are_rows(each, dim, rows):
                return each
            self._note(each)
            return _Split.apply(each, dim) if each.requires_grad else split(each, dim, shared=True)

        return tree_map(taken, (arguments, options))

    def _note(self, batch: Tensor) -> None:
        """Notes the numbers of a tensor that is split, which must be the same on all processes."""
        if is_checked(self.steps + 1) and not self.replaying:
            numbers = batch.detach().resolve_conj().resolve_neg().cpu().reshape(-1)
            self._batches.append((self._context.line(), zlib.crc32(numbers.view(torch.uint8).numpy().tobytes())))

    def _uncompiled(self, _: Callable[..., Any]) -> Callable[..., Any]:
        """Stands for torch.compile, which would trace the local part of an operator's rule."""
        is_first = not self._world.rank

        def compiled(model: Any = None, **options: Any) -> Any:
            nonlocal is_first
            if is_first:
                complain("grappe: torch.compile is left out: several processes run uncompiled")
            is_first = False
            return (lambda function: function) if model is None else model

        return compiled

    def _normalising(self, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Has batch normalisation take a process's own rows, as batchnorm=local asks."""

        def normalise(module: Any, value: Tensor) -> Tensor:
            own = as_own(value)
            if not module.training or type(own) is not OwnRows or own._place.dim or own._place.outer != 1:
                return plain(module, value)
            self._norms[module] = self._moved[module] = None
            weights = {name: weight(each) for name, each in module.named_parameters()}
            made = new_own(torch.func.functional_call(module, weights, local_of(own)), own._place)
            return made if own is value else as_rows(made)

        return normalise

    # ---- Steps ---------------------------------------------------------------------------------------------

    def backward(self, loss: Tensor, run: Callable[[float], None]) -> None:
        """Runs a backward; afterwards gradients are plain tensors, of all rows."""
        if not self._is_compared and not self.replaying:
            self._is_compared = True
            self._check_weights()
            self._began = time.perf_counter()
            self._context.seconds.clear()
        self._check_batches()
        if self._several:
            plain = run
            run = lambda by: self._sums.backward(self._trained(), lambda: plain(by))  # noqa: E731
        self._keys.backward(self._optimizers, run)

    def _trained(self) -> list[Tensor]:
        """Returns the parameters whose gradients go in one message; another one's is summed where it is read."""
        groups = [group["params"] for optimizer in self._optimizers for group in optimizer.param_groups]
        sizes = (self._registered, *map(len, groups))  # of what the list below, which takes long, was made of
        if sizes != self._sizes:
            of_modules = (each for module in list(self._modules) for each in module.parameters())
            of_groups = (each for group in groups for each in group)
            every = {id(each): each for each in (*of_groups, *of_modules)}
            self._parameters = [each for each in every.values() if type(each) is not Rows]
            self._sizes = () if self._keys.plan.uses_fsdp else sizes
        return self._parameters

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer, if its steps are to be changed."""
        if not self._changes or any(each is optimizer for each in self._optimizers):
            return
        self._optimizers.append(optimizer)
        optimizer.register_step_pre_hook(self._before_step)
        self._keys.add_optimizer(optimizer)
        optimizer.register_step_post_hook(self._after_step)

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        for each in parameters_of([optimizer]):
            if type(each.grad) is Rows:
                each.grad = full(each.grad).detach()

    def _after_step(self, *_: Any) -> None:
        if self.replaying:
            return
        self.steps += 1
        if self._keys.names and not self._keys.on:
            key = self._keys.names[0]
            value = getattr(self._keys.plan, key)
            text = key if value is True else f"{key}={value}"
            raise TaskError(f"{text} has no model: a step calls no torch.nn.Module that is trained")
        if self._moved:
            statistics = [each for module in self._moved for each in module.buffers() if each.is_floating_point()]
            self._moved.clear()
            flat = torch.cat([each.reshape(-1) for each in statistics])
            dist.all_reduce(flat, group=self.group)
            for each, mean in zip(
                statistics, (flat / self._world.data_size).split([each.numel() for each in statistics]), strict=True
            ):
                each.copy_(mean.view(each.shape))
        if is_checked(self.steps):
            self._check_weights()
        if self.steps == REPORTED:
            self._report()

    def _check_batches(self) -> None:
        """Raises DivergedError where the processes have split other batches since the last backward. Collective."""
        if not self._batches:
            return
        batches, self._batches = self._batches, []
        for other in self._world.gather(batches):
            for (line, own), (_, others) in zip(batches, other, strict=False):
                if own != others:
                    raise DivergedError(
                        f"the processes have not the same batch ({line}): the script draws it from what is not the "
                        "same in each, as a queue that several workers fill, or id(). Load it with a "
                        "torch.utils.data.DataLoader, or draw it with torch, NumPy or random"
                    )

    def _check_weights(self) -> None:
        """Raises DivergedError where the processes' weights differ. Collective."""
        if not self._several:
            return
        tensors = {(-1, number): each for number, each in enumerate(parameters_of(self._optimizers))}
        trained = {id(each) for each in tensors.values()}
        for module, first in list(self._modules.items()):
            inner = [each for each in module.modules() if each not in self._norms]
            others = (each for each in module.parameters() if id(each) not in trained)
            values = (*others, *(each for kind in inner for each in kind.buffers(recurse=False)))
            tensors |= {(first, number): each for number, each in enumerate(values)}
        plain = {key: each for key, each in tensors.items() if type(each) in (Tensor, nn.Parameter)}
        plain = {key: each.detach() for key, each in plain.items() if not each.is_meta}
        kinds = {key: torch.promote_types(each.dtype, torch.float64) for key, each in plain.items()}  # or complex
        sums = {key: repr(each.to(kinds[key]).sum().item()) for key, each in plain.items()}
        if any(sums[key] != other[key] for other in self._world.gather(sums) for key in sums.keys() & other.keys()):
            raise DivergedError(
                f"the processes' weights or buffers differ after {self.steps} steps: the script makes them from what "
                "is not the same in each process, as id() or the order of a set of objects"
                if self.steps
                else "the processes began with different weights: the script seeds by what is not the same in each, as "
                "id() or the order of a set of objects"
            )

    def close(self) -> None:
        """Says what was gathered, and compares the weights a last time. Collective."""
        self._check_weights()
        if self._several and self.steps and not self._context.dispatched and not self._world.rank:
            complain(
                f"grappe: nothing was split over {self._world.size} processes: no batch of the script has rows for "
                "each, so each process computed what one process does"
            )
        if self.steps < REPORTED:
            self._report()

    def _report(self) -> None:
        lines = self._context.gathering(time.perf_counter() - self._began)
        if lines and not self._world.rank:
            complain(f"grappe: after {self.steps} steps, {lines}")


class _Split(torch.autograd.Function):
    """Rows of a plain tensor that has a gradient."""

    @staticmethod
    def forward(ctx: Any, plain: Tensor, dim: int) -> Any:
        return split(plain.detach(), dim, shared=True)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad, None


def _undivided(_: Callable[..., Any]) -> Callable[..., Any]:
    """Stands for DataParallel's forward, which would take the other processes' GPUs."""

    def forward(parallel: nn.DataParallel[nn.Module], *arguments: Any, **options: Any) -> Any:
        if parallel.device_ids:
            device = torch.device("cuda", torch.cuda.current_device())
            arguments, options = tree_map(
                lambda each: each.to(device) if isinstance(each, Tensor) else each, (arguments, options)
            )
        return parallel.module(*arguments, **options)

    return forward
