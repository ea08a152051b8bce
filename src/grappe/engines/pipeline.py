"""The native engine's other half: a model in stages, each on its own process, and pipelines beside each other."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim import Optimizer

from grappe.aside import in_a_child
from grappe.data.batch import Batch, Microbatch
from grappe.data.feed import rows_of
from grappe.engines.base import Setting, State
from grappe.engines.native import Native
from grappe.errors import GrappeError
from grappe.phases import BACKWARD, FORWARD
from grappe.pipeline.check import check_units
from grappe.pipeline.cut import cut
from grappe.pipeline.even import OneShape, check_even, even, largest
from grappe.pipeline.relay import Relay
from grappe.pipeline.replicas import sum_gradients
from grappe.pipeline.rules import stages_each
from grappe.pipeline.schedules import Runner
from grappe.pipeline.stage import Stage, prune
from grappe.prepare import Prepared, prepare
from grappe.prepare.batchnorm import buffers_agreed, untraced
from grappe.prepare.clip import gradient_norm
from grappe.prepare.dropout import seed_dropout
from grappe.prepare.materialise import on_meta
from grappe.prepare.precision import autocast
from grappe.prepare.shard import reshard, uses_shard
from grappe.prepare.tally import Sums
from grappe.scores import Scorer, Scores


class Pipelined(Native):
    """Holds the units of its own stages only; their parameters keep the model's names."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._ways = 1.0  # gradients are summed, by replicas too
        self._total: Tensor | None = None
        self._batch: Batch | None = None
        # Parameters and gradients of zero=1 are whole during a step: torch's stages then reduce them at its end.
        held = uses_shard(self._plan) and self._plan.zero == 1
        self._relay = Relay(self._stages, self._world)
        self._runner = Runner(self._plan.schedule, self._relay, self._world.device, self._loss, held)
        # Collectives inside a forward: whoever sees a new shape would be alone in sending one through.
        together = uses_shard(self._plan) or self._plan.batchnorm == "sync"
        self._shape = OneShape() if together and self._world.data_group is not None else None
        self._sums_replicas = None if uses_shard(self._plan) else self._world.data_group
        for stage in self._stages:  # what a schedule does between two forwards is backward, but for its waits
            stage.register_forward_pre_hook(lambda *_: self._phase(FORWARD))
            stage.register_forward_hook(lambda *_: self._phase(BACKWARD))

    def _prepare(self, setting: Setting) -> Prepared:
        task, plan, world = setting.task, setting.plan, setting.world
        sketch = on_meta(task)
        parts = cut(task, sketch, plan.pipeline * stages_each(plan), setting.example)
        if any(isinstance(module, _BatchNorm) for module in sketch.modules()) and setting.samples:
            check_even(plan, task.batch_size, setting.samples)
        self._check_once(setting)
        self._trained = [(name, one) for name, one in sketch.named_parameters() if one.requires_grad]
        place = world.coordinates()["pipeline"][0]
        self._stages: list[Stage] = []

        def keep(model: nn.Module, units: list[nn.Module]) -> list[tuple[nn.Module, list[nn.Module]]]:
            mine = [number for number in range(len(parts)) if number % plan.pipeline == place]
            kept = [(number, [units[unit] for unit in parts[number]]) for number in mine]
            inside = {id(unit) for _, several in kept for unit in several}
            prune(model, [unit for unit in units if id(unit) not in inside])
            for number, several in kept:
                context = autocast(plan.precision, world.device) or contextlib.nullcontext()
                self._stages.append(Stage(several, number, len(parts), context))
            return list(zip(self._stages, [several for _, several in kept], strict=True))

        return prepare(task, plan, world, setting.weights, keep)

    def _make_optimizer(self, named: list[tuple[str, nn.Parameter]]) -> Optimizer:
        """Made over the whole model, which a task's rules may look at; then what is elsewhere is taken out again."""
        mine, device = dict(named), self._world.device
        optimizer = self._task.optimizer(
            [(name, mine[name] if name in mine else _stand_in(one, device)) for name, one in self._trained]
        )
        own = {id(parameter) for parameter in mine.values()}
        for group in optimizer.param_groups:
            kept = [number for number, one in enumerate(group["params"]) if id(one) in own]
            for key in {"params", "param_names"} & set(group):
                group[key] = [group[key][number] for number in kept]
        for parameter in [one for one in optimizer.state if id(one) not in own]:
            del optimizer.state[parameter]
        del self._trained
        return optimizer

    def _check_once(self, setting: Setting) -> None:
        """Process 0 sees whether the units are the model; the others hear of it."""
        if setting.example is None:
            return
        problem: GrappeError | None = None
        if self._world.rank == 0:
            try:
                in_a_child(lambda: check_units(setting.task, setting.example))
            except GrappeError as error:
                problem = error
        problem = self._world.share(problem)
        if problem is not None:
            raise problem

    def _gradients(self, batch: Batch) -> Sums:
        micros = even(batch.microbatches, largest(self._plan, batch.samples))
        if self._shape is not None:
            self._shape.check(micros[0])
        if not self._runner.knows(micros[0]):
            self._learn(micros[0], len(micros))
        seed_dropout(self._task.seed, batch.step, self._world, self._world.coordinates()["pipeline"][0])
        self._batch, self._total = batch, None
        self._runner.run(micros)
        self._batch = None
        if self._sums_replicas is not None:
            sum_gradients(self._parameters, self._sums_replicas)
        # Told by the last stage alone, where the tally takes it that all of a slice's processes have it.
        total = self._total * self._plan.pipeline if self._total is not None else self._tally.zero
        self._tally.roots(total, self._flag())
        return self._tally.sums()

    def _learn(self, micro: Microbatch, microbatches: int) -> None:
        """Sends a microbatch of a new shape through, so that every stage knows what it will be sent."""
        with untraced(self._model):
            for _ in self._relay.forward([micro]):
                pass
        reshard_all(self._stages)
        self._runner.learn(micro, microbatches)

    def _loss(self, output: Any, micro: Microbatch) -> Tensor:
        """Of a microbatch on the last stage: a scalar with the gradient that `Losses.seed` says."""
        assert self._batch is not None
        rows = rows_of(micro.targets)
        with self._autocast:
            values = self._losses.values(output, micro, rows)
        seed = self._losses.seed(values, micro, self._batch, rows, self._ways * self._scale.value)
        total = self._losses.total(values, micro, rows)
        self._total = total if self._total is None else self._total + total
        return (values * seed).sum()

    def _norm(self) -> Tensor:
        if not self._parameters:  # all that this stage has is frozen
            square = torch.zeros((), dtype=torch.float64, device=self._world.device)
            dist.all_reduce(square, group=self._relay.group)
            return square.sqrt().float()
        return gradient_norm(self._parameters, self._relay.group)

    @torch.no_grad()
    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        scorer = Scorer(self._task, self._world)
        self._model.eval()
        for stage in self._stages:
            stage.eval()
        try:
            with buffers_agreed(self._model, self._world.data_group):
                for micro, output in self._relay.forward(
                    micro for batch in batches for micro in batch.microbatches
                ):
                    with self._autocast:
                        scorer.add(output, micro)
        finally:
            self._model.train()
            for stage in self._stages:
                stage.train()
        reshard_all(self._stages)
        scores = scorer.scores(samples) if self._stages[-1].is_last else None
        return next(one for one in self._world.gather(scores) if one is not None)

    def state(self) -> State:
        state = super().state()
        merged: dict[str, Any] = {}
        for values in self._world.gather(state.values["optimizer"]):
            merged.update(values)
        return State(tensors=state.tensors, own=state.own, values={**state.values, "optimizer": merged})

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """On process 0, every stage's tensors; on others, their own stages'."""
        ranks = dist.get_process_group_ranks(self._relay.group)
        mine = self._world.coordinates()["pipeline"][0]
        listed = self._world.gather([name for name, _ in self._named()])
        for place, rank in enumerate(ranks):
            if place == mine:
                for name, tensor in super().export():
                    if place and self._world.rank == rank and ranks[0] == 0:
                        dist.send_object_list([tensor.shape, tensor.dtype], dst=0, group=self._world.control)
                        dist.send(tensor.contiguous(), dst=0, group=self._world.control)
                    yield name, tensor
            elif self._world.rank == 0:
                for name in listed[rank]:
                    yield name, self._received(rank)

    def _named(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._model.named_parameters()
        yield from self._model.named_buffers()

    def _received(self, rank: int) -> Tensor:
        box: list[Any] = [None, None]
        dist.recv_object_list(box, src=rank, group=self._world.control)
        tensor = torch.empty(box[0], dtype=box[1])
        dist.recv(tensor, src=rank, group=self._world.control)
        return tensor


def _stand_in(parameter: nn.Parameter, device: torch.device) -> nn.Parameter:
    """Of the same shape, on the device that optimizers look for, and without memory."""
    return nn.Parameter(torch.empty(1, dtype=parameter.dtype, device=device).expand(parameter.shape))


def reshard_all(stages: list[Stage]) -> None:
    """Gives whole parameters back."""
    for stage in stages:
        reshard(stage)
