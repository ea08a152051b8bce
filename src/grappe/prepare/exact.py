"""Exact: the same bits on any number of processes. A batch in V fixed pieces, summed in one fixed tree.

Shapes: V pieces of a global batch over W processes, each with V / W of them in a row; n numbers in a model's
gradient; S numbers of batch normalisation's statistics.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from grappe.data.draw import mix
from grappe.data.ledger import cut
from grappe.errors import TaskError
from grappe.plan import Plan
from grappe.prepare.tally import Sums
from grappe.world import World, gather_into


def refusal(plan: Plan) -> str | None:
    """Why `exact` cannot be had together with something else in the plan; None where it can."""
    if not plan.exact:
        return None
    if plan.microbatches > 1:
        return (
            f"exact={plan.exact} cuts each batch into {plan.exact} pieces, which are its microbatches: "
            "leave microbatches out"
        )
    if plan.batchnorm == "sync":
        return f"exact={plan.exact} normalises each of its pieces by itself: leave batchnorm=sync out"
    if plan.compile:
        return (
            "exact and compile: a compiled unit chooses its code by the shapes it has seen: leave compile out"
        )
    if plan.shard > 1 or plan.tensor > 1 or plan.offload != "none":
        return f"exact={plan.exact} replicates: use replicate=N, without shard, tensor or offload"
    return None


class Exact:
    """Takes one optimizer step's gradients piece by piece, and gives each parameter their sum.

    A sum's bits depend on its order, so the order is fixed: a binary tree over the V pieces. W processes, W a
    power of two, hold W whole subtrees of it; each sums its own, and the rest of the tree is summed by chunks,
    every number by one process, and handed to all.
    """

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], plan: Plan, world: World
    ) -> None:
        self._parameters, self._world = parameters, world
        self._pieces = plan.exact
        self._mine = plan.exact // world.data_size
        self._statistics = Statistics(model, plan.exact, world)
        self._tree: list[tuple[int, list[Tensor | None] | None]] = []
        self._sizes = [parameter.numel() for parameter in parameters]
        self._group = world.data_group
        self._wire = world.device
        if self._group is not None and dist.get_backend(self._group) == "gloo":
            self._wire = torch.device("cpu")
        if world.device.type == "cuda":
            _choose_deterministic_kernels()

    @contextlib.contextmanager
    def piece(self, index: int, step: int, seed: int) -> Iterator[None]:
        """Inside, this process's piece `index` goes forward and backward: dropout's stream is the piece's own."""
        key = mix(seed, step, self._world.data_rank * self._mine + index)
        torch.default_generator.manual_seed(key)
        if self._world.device.type == "cuda":
            torch.cuda.default_generators[self._world.device.index].manual_seed(key)
        with self._statistics.of_piece(index):
            yield

    def add(self, loss: Tensor | None) -> None:
        """Moves the gradients of the piece just done, and its loss, into the tree; None: it had no sample."""
        entry: list[Tensor | None] | None = None
        if loss is not None:
            entry = [*(parameter.grad for parameter in self._parameters), loss.reshape(1)]
            for parameter in self._parameters:
                parameter.grad = None
        level = 0
        while self._tree and self._tree[-1][0] == level:
            entry = _sum(self._tree.pop()[1], entry)
            level += 1
        self._tree.append((level, entry))

    @torch.no_grad()
    def reduce(self, flag: float, samples: int) -> Sums:
        """Gives every parameter the gradient of the whole batch of `samples`. Collective; the loss and the flags."""
        [(_, entry)] = self._tree
        self._tree.clear()
        entry = entry if entry is not None else [None] * (len(self._parameters) + 1)
        flat = self._flat(entry, flag)
        if self._group is not None:
            flat = tree_reduce(flat.to(self._wire), self._group).to(self._world.device)
        flat += 0.0  # where one process skips an empty piece another adds zeros, and -0 + 0 is +0
        count = len(self._parameters)
        *gradients, loss, flags, reached = flat[: sum(self._sizes) + 2 + count].split(
            [*self._sizes, 1, 1, count]
        )
        for parameter, gradient, mine, seen in zip(self._parameters, gradients, entry, reached, strict=False):
            # A parameter that no sample reached stays without: zeros would let momentum and decay move it.
            if mine is not None or seen > 0:
                parameter.grad = gradient.view_as(parameter)
        self._statistics.combine(samples)
        return Sums(torch.cat([loss, flags]))

    def _flat(self, entry: Sequence[Tensor | None], flag: float) -> Tensor:
        """[gradients, n | loss | flag | 1 where a parameter has a gradient], filled up to a multiple of W."""
        *gradients, loss = entry
        notes = torch.tensor([flag, *(gradient is not None for gradient in gradients)], dtype=torch.float32)
        parts = [
            torch.zeros_like(parameter) if gradient is None else gradient
            for parameter, gradient in zip(self._parameters, gradients, strict=True)
        ]
        device = self._world.device
        loss = torch.zeros(1, device=device) if loss is None else loss
        filler = torch.zeros(-(sum(self._sizes) + 1 + len(notes)) % self._world.data_size, device=device)
        return torch.cat([*(part.reshape(-1) for part in parts), loss, notes.to(device), filler])


