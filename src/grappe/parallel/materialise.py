"""Makes a task's model on the meta device; gives it memory and values after parallelization."""

from __future__ import annotations

import collections
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from grappe.checkpoint.weights import Weights, named_tensors, read_into
from grappe.errors import TaskError
from grappe.plan import Plan
from grappe.private_api.torch import (
    give_own_memory,
    gradient_hooks,
    is_dtensor,
    load_from_state_dict,
    module_buffers,
    module_parameters,
)
from grappe.step.task_contract import model_of
from grappe.task import Task

SPREADERS = ("grappe", "torch", "deepspeed", "horovod", "lightning")
"""Packages that put hooks of their own on gradients, to send them."""


def on_meta(task: Task, kind: torch.dtype = torch.float32) -> nn.Module:
    """Makes the task's model without memory or values; on the CPU if the meta device is not possible.

    Args:
        kind: float64 for a model in float64.
    """
    model = _without_values(task)
    return model.double() if kind == torch.float64 else model


def _without_values(task: Task) -> nn.Module:
    try:
        with torch.device("meta"):
            model = model_of(task)
        # A tensor that is neither parameter nor buffer would stay without values.
        if not any(
            isinstance(value, torch.Tensor) and value.is_meta
            for module in model.modules()
            for value in vars(module).values()
        ) and not (hooked(model) or any(isinstance(module, torch.jit.ScriptModule) for module in model.modules())):
            return model  # a scripted module cannot be given memory later, nor a parameter that keeps its hooks
    except (RuntimeError, NotImplementedError, TypeError):  # TypeError: .numpy()
        pass  # its constructor computes with values, so it must have them
    return model_of(task)


def hooked(model: nn.Module) -> str:
    """Returns the name of the first parameter on whose gradient the task has put a hook; "" if there is none."""
    for name, parameter in model.named_parameters():
        for hook in itertools.chain(*gradient_hooks(parameter)):
            home = getattr(getattr(hook, "func", hook), "__module__", None) or ""
            if home.partition(".")[0] not in SPREADERS:
                return name
    return ""


def refuse_hooks(model: nn.Module, plan: Plan) -> None:
    """Raises TaskError where a hook that model() has put on a gradient would see a part of the batch's."""
    if plan.parts > 1 and (name := hooked(model)):
        raise TaskError(
            f"model() has put a hook on the gradient of {name}, which would see a part of the batch's gradient under "
            f"{plan}: multiply the parameter in forward(), write after_step(self, model), or use one process without "
            "microbatches"
        )


def fill(model: nn.Module, weights: Weights, device: torch.device, *, offloaded: bool = False) -> None:
    """Gives the model memory on `device` and the values of `weights`; tied tensors stay tied.

    Args:
        offloaded: sharded parameters get their memory on the host.

    Raises:
        TaskError: a parameter or buffer has no value in `weights`, or another shape.
    """
    with marks_kept(model):
        if hooked(model):
            model.to(device)
        elif device.type == "cuda" or any(tensor.is_meta for tensor in named_tensors(model).values()):
            give_memory(model, device, offloaded=offloaded)
    fit_buffers(model, weights)
    check_weights(model, weights)
    for name, tensor in named_tensors(model).items():
        read_into(tensor, weights, name)


@contextlib.contextmanager
def marks_kept(model: nn.Module) -> Iterator[None]:
    """Context in which parameters may be replaced: the new ones have the attributes that model() set, as `no_decay`."""
    # A DTensor's attributes are its own parts.
    before = {name: dict(vars(each)) for name, each in model.named_parameters() if not is_dtensor(each)}
    yield
    for name, parameter in model.named_parameters():
        for key, value in before.get(name, {}).items():
            setattr(parameter, key, value)


def resizes_buffers(module: nn.Module) -> bool:
    """Returns whether a module's own loading can give its buffers other shapes, as that of torch's observers does."""
    loads = load_from_state_dict(type(module))
    return loads is not load_from_state_dict(nn.Module) and not loads.__module__.startswith("torch.nn.")


