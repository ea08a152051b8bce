"""Calls a task's after_step after each optimizer step, on sharded parameters too, and checks its first call."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from grappe.data.draw import mix
from grappe.engines.base import EngineSetup
from grappe.engines.shared.carried import content_hash
from grappe.errors.user_code import method_error, user_call
from grappe.launch.world import World
from grappe.parallel.shard import reshard
from grappe.private_api.torch import is_dtensor
from grappe.step.fast_paths import seed_generators

WORD = 0x6166  # of the keys of its random numbers, so that they are no slice's
SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]


class AfterStep:
    """Calls `Task.after_step` without gradients. Collective."""

    def __init__(self, setup: EngineSetup, model: nn.Module) -> None:
        self._task, self._model, self._world = setup.task, model, setup.world
        self._split = setup.plan.uses_fsdp or setup.plan.tensor > 1
        self._checked = False

    def __call__(self, step: int) -> None:
        """Calls the method after optimizer step `step`.

        Raises:
            TaskError: the method fails, makes other parameters, or does not do the same on every process.
        """
        if self._split:
            reshard(self._model)
        before = {} if self._checked else dict(self._model.named_parameters())
        device = self._world.device
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            seed_generators(mix(self._task.seed, step, WORD), device)
            drawn = None if self._checked else _generator_states(self._world)
            with torch.no_grad(), DataIsCopied():
                user_call(self._task, "after_step", self._model)
            draws = drawn is not None and _generator_states(self._world) != drawn
        if not self._checked:
            self._check(before, draws=draws)
            self._checked = True

    def _check(self, before: dict[str, nn.Parameter], *, draws: bool) -> None:
        what = None
        if self._split and draws:
            what = (
                "draws random numbers, which each process would draw for its own part of a parameter: draw them in "
                "model(), into a buffer, or use replicate= instead of shard= and tensor="
            )
        elif [id(p) for p in self._model.parameters()] != [id(p) for p in before.values()]:
            what = (
                "makes other parameters, which nothing trains or shards: write into those that are there, as in "
                "target.lerp_(source, 0.01)"
            )
        elif self._world.size > 1 and (name := differing(before, self._world)) is not None:
            what = (
                f"gives '{name}' another value on each process: it may use parameters, and nothing that differs "
                "between processes, as samples and statistics of their batches do"
            )
        if what is not None:
            raise method_error(self._task, "after_step", what)


class DataIsCopied(TorchFunctionMode):
    """Mode in which `p.data = x` writes x into p's memory, which FSDP2 and CUDA graphs go on to read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func != SET_DATA or not isinstance(args[0], nn.Parameter):
            return func(*args, **(kwargs or {}))
        parameter, value = args
        if value.shape != parameter.shape:
            raise ValueError(f"the parameter has the shape {list(parameter.shape)}, not {list(value.shape)}")
        return parameter.copy_(value)


def differing(parameters: dict[str, nn.Parameter], world: World) -> str | None:
    """Finds a parameter of which processes with the same part have other bits. Collective."""
    prints = {name: (_part(p, world), content_hash(p)) for name, p in parameters.items()}
    everyone = world.gather(prints)
    odd = [
        name
        for name, (part, own) in prints.items()
        if any(theirs[name][0] == part and theirs[name][1] != own for theirs in everyone if name in theirs)
    ]
    return next((names[0] for names in world.gather(odd) if names), None)


def _part(tensor: Tensor, world: World) -> list[int]:
    """Returns this process's place on the axes that split the tensor; -1 on the others."""
    split: set[str] = set()
    if is_dtensor(tensor):
        axes = zip(tensor.device_mesh.mesh_dim_names or (), tensor.placements, strict=True)
        split = {axis for axis, placed in axes if not placed.is_replicate()}
    return [place if axis in split else -1 for axis, (place, _) in world.coordinates().items()]


def _generator_states(world: World) -> list[bytes]:
    states = [torch.get_rng_state()]
    if world.device.type == "cuda":
        states.append(torch.cuda.get_rng_state(world.device))
    return [state.numpy().tobytes() for state in states]
