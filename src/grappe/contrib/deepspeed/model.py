"""DeepSpeedModel: the task's model and optimizer in DeepSpeed's engine, for any training loop."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from itertools import zip_longest
from typing import Any

import torch
from torch import nn

from grappe.checkpoint.weights import Weights, read_into
from grappe.contrib.deepspeed import library, settings, state
from grappe.contrib.deepspeed.settings import Settings
from grappe.contrib.deepspeed.state import PartitionedState, WholeState
from grappe.data.batch import Batch
from grappe.engines.base import EngineSetup
from grappe.engines.shared.microbatch import evaluate
from grappe.engines.shared.state import TrainState, trained_parameters
from grappe.errors import TaskError
from grappe.errors.user_code import method_error
from grappe.launch.world import World
from grappe.parallel.activation_checkpointing import checkpoint_activations, switch_off_caches
from grappe.parallel.batchnorm import synchronise_batchnorm
from grappe.parallel.materialise import check_weights, fill, marks_kept, on_meta
from grappe.parallel.units import units_of
from grappe.private_api.torch import module_buffers, module_parameters
from grappe.profiling import memory
from grappe.step.precision import LossScale, autocast
from grappe.step.scores import Scores
from grappe.step.task_contract import optimizer_of, schedule_of
from grappe.task import Call, overrides


class DeepSpeedModel:
    """A model, its optimizer and schedule, as passed to `deepspeed.initialize`. All methods are collective."""

    train_state: TrainState

    def __init__(self, setup: EngineSetup, loss_scale: LossScale) -> None:
        self._setup, task, plan, world = setup, setup.task, setup.plan, setup.world
        self.stage = settings.stage(plan)
        deepspeed = library.load(world)
        self._communication = library.Communication(world)
        if plan.offload != "none":
            # By default glibc keeps freed blocks of up to 32 MiB; their number grows with the data that goes to the
            # disk and back. From a megabyte on they now return to the system.
            memory.mallopt(mmap=1 << 20)
        self._scratch = library.Scratch(plan, world)
        with library.linear(zero3=False):
            self.module, config = self._make_model()
            # A context of its own: evaluation is inside another already, and neither may be entered twice.
            self._carrier = _Carrier(self.module, autocast(plan.precision, world.device), task.forward)
            self.named = trained_parameters(self.module)
            self.reached = Reached(self.module, self.stage, world)
            task_optimizer = optimizer_of(task, self.named)
            state.check_elementwise(task_optimizer, self.stage)
            self.optimizer, description = state.chosen(task_optimizer, plan, world)
            setup.observers.optimizer(self.optimizer, self.named)
            self.remark = f"DeepSpeed {deepspeed.__version__}, ZeRO {self.stage}, {description}"
            self.engine, wrapped, *_ = deepspeed.initialize(
                model=self._carrier, optimizer=self.optimizer, config=config, dist_init_required=False
            )
            # After it has dropped groups without parameters.
            self.schedule = schedule_of(task, self.optimizer, setup.total_steps)
            parts: dict[str, Any] = {
                "model": self.module,
                "optimizer": self.optimizer,
                "schedule": self.schedule,
                "world": world,
                "loss_scale": loss_scale,
            }
            if self.stage:
                self.train_state = PartitionedState(**parts, wrapped=wrapped, stage=self.stage)
            else:
                self.train_state = WholeState(**parts)
        self._carrier.train()

    def _make_model(self) -> tuple[nn.Module, settings.Settings]:
        """Makes the model with its values, partitioned under ZeRO 3, and DeepSpeed's settings."""
        task, plan, world, weights = (self._setup.task, self._setup.plan, self._setup.world, self._setup.weights)
        model = on_meta(task)
        scalars = [name for name, parameter in model.named_parameters() if not parameter.dim()]
        if scalars:  # DeepSpeed 0.19 sends each parameter's bytes to all processes, and cannot see a scalar as bytes
            raise TaskError(
                f"DeepSpeed takes no scalar parameter, and the model has {', '.join(scalars[:3])}: make it one of "
                "shape [1], or use engine=native, which keeps scalars whole"
            )
        if task.ema is not None and self.stage == 3:
            raise TaskError(
                f"ema={task.ema}: DeepSpeed's stage 3 keeps parts of the weights where no average can be taken: use "
                "zero=2, or engine=native, which averages sharded weights"
            )
        if self.stage and overrides(task, "after_step"):
            raise method_error(
                task,
                "after_step",
                f"cannot run under DeepSpeed's stage {self.stage}, which trains its own copy of the weights: use "
                "engine=native, which shards the weights themselves",
            )
        sizes = [parameter.numel() for parameter in model.parameters()]
        cuda = world.device.type == "cuda"
        config = settings.settings(plan, task, sum(sizes), max(sizes, default=1), cuda)
        self._scratch.make(sum(sizes), config)
        if plan.recompute:
            switch_off_caches(model)
            checkpoint_activations(units_of(task, model, self._setup.blocks.names) or [model], plan)
        if self.stage == 3:
            with marks_kept(model):
                partitioned(model, weights, world.device, config)
        else:
            fill(model, weights, world.device)
        if plan.synchronises and world.data_group is not None:
            synchronise_batchnorm(model, world.data_group)
        return model, config

    def forward(self, inputs: Any) -> Any:
        """Computes the model's output, without DeepSpeed's engine around it."""
        return self._carrier(inputs)

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        """Computes the scores over all data slices."""
        return evaluate(self._carrier, self._setup, batches, samples, self._carrier)

    def close(self) -> None:
        """Ends DeepSpeed's engine, and frees its memory."""
        self.engine.destroy()
        # What it is made of refers to itself: its memory, and what its destructors do, must not wait for later.
        del self.engine, self._carrier, self.module, self.train_state, self.named
        gc.collect()
        self._communication.leave()
        self._scratch.close()


