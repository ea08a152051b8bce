"""Exact: sums with the same bits on any number of processes, over V fixed pieces of a batch, in one fixed tree.

Shapes: V pieces of a global batch over W processes, each with V / W of them (data.batch); n numbers in a model's
gradient; S numbers of all calls' statistics of batch normalisation.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.data.batch import ExactPieces
from grappe.data.device_copy import sent
from grappe.data.draw import mix
from grappe.data.sampling import cut
from grappe.errors import PlanError, TaskError
from grappe.launch.world import World, gather_into
from grappe.plan import Plan
from grappe.private_api.torch import BatchNormBase, foreach_add_, is_dtensor, is_sharded
from grappe.step.clip import NO_GRADIENT, PIECE, local_part, sharded_groups
from grappe.step.fast_paths import seed_generators
from grappe.step.loss import Sums
from grappe.task import Call


class Statistics:
    """Batch normalisation's running statistics: all processes update them from each piece's own, in the pieces' order.

    During a piece's forward momentum is 1, so that the running statistics become each call's own.
    A module may be called several times in a forward: C calls of all modules, with S numbers.

    Raises:
        TaskError: another buffer changed with the samples and cannot be combined; or pieces call
            batch normalisation a different number of times.
    """

    def __init__(self, model: nn.Module, pieces: ExactPieces, world: World) -> None:
        self._pieces, self._world = pieces, world
        self._all = [
            module
            for module in model.modules()
            if isinstance(module, BatchNormBase) and module.running_mean is not None
        ]
        for module in self._all:
            module.register_forward_hook(self._record)
        own = {id(buffer) for module in self._all for buffer in module.buffers(recurse=False)}
        self._model = model
        self._others = {name: buffer.clone() for name, buffer in model.named_buffers() if id(buffer) not in own}
        self._modules: list[BatchNormBase] = []
        self._before: list[Tensor] = []
        self._recording = False
        self._recorded: list[tuple[BatchNormBase, Tensor]] = []
        self._calls: list[BatchNormBase] | None = None
        """The module of each call of a piece's forward; None: no piece has gone through yet."""
        self._agreed: list[BatchNormBase] | None = None
        self._rows: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def of_piece(self, index: int) -> Iterator[None]:
        """Context of the forward and backward of this process's piece `index` of a step."""
        self._begin()
        yield
        if self._recorded:
            calls = [module for module, _ in self._recorded]
            self._calls = self._calls or calls
            if calls != self._calls:
                raise TaskError(
                    f"exact={self._pieces.pieces}: the model calls its batch normalisation {len(calls)} times for some "
                    f"samples and {len(self._calls)} times for others, or in another order: statistics cannot be "
                    "combined in order then: leave exact out"
                )
            self._rows[index] = torch.cat([row for _, row in self._recorded])
            self._recorded = []
            for buffer, before in zip(self._buffers(), self._before, strict=True):
                buffer.copy_(before)  # not before backward, which may still read them

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        """Context of a piece's forward alone: what backward runs again for activation checkpointing is not recorded."""
        momenta = [module.momentum for module in self._modules]
        for module in self._modules:
            module.momentum = 1.0
        self._recording = True
        try:
            yield
        finally:
            self._recording = False
            for module, momentum in zip(self._modules, momenta, strict=True):
                module.momentum = momentum

    def _record(self, module: nn.Module, args: object, output: object) -> None:
        if self._recording and isinstance(module, BatchNormBase) and module.training:
            assert module.running_mean is not None and module.running_var is not None
            self._recorded.append((module, torch.cat([module.running_mean, module.running_var])))

    def combine(self, samples: int) -> None:
        """Updates the running statistics from all pieces of a step, one after the other. Collective."""
        now = dict(self._model.named_buffers()) if self._others else {}
        for name, before in self._others.items():
            if not torch.equal(now[name], before):
                raise TaskError(
                    f"exact={self._pieces.pieces}: the buffer '{name}' changes while the model trains, and only batch "
                    "normalisation's statistics can be combined in order: leave exact out, or the buffer"
                )
        self._others = {}  # once, after the first step
        self._begin()
        if self._modules and (calls := self._agreed_calls()):
            sizes = [2 * module.num_features for module in calls]
            own = self._before[0].new_zeros(self._pieces.pieces // self._pieces.slices, sum(sizes))
            for index, row in self._rows.items():
                own[index] = row
            rows = self._pieces.gathered(own, self._world.data_group)
            for piece in range(self._pieces.pieces):
                if not range(*cut(samples, self._pieces.pieces, piece)):
                    continue
                for module, statistics in zip(calls, rows[piece].split(sizes), strict=True):
                    mean, variance, batches = (module.running_mean, module.running_var, module.num_batches_tracked)
                    assert mean is not None and variance is not None and batches is not None
                    batches += 1
                    weight = 1.0 / float(batches) if module.momentum is None else module.momentum
                    mean.lerp_(statistics[: module.num_features], weight)
                    variance.lerp_(statistics[module.num_features :], weight)
        self._before, self._rows = [], {}

    def _begin(self) -> None:
        """Begins a step, before its first piece; this process may have no piece with a sample."""
        if not self._before:
            self._modules = [module for module in self._all if module.training]
            self._before = [buffer.clone() for buffer in self._buffers()]

    def _buffers(self) -> list[Tensor]:
        return [
            buffer
            for module in self._modules
            for buffer in (module.running_mean, module.running_var, module.num_batches_tracked)
            if buffer is not None
        ]

    def _agreed_calls(self) -> list[BatchNormBase]:
        """Returns a forward's calls; from other processes if this process's pieces had no sample. Collective."""
        if self._agreed is None:
            places = {module: place for place, module in enumerate(self._all)}
            calls_here = None if self._calls is None else [places[module] for module in self._calls]
            agreed = next((calls for calls in self._world.gather_data(calls_here) if calls is not None), None)
            if agreed is None:
                return []  # they have all been put into evaluation
            self._agreed = [self._all[place] for place in agreed]
            self._calls = self._calls or self._agreed
        return self._agreed


class Exact:
    """Sums one optimizer step's gradients, piece by piece, for each parameter.

    A sum's bits depend on its order, so the order is fixed: a binary tree over the V pieces. W processes, W a
    power of two, hold W whole subtrees; each process sums its own, and the rest of the tree is summed by chunks,
    every number by one process, which sends the result to all.
    """

    every_piece: ClassVar[bool] = False
    """Whether pieces without a sample run through the model, too."""

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], plan: Plan, world: World, call: Call
    ) -> None:
        self._parameters, self._world = parameters, world
        pieces = ExactPieces.of(plan)
        assert pieces is not None, "the plan is not exact"
        self._call = call
        self._model, self._pieces, self._places = model, pieces, pieces.places(world.data_rank)
        self._statistics = Statistics(model, pieces, world)
        self._tree: list[tuple[int, list[Tensor | None] | None]] = []
        self._sizes = [parameter.numel() for parameter in parameters]
        self._group = world.data_group
        self._wire = wire(world)
        if world.device.type == "cuda":  # whose fastest kernels may add in any order
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
            torch.use_deterministic_algorithms(True, warn_only=True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]

    @contextlib.contextmanager
    def piece(self, index: int, step: int, seed: int) -> Iterator[None]:
        """Context of the forward and backward of this process's piece `index`, with the piece's own dropout stream."""
        seed_generators(mix(seed, step, self._places[index]), self._world.device)
        with self._statistics.of_piece(index):
            yield

    def forward_ahead(self, index: int, step: int, seed: int, inputs: Any) -> Any:
        """Computes the output that piece `index` will have in its context, without recording anything."""
        return self.forward_again(self._places[index], step, seed, inputs)

    def forward_again(self, place: int, step: int, seed: int, inputs: Any) -> Any:
        """Computes the output of the batch's piece `place`, which may be another process's, without recording it."""
        seed_generators(mix(seed, step, place), self._world.device)
        return self._call(self._model, inputs)

    def forward(self, inputs: Any) -> Any:
        """Computes the model's output for the current piece, and records batch normalisation's statistics."""
        with self._statistics.recorded():
            return self._call(self._model, inputs)

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient, with the same bits on any number of processes. Collective."""
        return exact_norm(self._parameters)

    def add(self, loss: Tensor | None) -> None:
        """Moves the current piece's gradients and loss into the tree; None: the piece had no sample."""
        entry: list[Tensor | None] | None = None
        if loss is not None:
            entry = [*(parameter.grad for parameter in self._parameters), loss.reshape(1)]
            for parameter in self._parameters:
                parameter.grad = None
        self._put(entry)

    def _put(self, entry: list[Tensor | None] | None) -> None:
        """Puts a piece's sums into the tree; two present neighbours are added to one."""
        level = 0
        while self._tree and self._tree[-1][0] == level:
            entry = _sum(self._tree.pop()[1], entry)
            level += 1
        self._tree.append((level, entry))

    @torch.no_grad()
    def reduce(self, flag: float, samples: int) -> Sums:
        """Sets every parameter's gradient over the batch of `samples`; returns the loss and the flags. Collective."""
        [(_, entry)] = self._tree
        self._tree.clear()
        entry = entry if entry is not None else [None] * (len(self._parameters) + 1)
        flat = self._flat(entry, flag)
        if self._group is not None:
            # Each process receives one chunk from all, sums the chunk in the tree's order, and sends the sum to all:
            # over a link go 2 n (W-1) / W numbers, as in a ring, and no process adds in its own order.
            vector = flat.to(self._wire)
            total = torch.empty_like(vector)
            gather_into(total, tree_reduce_scatter(vector, self._group), self._group)
            flat = total.to(self._world.device)
        flat += 0.0  # where one process skips an empty piece another adds zeros, and -0 + 0 is +0
        count = len(self._parameters)
        *gradients, loss, flags, reached = flat[: sum(self._sizes) + 2 + count].split([*self._sizes, 1, 1, count])
        # A parameter that no sample reached keeps no gradient: zeros would let momentum and decay move it.
        has = [value is not None for value in entry[:count]]
        if self._group is not None and not all(has):  # only then are the others' notes read, which waits for them
            has = [seen > 0 for seen in reached.tolist()]
        for parameter, gradient, is_there in zip(self._parameters, gradients, has, strict=True):
            if is_there:
                parameter.grad = gradient.view_as(parameter)
        self._statistics.combine(samples)
        return Sums(torch.cat([loss, flags]))

    def _flat(self, entry: Sequence[Tensor | None], flag: float) -> Tensor:
        """Flattens to [gradients, n | loss | flag | 1 where a parameter has a gradient], padded to a multiple of W."""
        *gradients, loss = entry
        notes = torch.tensor([flag, *(gradient is not None for gradient in gradients)], dtype=torch.float32)
        parts = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        device = self._world.device
        loss = torch.zeros(1, device=device) if loss is None else loss
        filler = torch.zeros(-(sum(self._sizes) + 1 + len(notes)) % self._world.data_size, device=device)
        return torch.cat([*(part.reshape(-1) for part in parts), loss, sent(notes, device), filler])