def fit_buffers(model: nn.Module, weights: Weights) -> None:
    """Gives the buffers of modules that resize them their shapes in `weights`."""
    for path, module in model.named_modules():
        for name, buffer in module_buffers(module).items() if resizes_buffers(module) else ():
            full = f"{path}.{name}".lstrip(".")
            if buffer is not None and full in weights and weights.shape(full) != tuple(buffer.shape):
                module_buffers(module)[name] = buffer.new_empty(weights.shape(full))


def check_weights(model: nn.Module, weights: Weights) -> None:
    """Raises TaskError if a parameter or buffer has no value in `weights`, or another shape."""
    for name, tensor in named_tensors(model).items():
        if name not in weights:
            raise TaskError(f"the model has '{name}', the weights do not: are they another model's?")
        if weights.shape(name) != tuple(tensor.shape):
            raise TaskError(
                f"'{name}' is {list(tensor.shape)} in the model and {list(weights.shape(name))} in the weights: "
                "does model() make the same one whenever it is called?"
            )


def give_memory(model: nn.Module, device: torch.device, *, offloaded: bool = False) -> None:
    """Gives the model's tensors memory on `device`, without values; tied tensors stay tied.

    Args:
        offloaded: sharded parameters get it on the host: FSDP2 offloads none that were made elsewhere.
    """
    sites: dict[int, list[tuple[Any, str]]] = {}
    for home, name in _places(model):
        sites.setdefault(id(home[name]), []).append((home, name))
    # A module that stands in two places once: torch cannot replace a fake tensor that something refers to meanwhile.
    # Those within come first, as FSDP2 looks at a module's tensors when it is its turn.
    for module in reversed(list(model.modules())):
        if isinstance(module, torch.jit.ScriptModule):
            module.to(device)
        else:
            give_own_memory(module, torch.device("cpu") if offloaded else device)
    # Unsharded tensors go to the device, without values: buffers, and parameters without a dimension.
    for home, name in _places(model) if offloaded and device.type != "cpu" else ():
        tensor = home[name]
        if not is_dtensor(tensor):
            made: Any = torch.empty_like(tensor, device=device)
            home[name] = nn.Parameter(made, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else made
    for (first, key), *others in sites.values():
        for home, name in others:
            home[name] = first[key]


def _places(model: nn.Module) -> list[tuple[Any, str]]:
    """Lists where a model's modules have tensors: a dictionary of parameters or buffers, and the name in it."""
    homes = [home for module in model.modules() for home in (module_parameters(module), module_buffers(module))]
    return [(home, name) for home in homes for name, tensor in home.items() if tensor is not None]


def untied(model: nn.Module, units: Sequence[nn.Module]) -> list[nn.Module]:
    """Lists the units that share neither a parameter with a module outside of them nor a module, in order.

    FSDP2 makes a new parameter in each unit: a parameter of two units would become two. Units that are listed twice,
    or share a module, are left to the root, too; a unit may be inside another.
    """
    shared = shared_parameters(model)
    inside = [{id(module) for module in unit.modules()} for unit in units]
    times = collections.Counter(module for modules in inside for module in modules)

    def is_alone(number: int) -> bool:
        modules_inside, unit = inside[number], units[number]
        if any(shared.get(id(parameter), modules_inside) - modules_inside for parameter in unit.parameters()):
            return False
        return max(times[module] for module in modules_inside) == 1 or not any(
            other != number
            and not modules_inside.isdisjoint(modules)
            and (units[other] is unit or (id(units[other]) not in modules_inside and id(unit) not in modules))
            for other, modules in enumerate(inside)
        )

    return [unit for number, unit in enumerate(units) if is_alone(number)]


def shared_parameters(model: nn.Module) -> dict[int, set[int]]:
    """Returns the modules that share a parameter of their own with another module; both by id."""
    owners: dict[int, set[int]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(id(module))
    return {parameter: several for parameter, several in owners.items() if len(several) > 1}