class _Carrier(nn.Module):
    """The model in the plan's precision: DeepSpeed switches off an autocast context around its engine."""

    def __init__(self, model: nn.Module, precision: AbstractContextManager[Any], call: Call) -> None:
        super().__init__()
        self.model, self._precision, self._call = model, precision, call

    def forward(self, inputs: Any) -> Any:
        with self._precision:
            return self._call(self.model, inputs)


def partitioned(model: nn.Module, weights: Weights, device: torch.device, settings: Settings) -> None:
    """Fills a model on the meta device with its buffers, and with parameters that zero.Init partitions. Collective.

    Raises:
        TaskError: a parameter or buffer has no value in `weights`, or another shape.
    """
    import deepspeed

    check_weights(model, weights)
    deepspeed.zero.Init(module=_OneByOne(model, weights, device), config_dict_or_path=settings)
    made: dict[int, Any] = {}
    names = {id(buffer): name for name, buffer in model.named_buffers()}
    for buffers in map(module_buffers, model.modules()):
        for name, buffer in buffers.items():
            if buffer is None:
                continue
            if id(buffer) not in made:
                made[id(buffer)] = real = torch.empty_like(buffer, device=device)
                read_into(real, weights, names[id(buffer)])
            buffers[name] = made[id(buffer)]


class _OneByOne(nn.Module):
    """Stand-in for a module in zero.Init; each parameter gets its memory and values when it is requested.

    zero.Init partitions a parameter before it requests the next.
    """

    def __init__(self, model: nn.Module, weights: Weights, device: torch.device) -> None:
        super().__init__()
        # Not as a submodule: Init would look for buffers there.
        self.__dict__["made"] = lambda: _made(model, weights, device)

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        return self.__dict__["made"]()


def _made(model: nn.Module, weights: Weights, device: torch.device) -> Iterator[nn.Parameter]:
    sites: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module_parameters(module).items():
            if parameter is not None:
                sites.setdefault(id(parameter), []).append((module, name))
    for full, parameter in list(model.named_parameters()):
        real = nn.Parameter(
            torch.empty(parameter.shape, dtype=parameter.dtype, device=device), requires_grad=parameter.requires_grad
        )
        read_into(real, weights, full)
        for module, name in sites[id(parameter)]:
            module_parameters(module)[name] = real
        yield real


INSTEAD = "use engine=native, which matches gradients by name"


class Reached:
    """Records the order in which parameters get their gradients.

    DeepSpeed gathers gradients in buckets as they come and sums the buckets over processes by position: if one
    process's backward has another order, gradients of different parameters are added up without an error. DeepSpeed has
    zeros for a parameter without a gradient, which weight decay and momentum would still change.
    """

    def __init__(self, model: nn.Module, stage: int, world: World) -> None:
        self._world = world
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self._names = [name for name, _ in named]
        # On one process, and below stage 2, gradients are taken in the order of parameters, not of backward.
        self._ordered = stage > 1 and world.size > 1
        self._fired: list[int] = []
        self._first: list[int] | None = None
        for index, (_, parameter) in enumerate(named):
            parameter.register_hook(lambda gradient, index=index: self._fired.append(index))

    def check(self) -> None:
        """Checks a step after its last backward, before the update. Collective in the first step.

        Raises:
            TaskError: a parameter got no gradient on any process, or processes or steps differ.
        """
        order = list(self._fired) if self._ordered else sorted(set(self._fired))
        self._fired.clear()
        if self._first is None:
            everyone = self._world.gather(order)
            missing = sorted(set(range(len(self._names))).difference(*everyone))
            if missing:
                raise TaskError(
                    f"the loss does not depend on {self._names_of(missing)}: DeepSpeed would let weight decay move it "
                    "all the same. Leave it out of the model, freeze it with requires_grad_(False), or use "
                    "engine=native"
                )
            for rank, theirs in enumerate(everyone):
                if theirs != everyone[0]:
                    self._refuse("process 0's samples", f"process {rank}'s", everyone[0], theirs)
            self._first = order
        elif order != self._first:
            self._refuse("this step's samples", "the first step's", order, self._first)

    def _refuse(self, some: str, others: str, ours: list[int], theirs: list[int]) -> None:
        only = sorted(set(ours) ^ set(theirs))
        if only:
            what = f"{self._names_of(only)}, but not both"
        else:
            pairs = zip_longest(ours, theirs)
            differing = next(pair for pair in pairs if pair[0] != pair[1])
            both = [index for index in differing if index is not None]
            what = " before and after ".join(self._names_of([index]) for index in both)
            what += " once more often in one of them" if len(both) == 1 else ""
        why = (
            "sums gradients by the order they come in, and would add up different parameters' gradients"
            if self._world.size > 1
            else "has zero gradients for parameters that are not reached, and weight decay and momentum would "
            "still change them"
        )
        raise TaskError(
            f"the model uses different parameters for different samples: {some} and {others} reach {what}. "
            f"DeepSpeed {why}: {INSTEAD}"
        )

    def _names_of(self, indices: Sequence[int]) -> str:
        return ", ".join(self._names[i] for i in indices[:3]) + (", …" if len(indices) > 3 else "")


@contextlib.contextmanager
def explained() -> Iterator[None]:
    """Context that explains an error that stage 3 raises when it compares processes.

    Raises:
        TaskError: the model used parameters in another order on another process.
    """
    try:
        yield
    except RuntimeError as error:
        if "disagreement on list contents" not in str(error):
            raise
        raise TaskError(
            "the model uses different parameters for different samples, on different processes. DeepSpeed's stage 3 "
            f"gathers parameters in one order everywhere: {INSTEAD}"
        ) from error
