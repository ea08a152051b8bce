"""Training state: a model, its optimizer, schedule and loss scale, as named tensors and JSON, and back."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.checkpoint.weights import (
    LOCAL,
    MODEL,
    OPTIMIZER,
    ModelWeights,
    Weights,
    decimal_types,
    full_tensor,
    read_into,
    without,
)
from grappe.launch.world import World
from grappe.optimizers.common import begin_training, evaluated_weights, has_modes
from grappe.parallel.batchnorm import agreed_between
from grappe.parallel.materialise import fit_buffers
from grappe.step.closure import wrapped
from grappe.step.observers import NamedParameters
from grappe.step.precision import LossScale
from grappe.step.task_contract import Plateau

SCORES = "schedule_scores"
"""Key of the scores that a ReduceLROnPlateau was given, in a checkpoint's JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class State:
    """Everything that a training's future depends on, except its position."""

    tensors: Mapping[str, Tensor]
    """`model.NAME` and `optimizer.NAME.KEY`: tensors that are equal on all processes, or sharded over them."""
    local: Mapping[str, Tensor]
    """`local.SLICE.NAME`: tensors that only this process has, buffers for example."""
    values: Mapping[str, Any]
    """The values that are not tensors, as JSON."""
    stream: Callable[[], Iterator[tuple[str, Tensor]]] | None = None
    """Used if the tensors do not fit into memory together: `tensors` are on the meta device then, and `stream` yields
    their whole values in the same order, each valid until the next. Collective."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedState:
    """A State that was saved: whole tensors, read when requested."""

    tensors: Weights
    values: Mapping[str, Any]
    model_loaded: bool = False
    """Whether the engine was made with the weights of these tensors, and need not read the weights again."""

    def weights_only(self) -> SavedState:
        """Returns the state without the optimizer's, which another engine can restore."""
        kept = {
            name: value for name, value in self.values.items() if name in ("schedule_steps", "data_parallel", SCORES)
        }
        return dataclasses.replace(self, tensors=without(self.tensors, OPTIMIZER), values=kept)


class TrainState(Protocol):
    """The trained model, its optimizer and schedule, to be saved, restored and exported. All methods are collective."""

    schedule: LRScheduler | None

    def state(self) -> State:
        """Returns the state to save."""

    def restore(self, saved: SavedState) -> None:
        """Restores a state that `state` returned, perhaps under another plan."""

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Yields whole parameters and buffers on the CPU, one at a time; to be used on process 0."""

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside, parameters have the values that the optimizer wants evaluated and saved."""


TRAINED = "trained_weight"
"""Key of the weight that a schedule-free optimizer trains; the model's own tensors are its evaluation weights."""
GROUP = "group."
"""Prefix of values that an optimizer counts in its `param_groups`, saved with each parameter's state."""
WRAPPED = ":"
"""Between the attribute by which an optimizer has another one (`base_optimizer`), and a key of that one's state."""
ITEM = "#"
"""Between the key of a list in the optimizer's state, and a tensor's number in the list."""
SCHEDULED = frozenset({"lr", "initial_lr"})


