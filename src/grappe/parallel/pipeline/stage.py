"""Stages of a pipeline, and the relay that runs microbatches forward through all of them without gradients."""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.data.batch import Microbatch, entering, inside
from grappe.errors import TaskError
from grappe.launch.world import World
from grappe.private_api.torch import (
    TreeSpec,
    module_children,
    tree_flatten,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from grappe.task import Call


class Stage(nn.Module):
    """Units in sequence. Stages exchange flat tensors; `entering` and `leaving` describe their nesting.

    Args:
        number: its index among `count` stages, from 0.
        precision: the context of its forward.
        call: the task's forward, which gives the first unit the inputs.
    """

    def __init__(
        self,
        units: Sequence[nn.Module],
        number: int,
        count: int,
        precision: contextlib.AbstractContextManager[Any],
        call: Call,
    ) -> None:
        super().__init__()
        self.units = nn.ModuleList(units)
        self.number, self.count = number, count
        self._precision, self._call = precision, call
        self.source: Callable[..., Any] | None = None
        """Inputs that a first stage's forward stands for."""
        self.entering: TreeSpec | None = None
        self.leaving: TreeSpec | None = None

    @property
    def is_first(self) -> bool:
        """Returns whether this stage takes the model's inputs."""
        return self.number == 0

    @property
    def is_last(self) -> bool:
        """Returns whether this stage returns the model's output."""
        return self.number == self.count - 1

    def forward(self, *leaves: Tensor) -> tuple[Tensor, ...]:
        """Maps flat tensors to flat tensors."""
        if self.source is not None:
            value = self.source(*leaves)
        else:
            assert self.entering is not None
            value = [_Straight.apply(x) if isinstance(x, Tensor) and x.requires_grad else x for x in leaves]
            value = tree_unflatten(value, self.entering)
        with self._precision:
            for number, unit in enumerate(self.units):
                value = self._call(unit, value) if self.is_first and not number else unit(value)
        outputs, self.leaving = tree_flatten(value)
        if self.is_last:
            return tuple(outputs)
        for leaf in outputs:
            if not isinstance(leaf, Tensor):
                raise TaskError(
                    f"unit {type(self.units[-1]).__name__} hands {type(leaf).__name__} on to the next stage of the "
                    "pipeline: only tensors, nested as you like, can be sent"
                )
        return tuple(leaf.contiguous() for leaf in outputs)


class _Straight(torch.autograd.Function):
    """The identity, with a contiguous gradient: only contiguous tensors can be sent."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0].contiguous()


def prune(model: nn.Module, kept: Sequence[nn.Module], foreign: Sequence[nn.Module]) -> None:
    """Removes the units of other processes from the model, in place; the remaining parameters keep their names."""
    own = {id(module) for unit in kept for module in unit.modules()}
    gone = {id(module) for unit in foreign for module in unit.modules()} - own
    for module in list(model.modules()):
        for name, child in list(module_children(module).items()):
            if id(child) in gone:
                del module_children(module)[name]


class Boundary(NamedTuple):
    """Describes what a stage sends to the next: how it nests, as JSON, and each tensor's shape and type."""

    nesting: str
    tensors: tuple[tuple[tuple[int, ...], torch.dtype], ...]

    def empty(self, device: torch.device | str) -> tuple[Tensor, ...]:
        """Makes tensors of these shapes and types, without values."""
        return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in self.tensors)

    def text(self) -> str:
        """Encodes the header as text, to be sent."""
        tensors = [(shape, str(dtype).removeprefix("torch.")) for shape, dtype in self.tensors]
        return json.dumps([self.nesting, tensors])

    @classmethod
    def of(cls, text: str) -> Boundary:
        """Decodes a header from `text`."""
        nesting, tensors = json.loads(text)
        return cls(nesting, tuple((tuple(shape), getattr(torch, name)) for shape, name in tensors))


def key_of(inputs: Any) -> tuple:
    """Returns the shapes and types of a microbatch's inputs, which determine the shapes between stages."""
    leaves, nesting = tree_flatten(inputs)
    return str(nesting), *((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))


