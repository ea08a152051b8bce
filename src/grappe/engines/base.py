"""Engine: what executes optimizer steps of a task under a plan."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, ClassVar, final

from torch import Tensor, nn
from torch.optim import Optimizer

from grappe.checkpoint.weights import Weights
from grappe.data.batch import Batch
from grappe.engines.shared.memory_needs import Needs
from grappe.engines.shared.state import SavedState, State, TrainState
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.step.result import After, StepResult, loop
from grappe.step.scores import Scores
from grappe.task import Task

COMMON = frozenset({"device", "backend", "threads", "workers", "per_device"})

Named = Sequence[tuple[str, nn.Parameter]]


def _ignore_phase(phase: int) -> None:
    """Takes no time."""


def _ignore_optimizer(optimizer: Optimizer, named: Named) -> None:
    """Takes no note of an optimizer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineSetup:
    """What an engine is made from."""

    task: Task
    plan: Plan
    world: World
    weights: Weights
    """The model's initial parameters and buffers."""
    total_steps: int
    stop_requested: Callable[[], float]
    """Returns more than 0 when all processes should stop after this step (signal or time limit)."""
    on_phase: Callable[[int], None] = _ignore_phase
    """Called in a training step when a phase begins: FORWARD with each microbatch, BACKWARD once the loss's values
    are there, UPDATE before clipping and stepping, COMMUNICATION before a wait that is not torch.distributed's."""
    on_optimizer: Callable[[Optimizer, Named], None] = _ignore_optimizer
    """Called once, when the optimizer is made: the optimizer that steps, and this process's trained parameters."""
    sample_inputs: Any = None
    """Inputs of a sample or two, on the CPU: to count the work of a pipeline's stages by."""
    samples: int = 0
    """Of the training data; 0 where nothing is trained."""


class Engine(ABC):
    """Executes optimizer steps; made from an EngineSetup. Collective in all it does.

    To write: `__init__`, which sets `train_state`, `train` (or `Stepper.step`) and `evaluate`; where it applies,
    `close`, `remarks`, `unsupported_reason` and `offloaded_to_disk`.
    """

    supported_keys: ClassVar[frozenset[str]]
    """The keys of a plan that it can honour; the support table is made from it."""
    about: ClassVar[str]
    """One line for the table of engines."""

    train_state: TrainState
    """What is trained."""

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        """Why a combination of supported keys cannot be honoured. Pure."""
        return None

    @classmethod
    def offloaded_to_disk(cls, plan: Plan, needs: Needs) -> tuple[str, float] | None:
        """`plan` with offload to a disk, and the bytes of memory that a process then needs; None: not supported."""
        return None

    @abstractmethod
    def __init__(self, setup: EngineSetup) -> None: ...

    @abstractmethod
    def train(self, batches: Iterator[Batch], after: After) -> None:
        """Steps through `batches`, calling `after` after each step, until they end or it returns True."""

    @abstractmethod
    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """The scores over all data slices, `samples` in all; callable from inside `after`."""

    @final
    def state(self) -> State:
        """What to save."""
        return self.train_state.state()

    @final
    def restore(self, saved: SavedState) -> None:
        """Continues from what `state` gave, perhaps under another plan; before the first step."""
        self.train_state.restore(saved)

    @final
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers on the CPU, one at a time; to be used on process 0."""
        return self.train_state.export()

    @final
    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside, the model has the weights that its optimizer wants evaluated: an average's, say."""
        return self.train_state.evaluated_weights()

    def close(self) -> None:
        """Releases what it holds; nothing else may be called afterwards."""
        del self.train_state

    def remarks(self) -> Sequence[str]:
        """What the user should know of how the plan was carried out, for the run's summary."""
        return ()


class Stepper(Engine):
    """An engine that leaves the loop to grappe."""

    @abstractmethod
    def step(self, batch: Batch) -> StepResult:
        """One optimizer step."""

    @final
    def train(self, batches: Iterator[Batch], after: After) -> None:
        loop(self.step, batches, after)
