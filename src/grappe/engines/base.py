"""Engine: executes optimizer steps of a task under a plan."""

from __future__ import annotations

import dataclasses
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from grappe.checkpoint.weights import Weights
from grappe.data.batch import Batch
from grappe.engines.shared.carried import CarriedState
from grappe.engines.shared.state import TrainState
from grappe.launch.signals import StopSignal
from grappe.launch.world import World
from grappe.parallel.units import Blocks, blocks_for
from grappe.plan import Plan
from grappe.step.loss import After, StepResult
from grappe.step.observers import Observers
from grappe.step.scores import Scores
from grappe.task import Task

COMMON = frozenset(
    {"device", "backend", "threads", "workers", "loading", "prefetch", "validation_batch", "per_device", "dropout"}
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """The inputs that an engine is made from."""

    task: Task
    plan: Plan
    world: World
    weights: Weights
    """The model's initial parameters and buffers."""
    total_steps: int
    stop: StopSignal = dataclasses.field(default_factory=StopSignal)
    """Asks all processes to stop after this step (signal or time limit), where its flag is more than 0."""
    observers: Observers = dataclasses.field(default_factory=Observers)
    """The callbacks that the engine calls at its steps' phases, at its making of the optimizer, and after each loss."""
    sample_inputs: Any = None
    """Inputs of one or two samples, on the CPU, by which the work of pipeline stages is counted."""
    samples: int = 0
    """Number of training samples; 0 if nothing is trained."""
    kept_blocks: Sequence[str] = ()
    """The names of the units that the run has had so far, where its task gives none."""
    carried: CarriedState = dataclasses.field(default_factory=CarriedState)
    """The model's attributes that change while it trains; the engine binds its model to it."""

    @functools.cached_property
    def blocks(self) -> Blocks:
        """The model's units, where the plan needs some and the task gives none."""
        return blocks_for(self.task, self.plan, self.sample_inputs, self.kept_blocks)


class Engine(ABC):
    """Executes optimizer steps; made from an EngineSetup. Collective in all it does.

    Methods to write: `__init__`, which sets `train_state`, `step` (or `train`) and `evaluate`; if needed,
    `close`, `remarks`, `unsupported_reason` and `offloaded_to_disk`.
    """

    supported_keys: ClassVar[frozenset[str]]
    """The plan keys that the engine supports; the support table is made from them."""
    about: ClassVar[str]
    """One line for the table of engines."""
    sharded_units: ClassVar[bool] = False
    """Whether it gathers a sharded model unit by unit."""

    train_state: TrainState
    """The model, its optimizer and schedule, to be saved and restored."""

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        """Returns the reason why a combination of supported keys does not work; None if it works. Pure."""
        return None

    @classmethod
    def offloaded_to_disk(cls, plan: Plan, needs: ModelMemory) -> tuple[str, float] | None:
        """Returns `plan` with offload to a disk, and a process's bytes of memory under it; None: not supported."""
        return None

    @abstractmethod
    def __init__(self, setup: EngineSetup) -> None: ...

    def step(self, batch: Batch) -> StepResult:
        """Takes one optimizer step."""
        raise NotImplementedError

    def train(self, batches: Iterator[Batch], after: After) -> None:
        """Takes a step for each of `batches` and then calls `after`, until `batches` end or `after` returns True."""
        for batch in batches:
            if after(self.step(batch)):
                return

    @abstractmethod
    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Computes the scores over all data slices, `samples` in total; may be called inside `after`."""

    def close(self) -> None:
        """Releases the engine's resources; no other method may be called afterwards."""
        del self.train_state

    def before_save(self) -> None:  # noqa: B027
        """Checks what is about to be saved, if the plan has check=. Collective.

        Raises:
            ComputedWrongly: a process computes other bits than another.
        """

    def remarks(self) -> Sequence[str]:
        """Returns remarks on the plan's execution for the run's summary."""
        return ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelMemory:
    """The memory of a whole model's parts, in bytes."""

    parameters: int
    gradients: int
    units: tuple[int, ...]
    """Bytes of parameters, by unit."""
    largest: int
    """Bytes of the largest parameter."""

    def unit(self, plan: Plan) -> float:
        """Returns the bytes of the largest part that is gathered at once: a unit, or without units the whole model."""
        return max(self.units, default=self.parameters / plan.pipeline)