class ModelState:
    """The TrainState of a model whose parameters are tensors, sharded ones too, and of a torch optimizer.

    Args:
        stepped: what the optimizer has in place of the model's parameters, by their names: whole copies.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        schedule: LRScheduler | None,
        world: World,
        loss_scale: LossScale | None = None,
        stepped: NamedParameters | None = None,
    ) -> None:
        self._stepped = stepped
        self._model, self._optimizer, self.schedule = model, optimizer, schedule
        self._world, self._loss_scale = world, loss_scale
        begin_training(optimizer)
        self._made = [_counters(group) for group in optimizer.param_groups]

    def state(self) -> State:
        """Returns the tensors that are equal on all processes or sharded, this process's own buffers, and JSON."""
        tensors, plain = self._optimizer_state()
        parameters = dict(self._model.named_parameters())
        if has_modes(self._optimizer):
            with self.evaluated_weights():
                evaluated = {name: parameter.detach().clone() for name, parameter in parameters.items()}
            trained = {f"{OPTIMIZER}{name}.{TRAINED}": weight for name, weight in trained_parameters(self._model)}
            tensors, parameters = {**tensors, **trained}, evaluated
        tensors.update({f"{MODEL}{name}": parameter for name, parameter in parameters.items()})
        values = {"optimizer": plain, **position(self.schedule, self._world)}
        if self._loss_scale is not None:
            values["scale"] = self._loss_scale.state()
        return State(tensors=tensors, local=own_buffers(self._model, self._world), values=values)

    def restore(self, saved: SavedState) -> None:
        """Restores a state that `state` returned; each tensor is sharded as its parameter is."""
        if not saved.model_loaded:
            weights = ModelWeights(saved.tensors)
            for name, parameter in self._model.named_parameters():
                read_into(parameter, weights, name)
        restore_buffers(self._model, self._world, saved)
        self._restore_optimizer(saved)
        replay(self.schedule, saved)
        if self._loss_scale is not None:
            self._loss_scale.restore(saved.values.get("scale", {}))

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """Whole parameters and buffers on the CPU, one at a time. Collective."""
        return export(self._model, self._world)

    def evaluated_weights(self) -> AbstractContextManager[None]:
        """Inside, parameters have the values that the optimizer wants evaluated and saved."""
        return evaluated_weights(self._optimizer)

    def _optimizer_state(self) -> tuple[dict[str, Tensor], dict[str, dict[str, Any]]]:
        """Returns the `optimizer.NAME.KEY` tensors, and the other entries by parameter."""
        tensors: dict[str, Tensor] = {}
        plain: dict[str, dict[str, Any]] = {}
        parameters = dict(self._stepped or self._model.named_parameters())
        for attribute, optimizer in wrapped(self._optimizer).items():
            held, prefix = optimizer.state, attribute and f"{attribute}{WRAPPED}"
            assert set(held) <= set(parameters.values()), "a state without its parameter would be lost"
            for name, parameter in parameters.items():
                for key, value in held.get(parameter, {}).items():
                    full = f"{OPTIMIZER}{name}.{prefix}{key}"
                    if isinstance(value, Tensor):
                        tensors[full] = value
                    elif isinstance(value, list):
                        items = {f"{full}{ITEM}{i}": item for i, item in enumerate(value)}
                        tensors |= {name: item for name, item in items.items() if isinstance(item, Tensor)}
                        rest = [None if isinstance(item, Tensor) else item for item in value]
                        plain.setdefault(name, {})[prefix + key] = rest
                    elif value is not None:
                        plain.setdefault(name, {})[prefix + key] = value
        for name, counted in self._counted(parameters):
            plain.setdefault(name, {}).update(counted)
        return tensors, plain

    def _counted(self, parameters: dict[str, nn.Parameter]) -> Iterator[tuple[str, dict[str, Any]]]:
        """By parameter, the numbers of its group that the optimizer itself has changed, as schedule-free ones do."""
        names = {id(parameter): name for name, parameter in parameters.items()}
        for group, made in zip(self._optimizer.param_groups, self._made, strict=False):
            changed = {f"{GROUP}{key}": value for key, value in _counters(group).items() if made.get(key) != value}
            for parameter in group["params"] if changed else ():
                yield names[id(parameter)], changed

    def _restore_optimizer(self, saved: SavedState) -> None:
        keys: dict[str, list[str]] = {}
        for full in saved.tensors:
            if full.startswith(OPTIMIZER):
                name, _, key = full.removeprefix(OPTIMIZER).rpartition(".")
                keys.setdefault(name, []).append(key)
        optimizers = wrapped(self._optimizer)
        now, before = decimal_types(self._model, ModelWeights(saved.tensors))
        casts = (before, now) if {before, now} == {torch.float32, torch.float64} else None
        groups = {id(p): group for group in self._optimizer.param_groups for p in group["params"]}
        for name, parameter in self._stepped or self._model.named_parameters():
            group = groups.get(id(parameter), {})
            entries = dict(saved.values.get("optimizer", {}).get(name, {}))
            for key in keys.get(name, ()):
                full, (items, _, item) = f"{OPTIMIZER}{name}.{key}", key.partition(ITEM)
                if key == TRAINED:
                    read_into(parameter, saved.tensors, full)
                elif item and isinstance(entries.get(items), list):
                    entries[items][int(item)] = _read(saved, full, parameter, group, casts)
                else:
                    entries[key] = _read(saved, full, parameter, group, casts)
            counted = {key.removeprefix(GROUP): value for key, value in entries.items() if key.startswith(GROUP)}
            states: dict[str, dict[str, Any]] = {}
            for full in entries.keys() - {f"{GROUP}{key}" for key in counted}:
                attribute, _, key = full.partition(WRAPPED)
                if attribute not in optimizers or not key:
                    attribute, key = "", full
                states.setdefault(attribute, {})[key] = entries[full]
            for attribute, state in states.items():
                optimizers[attribute].state[parameter] = state
            group.update(counted)