def tree_reduce(vector: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The sum of the processes' vectors [n], neighbours first: ((0+1)+(2+3))+…; W must divide n. Collective.

    Each process receives one chunk from all, sums it in the tree's order, and sends the sum to all: over a link
    go 2 n (W-1) / W numbers, as in a ring, and no process adds in an order of its own.
    """
    ways = dist.get_world_size(group)
    incoming = torch.empty_like(vector)
    dist.all_to_all_single(incoming, vector, group=group)
    rows = incoming.view(ways, -1)
    while len(rows) > 1:
        rows = rows[0::2] + rows[1::2]
    whole = torch.empty_like(vector)
    gather_into(whole, rows[0], group)
    return whole


def _sum(left: list[Tensor | None] | None, right: list[Tensor | None] | None) -> list[Tensor | None] | None:
    """Entry by entry left + right, in the left's memory where it has some."""
    if left is None or right is None:
        return right if left is None else left
    both = [(a, b) for a, b in zip(left, right, strict=True) if a is not None and b is not None]
    if both:
        torch._foreach_add_([a for a, _ in both], [b for _, b in both])
    return [b if a is None else a for a, b in zip(left, right, strict=True)]


class Statistics:
    """Batch normalisation's running statistics: each piece's own, taken in by all processes in the pieces' order.

    While a piece goes through the model, momentum is 1, so that the running statistics become those of each call.
    A module may be called several times in a forward: C calls of all modules, with S numbers.

    Raises:
        TaskError: another buffer changed with the samples, and nobody knows how to combine it; or pieces call
            their batch normalisation differently often.
    """

    def __init__(self, model: nn.Module, pieces: int, world: World) -> None:
        self._pieces, self._world = pieces, world
        self._all = [
            one for one in model.modules() if isinstance(one, _BatchNorm) and one.running_mean is not None
        ]
        for module in self._all:
            module.register_forward_hook(self._note)
        mine = {id(buffer) for module in self._all for buffer in module.buffers(recurse=False)}
        self._model = model
        self._others = {
            name: buffer.clone() for name, buffer in model.named_buffers() if id(buffer) not in mine
        }
        self._modules: list[_BatchNorm] = []
        self._before: list[Tensor] = []
        self._told: list[tuple[_BatchNorm, Tensor]] = []
        self._calls: list[_BatchNorm] | None = None
        """The module of each call of a piece's forward; None: no piece has gone through yet."""
        self._agreed: list[_BatchNorm] | None = None
        self._rows: dict[int, Tensor] = {}

    @contextlib.contextmanager
    def of_piece(self, index: int) -> Iterator[None]:
        """Inside, this process's piece `index` of a step goes through the model."""
        self._begin()
        momenta = [module.momentum for module in self._modules]
        for module in self._modules:
            module.momentum = 1.0
        try:
            yield
        finally:
            for module, momentum in zip(self._modules, momenta, strict=True):
                module.momentum = momentum
        if self._told:
            self._keep(index)
            for buffer, before in zip(self._buffers(), self._before, strict=True):
                buffer.copy_(before)

    def _note(self, module: nn.Module, args: object, output: object) -> None:
        # Recomputation, which runs a forward again, has set momentum to 0.
        if isinstance(module, _BatchNorm) and module.training and module.momentum == 1.0:
            assert module.running_mean is not None and module.running_var is not None
            self._told.append((module, torch.cat([module.running_mean, module.running_var])))

    def _keep(self, index: int) -> None:
        calls = [module for module, _ in self._told]
        self._calls = self._calls or calls
        if calls != self._calls:
            raise TaskError(
                f"exact={self._pieces}: the model calls its batch normalisation {len(calls)} times for some samples "
                f"and {len(self._calls)} times for others, or in another order: statistics cannot be combined in "
                "order then: leave exact out"
            )
        self._rows[index] = torch.cat([one for _, one in self._told])
        self._told = []

    def combine(self, samples: int) -> None:
        """Takes the statistics of all pieces of a step in, one after the other. Collective."""
        self._check_others()
        self._begin()
        if self._modules:
            calls = self._agreed_calls()
            rows = self._gathered(sum(2 * module.num_features for module in calls)) if calls else None
            for piece in range(self._pieces):
                if rows is not None and range(*cut(samples, self._pieces, piece)):
                    self._take_in(calls, rows[piece])
        self._before, self._rows = [], {}

    def _begin(self) -> None:
        """Once a step, before its first piece; this process may have none with a sample."""
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

    def _agreed_calls(self) -> list[_BatchNorm]:
        """The calls of a forward; a process whose pieces have had no sample yet is told by the others. Collective."""
        if self._agreed is None:
            places = {module: place for place, module in enumerate(self._all)}
            mine = None if self._calls is None else [places[module] for module in self._calls]
            told = next((one for one in self._world.gather_data(mine) if one is not None), None)
            if told is None:
                return []  # they have all been put into evaluation
            self._agreed = [self._all[place] for place in told]
            self._calls = self._calls or self._agreed
        return self._agreed

    def _gathered(self, size: int) -> Tensor:
        """Every piece's statistics, [V, S], on every process."""
        share = self._pieces // self._world.data_size
        mine = torch.zeros(share, size, device=self._world.device)
        for index, row in self._rows.items():
            mine[index] = row
        if self._world.data_group is None:
            return mine
        rows = torch.empty(self._pieces, size, device=self._world.device)
        gather_into(rows, mine, self._world.data_group)
        return rows

    def _take_in(self, calls: Sequence[_BatchNorm], row: Tensor) -> None:
        for module, one in zip(calls, row.split([2 * module.num_features for module in calls]), strict=True):
            mean, variance, batches = module.running_mean, module.running_var, module.num_batches_tracked
            assert mean is not None and variance is not None and batches is not None
            batches += 1
            weight = 1.0 / float(batches) if module.momentum is None else module.momentum
            mean.lerp_(one[: module.num_features], weight)
            variance.lerp_(one[module.num_features :], weight)

    def _check_others(self) -> None:
        """Once, behind the first step."""
        now = dict(self._model.named_buffers()) if self._others else {}
        for name, before in self._others.items():
            if not torch.equal(now[name], before):
                raise TaskError(
                    f"exact={self._pieces}: the buffer '{name}' changes while the model trains, and only batch "
                    "normalisation's statistics can be combined in order: leave exact out, or the buffer"
                )
        self._others = {}


def _choose_deterministic_kernels() -> None:
    """CUDA's fastest kernels may add in any order."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
