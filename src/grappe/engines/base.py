"""Engine: what executes optimizer steps of a task under a plan."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, final

from torch import Tensor

from grappe.chronometer import Waits
from grappe.data.batch import Batch
from grappe.loop import After, StepResult, loop
from grappe.needs import Needs
from grappe.plan import Plan
from grappe.scores import Scores
from grappe.task import Task
from grappe.weights import Weights, Without
from grappe.world import World

COMMON = frozenset({"device", "backend", "threads", "workers", "per_device"})


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Everything a training's future depends on, but for its position."""

    tensors: Mapping[str, Tensor]
    """`model.NAME` and `optimizer.NAME.KEY`: what all processes have alike, or share; sharded ones stay sharded."""
    own: Mapping[str, Tensor]
    """`local.SLICE.NAME`: what this process alone has, buffers say."""
    values: Mapping[str, Any]
    """JSON."""
    stream: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    """Where the tensors do not fit into memory together: `tensors` are on the meta device then, and this gives
    their values, whole, in the same order, each valid until the next. Collective."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Saved:
    """A State read back: whole tensors, read when asked for."""

    tensors: Weights
    values: Mapping[str, Any]

    def weights_only(self) -> Saved:
        """Without the optimizer's state: what another engine can take over."""
        kept = {
            name: value for name, value in self.values.items() if name in ("schedule_steps", "data_parallel")
        }
        return Saved(tensors=Without(self.tensors, "optimizer."), values=kept)


def _nobody(phase: int) -> None:
    """Nobody takes the time."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What an engine is made from."""

    task: Task
    plan: Plan
    world: World
    weights: Weights
    """The model's initial parameters and buffers."""
    total_steps: int
    flag: Callable[[], float]
    """What this process wants the others to know with the next step: above 0, to stop."""
    phase: Callable[[int], None] = _nobody
    """Where an engine may tell the chronometer what it can see better from inside: a phase begins."""
    example: Any = None
    """Inputs of a sample or two, on the CPU: to count the work of a pipeline's stages by."""
    samples: int = 0
    """Of the training data; 0 where nothing is trained."""


class Engine(ABC):
    """What executes optimizer steps; made from a Setting. Collective in all it does."""

    axes: ClassVar[frozenset[str]]
    """The keys of a plan that it can honour; the support table is made from it."""
    about: ClassVar[str]
    """One line for the table of engines."""

    @classmethod
    def waits(cls) -> Waits:
        """Functions in which it waits for other processes, beyond torch.distributed's own."""
        return ()

    @classmethod
    def refuse(cls, plan: Plan) -> str | None:
        """Why a combination of its axes cannot be honoured. Pure."""
        return None

    @classmethod
    def put_away(cls, plan: Plan, needs: Needs) -> tuple[str, float] | None:
        """`plan` with a disk for what is not needed just now, and the bytes a process then takes; None: it cannot."""
        return None

    @classmethod
    def fitting(cls, plan: Plan) -> type[Engine]:
        """The class that runs `plan`: an engine may have another for some plans."""
        return cls

    @abstractmethod
    def __init__(self, setting: Setting) -> None: ...

    @abstractmethod
    def train(self, batches: Iterator[Batch], after: After) -> None:
        """Steps through `batches`, calling `after` behind each step, until they end or it returns True."""

    @abstractmethod
    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """The scores over all data slices, `samples` in all; callable from inside `after`."""

    @abstractmethod
    def state(self) -> State:
        """What to save."""

    @abstractmethod
    def restore(self, saved: Saved) -> None:
        """Goes on from what `state` gave, perhaps under another plan."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers on the CPU, one at a time; to be used on process 0."""

    @abstractmethod
    def close(self) -> None:
        """Gives back what it holds."""

    def remarks(self) -> Sequence[str]:
        """What the user should know of how the plan was carried out, for the run's summary."""
        return ()


class Stepper(Engine):
    """An engine that lets us own the loop."""

    @abstractmethod
    def step(self, batch: Batch) -> StepResult:
        """One optimizer step."""

    @final
    def train(self, batches: Iterator[Batch], after: After) -> None:
        loop(self.step, batches, after)