def _counters(group: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a parameter group that no schedule sets."""
    return {
        key: value for key, value in group.items() if isinstance(value, bool | int | float) and key not in SCHEDULED
    }


def trained_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters that are not frozen, by name; an optimizer is made over them."""
    return [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]


def own_buffers(model: nn.Module, world: World) -> dict[str, Tensor]:
    """Returns the buffers to save that only this process has, by name."""
    if not world.speaks_for_buffers:
        return {}
    return {f"{LOCAL}{world.data_rank}.{name}": buffer for name, buffer in model.named_buffers()}


def restore_buffers(model: nn.Module, world: World, saved: SavedState) -> None:
    """Restores buffers: each data slice's own if the number of slices is the same, else their mean."""
    alike = saved.values.get("data_parallel") == world.data_size
    if saved.model_loaded and (world.data_size == 1 or not alike):
        return  # the mean of all that there are is what the model was made with
    weights = ModelWeights(saved.tensors)
    fit_buffers(model, weights)
    for name, buffer in model.named_buffers():
        own = f"{LOCAL}{world.data_rank}.{name}"
        if alike and own in saved.tensors:
            read_into(buffer, saved.tensors, own)
        else:
            read_into(buffer, weights, name)


def position(schedule: LRScheduler | None, world: World) -> dict[str, Any]:
    """Returns the schedule's step and scores, and the number of slices that the buffers belong to, as JSON."""
    scores = {SCORES: list(schedule.seen)} if isinstance(schedule, Plateau) else {}
    return {"schedule_steps": _steps_of(schedule), "data_parallel": world.data_size, **scores}


def _steps_of(schedule: LRScheduler | None) -> int:
    """Returns the number of a schedule's steps; a ChainedScheduler has no count of its own, but its parts have."""
    if schedule is None:
        return 0
    if (steps := getattr(schedule, "last_epoch", None)) is not None:
        return steps
    state = schedule.state_dict()
    while "last_epoch" not in state:
        state = state["_schedulers"][0]
    return state["last_epoch"]


def replay(schedule: LRScheduler | None, saved: SavedState) -> None:
    """Steps a new schedule to its saved position: a schedule restored from JSON can be silently wrong."""
    if schedule is None:
        return
    if isinstance(schedule, Plateau):
        for score in saved.values.get(SCORES, ()):
            schedule.evaluated(float(score))
        return
    with warnings.catch_warnings():
        # torch warns that the optimizer has not stepped yet: it did, before it was saved.
        warnings.simplefilter("ignore", UserWarning)
        for _ in range(saved.values.get("schedule_steps", 0)):
            schedule.step()


Gathered = Callable[[nn.Parameter], AbstractContextManager[None]]
"""Context in which a parameter is whole, on engines that keep it elsewhere."""


def export(
    model: nn.Module, world: World, gathered: Gathered = lambda _: nullcontext()
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters and buffers on the CPU, one at a time. Collective."""
    for name, parameter in model.named_parameters():
        with gathered(parameter):
            yield name, full_tensor(parameter)
    for name, buffer in model.named_buffers():
        group = world.data_group if buffer.is_floating_point() else None
        yield name, full_tensor(buffer if group is None else agreed_between(buffer, group))


def _read(
    saved: SavedState,
    name: str,
    parameter: nn.Parameter,
    group: dict[str, Any],
    casts: tuple[torch.dtype, torch.dtype] | None,
) -> Tensor:
    """Reads an optimizer's tensor to where torch's load_state_dict puts it, as the parameter's group says.

    Args:
        casts: the parameters' type before, and now, where the plan's precision is another.
    """
    if saved.tensors.shape(name) != tuple(parameter.shape) or not parameter.dim():
        value = saved.tensors.read(name).clone()
        counter = name.endswith((".step", f"{WRAPPED}step"))
        on_cpu = counter and not (group.get("fused") or group.get("capturable"))
        if casts is not None and not counter and value.dtype == casts[0]:
            value = value.to(casts[1])
        return value if on_cpu else value.to(parameter.device)
    value = torch.empty_like(parameter, requires_grad=False)
    read_into(value, saved.tensors, name)
    return value
