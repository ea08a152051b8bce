"""Whether every parameter gets a gradient: ZeRO has zeros for one that gets none, and weight decay would move it."""

from __future__ import annotations

from torch import nn

from grappe.errors import TaskError
from grappe.world import World


class Reached:
    """Watches the first step's backward."""

    def __init__(self, model: nn.Module, stage: int, world: World) -> None:
        self._world = world
        self._missing = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._handles = [
            parameter.register_hook(lambda gradient, name=name: self._missing.discard(name))
            for name, parameter in model.named_parameters()
            if parameter.requires_grad
        ]

    def check(self) -> None:
        """Behind the first step's backward. Collective.

        Raises:
            TaskError: no process's samples reached some parameter.
        """
        if not self._handles:
            return
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        missing = sorted(set.intersection(*self._world.gather(self._missing)))
        if missing:
            raise TaskError(
                f"the loss does not depend on {', '.join(missing[:3])}{', …' if len(missing) > 3 else ''}: "
                "DeepSpeed would let weight decay move it all the same. Leave it out of the model, freeze it with "
                "requires_grad_(False), or use engine=native"
            )
