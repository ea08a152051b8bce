"""Checks that every step's backward reaches the same parameters in the same order on all processes, as ZeRO assumes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import zip_longest

from torch import nn

from grappe.errors import TaskError
from grappe.launch.world import World

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
        # Alone, and below stage 2, gradients are taken in the order of parameters, not in that of backward.
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
        found = list(self._fired) if self._ordered else sorted(set(self._fired))
        self._fired.clear()
        if self._first is None:
            self._compare_processes(self._world.gather(found))
            self._first = found
        elif found != self._first:
            self._refuse("this step's samples", "the first step's", found, self._first)

    def _compare_processes(self, everyone: Sequence[list[int]]) -> None:
        missing = sorted(set(range(len(self._names))).difference(*everyone))
        if missing:
            raise TaskError(
                f"the loss does not depend on {self._told(missing)}: DeepSpeed would let weight decay move it all "
                "the same. Leave it out of the model, freeze it with requires_grad_(False), or use engine=native"
            )
        for rank, theirs in enumerate(everyone):
            if theirs != everyone[0]:
                self._refuse("process 0's samples", f"process {rank}'s", everyone[0], theirs)

    def _refuse(self, some: str, others: str, mine: list[int], theirs: list[int]) -> None:
        only = sorted(set(mine) ^ set(theirs))
        if only:
            what = f"{self._told(only)}, but not both"
        else:
            pairs = zip_longest(mine, theirs)
            one, other = next((a, b) for a, b in pairs if a != b)
            both = [index for index in (one, other) if index is not None]
            what = " before and after ".join(self._told([index]) for index in both)
            what += " once more often in one of them" if len(both) == 1 else ""
        why = (
            "sums gradients by the order they come in, and would add up different parameters' gradients"
            if self._world.size > 1
            else "has zeros for what is not reached, which weight decay and momentum would move all the same"
        )
        raise TaskError(
            f"the model uses different parameters for different samples: {some} and {others} reach {what}. "
            f"DeepSpeed {why}: {INSTEAD}"
        )

    def _told(self, indices: Sequence[int]) -> str:
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