class Relay:
    """Runs microbatches through this process's stages, and sends them to the next. Stage s is on process s % p.

    All methods are collective over the processes of a pipeline.
    """

    def __init__(self, stages: Sequence[Stage], world: World) -> None:
        assert world.mesh is not None
        self.stages = stages
        self.group = world.mesh["pipeline"].get_group()
        self._world = world
        self._ranks = dist.get_process_group_ranks(self.group)
        self._headers: dict[tuple, Boundary] = {}
        self._sending: deque[tuple[dist.Work, Tensor]] = deque()
        self._sending_headers: deque[tuple[dist.Work, Tensor]] = deque()

    @torch.no_grad()
    def forward(self, micros: Iterable[Microbatch]) -> Iterator[tuple[Microbatch, Any]]:
        """Runs microbatches through all stages; yields (microbatch, output), on the last stage's process only."""
        sources = [stage.source for stage in self.stages]
        for stage in self.stages:
            stage.source = None
        stream = iter(micros)
        # As many at once as there are processes: the first ones return for their next stage when the last have left.
        with inside(None):  # the last microbatches are still in the model when `micros` have ended
            while several := list(islice(stream, len(self._ranks))):
                for stage in self.stages:
                    for micro in several:
                        output = self._through(stage, micro)
                        if stage.is_last:
                            yield micro, output
        self._wait(0)
        for stage, source in zip(self.stages, sources, strict=True):
            stage.source = source

    def header(self, boundary: int, micro: Microbatch, training: bool) -> Boundary:
        """Returns the header that stage `boundary` sends to the next; known once `forward` has sent it."""
        return self._headers[boundary, training, *key_of(micro.inputs)]

    def knows(self, micro: Microbatch) -> bool:
        """Returns whether microbatches of this shape have been through all stages."""
        key = key_of(micro.inputs)
        return all((stage.number, stage.training, *key) in self._headers for stage in self.stages)

    def _through(self, stage: Stage, micro: Microbatch) -> Any:
        key = (stage.training, *key_of(micro.inputs))
        if stage.is_first:
            leaves, stage.entering = tree_flatten(micro.inputs)
        else:
            leaves = self._receive(stage, key)
        entering(micro)
        output = stage(*leaves)
        assert stage.leaving is not None
        if stage.is_last:
            self._headers[stage.number, *key] = _header(output, nesting="")
            return tree_unflatten(list(output), stage.leaving)
        self._send(stage, key, output)
        return None

    def _receive(self, stage: Stage, key: tuple) -> tuple[Tensor, ...]:
        boundary, source = stage.number - 1, self.rank_of(stage.number - 1)
        header = self._headers.get((boundary, *key))
        if header is None:
            length = torch.empty(1, dtype=torch.int64)
            dist.recv(length, src=source, group=self._world.control)
            text = torch.empty(int(length), dtype=torch.uint8)
            dist.recv(text, src=source, group=self._world.control)
            header = self._headers[boundary, *key] = Boundary.of(text.numpy().tobytes().decode())
        stage.entering = treespec_loads(header.nesting)
        leaves = header.empty(self._world.device)
        for leaf in leaves:
            dist.recv(leaf, src=source, group=self.group)
        return leaves

    def _send(self, stage: Stage, key: tuple, leaves: tuple[Tensor, ...]) -> None:
        target = self.rank_of(stage.number + 1)
        if (stage.number, *key) not in self._headers:
            assert stage.leaving is not None
            header = self._headers[stage.number, *key] = _header(leaves, treespec_dumps(stage.leaving))
            # Asynchronously, to avoid a deadlock: the receiver may be blocked in a send to this process.
            text = torch.frombuffer(bytearray(header.text().encode()), dtype=torch.uint8)
            for tensor in (torch.tensor([len(text)]), text):
                work = dist.isend(tensor, dst=target, group=self._world.control)
                assert work is not None
                self._sending_headers.append((work, tensor))
        for leaf in leaves:
            work = dist.isend(leaf, dst=target, group=self.group)
            assert work is not None
            self._sending.append((work, leaf))
        self._wait(2 * len(self._ranks) * len(leaves))

    def _wait(self, left: int) -> None:
        """Waits until at most `left` tensors are being sent; with 0, also for the headers."""
        while len(self._sending) > left:
            self._sending.popleft()[0].wait()
        while self._sending_headers and not left:
            self._sending_headers.popleft()[0].wait()

    def rank_of(self, stage: int) -> int:
        """Returns the rank of the process that has a stage."""
        return self._ranks[stage % len(self._ranks)]


def _header(leaves: tuple[Tensor, ...], nesting: str) -> Boundary:
    described = tuple((tuple(leaf.shape), leaf.dtype) for leaf in leaves if isinstance(leaf, Tensor))
    return Boundary(nesting, described)


class StageGenerators:
    """Makes each stage draw the numbers that come after the earlier stages' in one process.

    Every microbatch draws the same numbers, those of the whole batch. So the states of torch's generators (5 kB) are
    sent on after a stage's first forward in a step, and the next stage begins each of its forwards with them. The first
    stage's are seeded.
    """

    def __init__(self, relay: Relay, world: World) -> None:
        self._relay, self._world = relay, world
        self._states: dict[int, Tensor] = {}
        """By stage after the first, the states at the beginning of its forwards in this step."""
        self._seed: Callable[[], None] | None = None
        self._of_cpu = len(torch.get_rng_state())
        self._sending: dict[int, tuple[dist.Work | None, Tensor]] = {}
        for stage in relay.stages:
            stage.register_forward_pre_hook(lambda stage, _: self._begin(stage))
            stage.register_forward_hook(lambda stage, *_: self._end(stage))

    @contextlib.contextmanager
    def of_step(self, seed: Callable[[], None]) -> Iterator[None]:
        """Context of a step's forwards.

        Args:
            seed: seeds the generators, alike on all processes.
        """
        self._seed = seed
        try:
            yield
            for work, _ in self._sending.values():
                assert work is not None
                work.wait()
        finally:
            self._seed = None
            self._states.clear()
            self._sending.clear()

    def _begin(self, stage: Stage) -> None:
        if self._seed is None:
            return
        if stage.is_first:
            self._seed()
            return
        if stage.number not in self._states:
            state = self._state()
            source = self._relay.rank_of(stage.number - 1)
            dist.recv(state, src=source, group=self._world.control, tag=stage.number)
            self._states[stage.number] = state
        state = self._states[stage.number]
        torch.set_rng_state(state[: self._of_cpu])
        if self._world.device.type == "cuda":
            torch.cuda.set_rng_state(state[self._of_cpu :], self._world.device)

    def _end(self, stage: Stage) -> None:
        following = stage.number + 1
        if self._seed is None or stage.is_last or following in self._sending:
            return
        state, target = self._state(), self._relay.rank_of(following)
        work = dist.isend(state, dst=target, group=self._world.control, tag=following)
        self._sending[following] = work, state

    def _state(self) -> Tensor:
        """Returns the states of the generators of the CPU and of the device: uint8, one after the other."""
        if self._world.device.type != "cuda":
            return torch.get_rng_state()
        return torch.cat([torch.get_rng_state(), torch.cuda.get_rng_state(self._world.device)])
