"""Statistics: batch normalisation's, of each piece of a batch, combined in order on every process.

Shapes: V pieces of a global batch over W processes; S numbers of all calls' statistics.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from grappe.data.order import cut
from grappe.data.pieces import ExactPieces
from grappe.errors import TaskError
from grappe.launch.world import World
from grappe.private_api.torch import BatchNormBase


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
        self._check_others()
        self._begin()
        if self._modules and (calls := self._agreed_calls()):
            sizes = [2 * module.num_features for module in calls]
            own = torch.zeros(self._pieces.pieces // self._pieces.slices, sum(sizes), device=self._world.device)
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

    def _check_others(self) -> None:
        """Checks the other buffers once, after the first step."""
        now = dict(self._model.named_buffers()) if self._others else {}
        for name, before in self._others.items():
            if not torch.equal(now[name], before):
                raise TaskError(
                    f"exact={self._pieces.pieces}: the buffer '{name}' changes while the model trains, and only batch "
                    "normalisation's statistics can be combined in order: leave exact out, or the buffer"
                )
        self._others = {}