def tree_reduce_scatter(vector: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Sums this process's chunk [n / W] of all vectors [n], neighbours first: ((0+1)+(2+3))+…. Collective."""
    incoming = torch.empty_like(vector)
    dist.all_to_all_single(incoming, vector, group=group)
    return tree_sum(incoming.view(dist.get_world_size(group), -1))


def tree_sum(rows: Tensor) -> Tensor:
    """Sums the rows [W, n], neighbours first."""
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    return rows[0]


def wire(world: World) -> torch.device:
    """Returns the device for sent tensors: gloo's all-to-all supports the CPU's memory only."""
    gloo = world.data_group is not None and dist.get_backend(world.data_group) == "gloo"
    return torch.device("cpu") if gloo else world.device


def _sum(left: list[Tensor | None] | None, right: list[Tensor | None] | None) -> list[Tensor | None] | None:
    """Adds left and right entry by entry, in left's memory if it has any."""
    if left is None or right is None:
        return right if left is None else left
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


def exact_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Computes `clip.gradient_norm` with the same bits for any sharding of the gradients. Collective if sharded.

    Squares, relative to the largest one, are summed as integer multiples of 2^-60: independent of order, no rounding.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    assert gradients, NO_GRADIENT
    groups = next((sharded for gradient in gradients if (sharded := sharded_groups(gradient))), [])
    # Only the first process counts tensors that every process holds whole (a scalar among sharded tensors).
    first = all(dist.get_rank(group) == 0 for group in groups)
    parts = [local_part(gradient) for gradient in gradients if first or sharded_groups(gradient)]
    pieces = [piece for part in parts if part.numel() for piece in part.reshape(-1).split(PIECE)]
    device = local_part(gradients[0]).device
    kind = torch.promote_types(gradients[0].dtype, torch.float32)
    largest = torch.zeros((), dtype=kind, device=device)
    if pieces:
        largest = torch.stack([piece.abs().max() for piece in pieces]).max().to(kind)
    # all_reduce(MAX) may drop NaN: infinity is sent instead, which also means that there is no norm.
    largest = largest.nan_to_num(nan=torch.inf, posinf=torch.inf)
    for group in groups:
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
    # Without a norm the sums mean nothing and are not used; checking first would wait for the device.
    usable = torch.isfinite(largest) & (largest > 0)
    divisor = torch.where(usable, largest, 1.0).double()
    sums = torch.zeros(2, dtype=torch.int64, device=device)
    for piece in pieces:
        squares = (piece.double() / divisor).square() * 2.0**30
        coarse = squares.floor()
        fine = ((squares - coarse) * 2.0**30).floor()
        sums += torch.stack([coarse.long().sum(), fine.long().sum()])
    for group in groups:
        dist.all_reduce(sums, group=group)
    total = (sums[0].double() + sums[1].double() * 2.0**-30) * 2.0**-30
    return torch.where(usable, (total.sqrt() * divisor).to(kind), largest)


class TreeReduceScatter:
    """The reduce-scatter that FSDP2 calls after each unit's backward: a sum over the processes, neighbours first.

    Process r's piece j is number j W + r, so these W pieces are a whole subtree; above it each process sums its share
    of the gradients of its V / W pieces itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._wire = device

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates memory for input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> None:
        """Reduces all processes' [n] to this process's [n / W]. Collective."""
        output_tensor.copy_(tree_reduce_scatter(input_tensor.to(self._wire), group))


class ShardedExact(Exact):
    """Sums sharded gradients over all pieces; each piece's gradients are already summed over the processes."""

    every_piece: ClassVar[bool] = True  # all processes reduce each unit's gradients together

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], plan: Plan, world: World, call: Call
    ) -> None:
        from torch.distributed.fsdp import FSDPModule

        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise PlanError(
                f"exact with shard needs a newer torch: FSDP of {torch.__version__} does not let its sums be replaced. "
                "Take exact with replicate, or another module of the site"
            )
        super().__init__(model, parameters, plan, world, call)
        self._losses: list[Tensor] = []
        for module in model.modules():
            if is_sharded(module):
                module.set_custom_reduce_scatter(TreeReduceScatter(self._wire))  # type: ignore[arg-type]

    def add(self, loss: Tensor | None) -> None:
        assert loss is not None, "every piece goes through the model"
        self._losses.append(loss.reshape(1))
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._put([None if gradient is None else local_part(gradient) for gradient in gradients])

    @torch.no_grad()
    def reduce(self, flag: float, samples: int) -> Sums:
        [(_, parts)] = self._tree
        self._tree.clear()
        assert parts is not None
        for parameter, part in zip(self._parameters, parts, strict=True):
            if part is not None and not is_dtensor(parameter):  # a scalar, which stays whole
                parameter.grad = part + 0.0
            elif part is not None:
                assert is_dtensor(parameter)
                parameter.grad = parameter.from_local(
                    part + 0.0,  # as for replicas: -0 becomes +0
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        self._statistics.combine(samples)
        sums = torch.cat([*self._losses, torch.full_like(self._losses[0], flag)])
        self._losses = []
        assert self._group is not None
        everyone = sums.new_empty(self._world.data_size * len(sums))
        gather_into(everyone, sums, self._group)
        rows = everyone.view(self._world.data_size, -1)
        losses = self._pieces.in_order(rows[:, :-1].reshape(-1))
        return Sums(torch.stack([tree_sum(losses) + 0.0, rows[:, -1].sum()]))


def exact_sums(model: nn.Module, parameters: Sequence[nn.Parameter], plan: Plan, world: World, call: Call) -> Exact:
    """Makes the object that sums the gradients of an exact plan."""
    return (ShardedExact if plan.shard > 1 else Exact)(model, parameters, plan, world, call)


def unsupported_reason(plan: Plan) -> str | None:
    """Returns the reason why another key of an exact plan excludes `exact`; None if no key does."""
    if plan.pipeline > 1:
        others = plan.data_parallel * plan.pipeline
        return (
            f"exact={plan.exact} with pipeline={plan.pipeline}: a stage adds up its microbatches one after another, "
            f"not in a tree: use shard={others} or replicate={others}, or leave exact out"
        )
    if plan.microbatches > 1:
        return (
            f"exact={plan.exact} cuts each batch into {plan.exact} pieces, which are its microbatches: "
            "leave microbatches out"
        )
    if plan.batchnorm == "sync":
        return f"exact={plan.exact} normalises each of its pieces by itself: leave batchnorm=sync out"
    if plan.compile:
        return "exact and compile: a compiled unit chooses its code by the shapes it has seen: leave compile out"
    if plan.tensor > 1 or plan.offload != "none":
        return f"exact={plan.exact} replicates or shards: leave tensor and offload out"
    if plan.check and plan.shard > 1:
        return f"check={plan.check} needs all weights in each process: use replicate={plan.shard} instead of shard"
    if plan.shard > 1 and plan.replicate > 1:
        return (
            f"exact={plan.exact} with shard and replicate: replicas are summed in their own order: "
            f"use shard={plan.data_parallel}, or replicate={plan.data_parallel}"
        )
    if plan.shard > 1 and plan.channels_last:
        return "exact and channels_last: sharded parameters are not laid out so: leave channels_last or shard out"
    return None
