"""Gradient clipping: the norm of the whole gradient, sharded or not, and the scaling of gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.plan import Plan
from grappe.private_api.torch import foreach_mul_, foreach_norm, is_dtensor, local_tensor
from grappe.step.precision import LossScale
from grappe.task import Task

PIECE = 1 << 16  # numbers
NO_GRADIENT = "a step had no gradient at all"


def clipping(
    task: Task, plan: Plan, loss_scale: LossScale, parameters: Sequence[nn.Parameter], norm: Callable[[], Tensor]
) -> Callable[[], tuple[Tensor, bool]] | None:
    """Makes the function that unscales and clips the gradients of a step, between backward and update. Collective.

    It returns the norm before clipping, and whether to skip an fp16 step, whose gradient has an infinity.

    Args:
        norm: computes the norm of the whole gradient on `parameters`; the same on every process.

    Returns:
        None if a step needs none.
    """
    if not needs_norm(task, plan):
        return None

    def clip() -> tuple[Tensor, bool]:
        by = loss_scale.value
        before = norm() / by
        skipped = loss_scale.is_dynamic and not torch.isfinite(before)
        loss_scale.update(skipped)
        if skipped:
            return before, True
        if task.clip is not None:
            scale(parameters, bounding(before, task.clip) * (1 / by))
        elif by != 1:
            scale(parameters, 1 / by)
        return before, False

    return clip


def needs_norm(task: Task, plan: Plan) -> bool:
    """Returns whether a step needs the gradient's norm: to clip, or to detect an infinity."""
    return task.clip is not None or plan.precision == "fp16"


def gradient_norm(parameters: Sequence[nn.Parameter], stages: dist.ProcessGroup | None = None) -> Tensor:
    """Computes the 2-norm of all gradients together: a scalar, the same on every process. Collective if sharded.

    The square of a gradient sharded over mesh axes is summed over those axes' processes; a gradient replicated
    over an axis counts once.

    Args:
        stages: the processes that hold the other parts of the model, under a pipeline.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    total: Tensor | None = None
    for groups, numbers in by_groups(gradients):
        square = _square([local_part(gradients[number]) for number in numbers])
        for group in groups:
            dist.all_reduce(square, group=group)
        total = square if total is None else total + square
    if stages is not None and total is None:
        total = torch.zeros((), dtype=torch.float64, device=parameters[0].device)
    assert total is not None, NO_GRADIENT
    if stages is not None:
        dist.all_reduce(total, group=stages)
    return total.sqrt().to(torch.promote_types(parameters[0].dtype, torch.float32))


def _square(gradients: Sequence[Tensor]) -> Tensor:
    """Sums all squares to a float64 scalar.

    The pieces' norms are summed in float64: on a CPU torch's float32 norm of 20 million numbers is wrong by a
    thousandth, so that a sharded and a whole gradient would be clipped differently.
    """
    # Rows of an embedding that come twice in a sparse gradient are added up first.
    dense = [each.coalesce().values() if each.is_sparse else each for each in gradients]
    pieces = [piece for gradient in dense for piece in gradient.reshape(-1).split(PIECE)]
    return torch.stack(foreach_norm(pieces)).double().square().sum()


def local_part(gradient: Tensor) -> Tensor:
    """Returns this process's part of a gradient."""
    return local_tensor(gradient) if is_dtensor(gradient) else gradient


def sharded_groups(gradient: Tensor) -> list[dist.ProcessGroup]:
    """Returns the process groups over which a gradient is sharded, one for each axis of the mesh."""
    if not is_dtensor(gradient):
        return []
    mesh = gradient.device_mesh
    assert not any(placement.is_partial() for placement in gradient.placements), "an unreduced gradient"
    # Not only Shard: FSDP2 with tensor parallelism has _StridedShard, which is not a Shard.
    return [mesh.get_group(axis) for axis, placed in enumerate(gradient.placements) if not placed.is_replicate()]


def by_groups(tensors: Sequence[Tensor]) -> list[tuple[list[dist.ProcessGroup], list[int]]]:
    """Sorts tensors by the process groups over which they are sharded; returns the groups, and the tensors' numbers."""
    sorted_in: dict[tuple[int, ...], tuple[list[dist.ProcessGroup], list[int]]] = {}
    for number, tensor in enumerate(tensors):
        groups = sharded_groups(tensor)
        sorted_in.setdefault(tuple(map(id, groups)), (groups, []))[1].append(number)
    return list(sorted_in.values())


def bounding(norm: Tensor, bound: float) -> Tensor:
    """Returns the factor that reduces a gradient of this norm to at most `bound`, as in torch's clip_grad_norm_."""
    return torch.clamp(bound / (norm + 1e-6), max=1.0)


def scale(parameters: Sequence[Tensor], factor: Tensor | float) -> None:
    """Multiplies every gradient by `factor`, in place."""
    gradients = [local_part(parameter.grad) for parameter in parameters if parameter.grad is not None]
    dense = [each for each in gradients if not each.is_sparse]
    if dense:  # a pipeline's stage may be frozen
        foreach_mul_(dense, factor)
    for each in gradients:
        if each.is_sparse:
            each.mul_(factor)


def backward_scaled(
    loss_scale: LossScale, parameters: Callable[[], Sequence[Tensor]], run: Callable[[float], None]
) -> None:
    """Runs a backward whose loss `run` multiplies by the loss scale, and unscales the gradients that it adds to."""
    if not loss_scale.is_dynamic:
        run(1.0)
        return
    by, before = loss_scale.value, [each for each in parameters() if each.grad is not None]
    if before:
        scale(before, by)
    run(by)
    scale([each for each in parameters() if each.grad is not None], 1 / by)
