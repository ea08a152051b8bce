"""ShardedExact: the same tree of sums where parameters, gradients and optimizer state are sharded by FSDP2.

Shapes: V pieces of a global batch over W processes; V / W of them on each, every W-th; n numbers in a unit's gradient.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from grappe.errors import PlanError
from grappe.launch.world import World, gather_into
from grappe.plan import Plan
from grappe.step.clip import local_part
from grappe.step.exact.sums import Exact, tree_reduce_scatter, tree_sum
from grappe.step.reduction import Sums
from grappe.task import Call


class TreeReduceScatter:
    """The reduce-scatter that FSDP2 calls after each unit's backward: a sum over the processes, neighbours first.

    Process r's piece j is number j W + r, so these W pieces are a whole subtree; above it each process sums its share
    of the gradients of its V / W pieces by itself.
    """

    def __init__(self, device: torch.device) -> None:
        self._wire = device

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Allocates memory for input or output."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Reduces all processes' [n] to this process's [n / W]. Collective."""
        output_tensor.copy_(tree_reduce_scatter(input_tensor.to(self._wire), group))


class ShardedExact(Exact):
    """Sums sharded gradients over all pieces; each piece's gradients are already summed over the processes."""

    every_piece: ClassVar[bool] = True  # all processes reduce each unit's gradients together

    def __init__(
        self, model: nn.Module, parameters: Sequence[nn.Parameter], plan: Plan, world: World, call: Call
    ) -> None:
        if not hasattr(FSDPModule, "set_custom_reduce_scatter"):
            raise PlanError(
                f"exact with shard needs a newer torch: FSDP of {torch.__version__} lets nobody replace its sums. "
                "Take exact with replicate, or another module of the site"
            )
        super().__init__(model, parameters, plan, world, call)
        self._losses: list[Tensor] = []
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(TreeReduceScatter(self._wire))  # type: ignore[arg-type]

    def add(self, loss: Tensor | None) -> None:
        assert loss is not None, "every piece goes through the model"
        self._losses.append(loss.reshape(1))
        gradients = [parameter.grad for parameter in self._parameters]
        for parameter in self._parameters:
            parameter.grad = None
        self._put([None if gradient is None else local_part(gradient) for gradient in gradients])

    @torch.no_grad()
    def reduce(self, flag: float, samples: int) -> Sums:
        [(_, parts)] = self._tree
        self._tree.clear()
        assert parts is not None
        for parameter, part in zip(self._parameters, parts, strict=True):
            if part is not None and not isinstance(parameter, DTensor):  # a scalar, which stays whole
                parameter.grad = part + 0.0
            elif part is not None:
                assert isinstance(parameter, DTensor)
                parameter.grad = DTensor.from_local(
                    part + 0.0,  # as for replicas: -0 becomes +0
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
        self._statistics.combine(samples)
        return Sums(self._loss_and_flags(flag))

    def _loss_and_flags(self, flag: float) -> Tensor:
        sums = torch.cat([*self._losses, torch.full_like(self._losses[0], flag)])
        self._losses = []
        assert self._group is not None
        everyone = sums.new_empty(self._world.data_size * len(sums))
        gather_into(everyone, sums, self._group)
        rows = everyone.view(self._world.data_size, -1)
        losses = self._pieces.in_order(rows[:, :-1].reshape(-1))
        return torch.stack([tree_sum(losses) + 0.0, rows[:, -1].sum()])


def exact_sums(
    model: nn.Module, parameters: Sequence[nn.Parameter], plan: Plan, world: World, call: Call
) -> Exact:
    """Makes the object that sums the gradients of an exact plan."""
    return (ShardedExact if plan.shard > 1 else Exact)(model, parameters, plan, world, call)
