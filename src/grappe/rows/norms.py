"""Rules of normalisations and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from grappe.rows.rules import aten, leader, part, rule
from grappe.rows.tensor import PARTIAL, Placement, Rows, full, summed, wrap


# ---- Normalisations ----------------------------------------------------------------------------------------
@rule("native_layer_norm")
def _layer_norm(function: Any, arguments: Any, options: Any) -> Any:
    value, shape = arguments[:2]
    place = value._cell.place if type(value) is Rows else None
    if type(place) is not Placement or place.dim >= value.dim() - len(shape):
        return NotImplemented
    return tuple(wrap(each, place) for each in function(value._cell.local, shape, *map(full, arguments[2:])))


@rule("native_layer_norm_backward")
def _layer_norm_backward(function: Any, arguments: Any, options: Any) -> Any:
    grad, value, shape, mean, rstd, weight, bias, mask = arguments
    lead = leader((value, grad))
    if lead is None or lead._cell.place.dim >= value.dim() - len(shape):
        return NotImplemented
    place = lead._cell.place
    from_end = place.dim - lead.dim()
    parts = [part(each, place, from_end) for each in (grad, value)]
    made = function(
        *parts, shape, part(mean, place, from_end), part(rstd, place, from_end), full(weight), full(bias), mask
    )
    return tuple(
        None if each is None else wrap(each, to) for each, to in zip(made, (place, PARTIAL, PARTIAL), strict=True)
    )


@rule("native_group_norm")
def _group_norm(function: Any, arguments: Any, options: Any) -> Any:
    value, weight, bias, n, *rest = arguments
    place = value._cell.place if type(value) is Rows else None
    if type(place) is not Placement or place.dim:
        return NotImplemented
    local = value._cell.local
    return tuple(
        wrap(each, place) for each in function(local.contiguous(), full(weight), full(bias), len(local), *rest)
    )


@rule("native_group_norm_backward")
def _group_norm_backward(function: Any, arguments: Any, options: Any) -> Any:
    grad, value, mean, rstd, weight, n, *rest = arguments
    lead = leader((value, grad))
    if lead is None or lead._cell.place.dim:
        return NotImplemented
    place = lead._cell.place
    parts = [part(each, place, -each.dim()).contiguous() for each in (grad, value, mean, rstd)]
    made = function(*parts, full(weight), len(parts[0]), *rest)
    return tuple(
        None if each is None else wrap(each, to) for each, to in zip(made, (place, PARTIAL, PARTIAL), strict=True)
    )


def _channels(value: Tensor) -> list[int]:
    return [d for d in range(value.dim()) if d != 1]


@rule(
    "native_batch_norm _native_batch_norm_legit _batch_norm_with_update _native_batch_norm_legit.no_stats cudnn_batch_norm"
)
def _batch_norm(function: Any, arguments: Any, options: Any) -> Any:
    """Statistics of all rows, from each process's count, mean and squares around it."""
    name = function._schema.name.removeprefix("aten::")
    value = arguments[0]
    place = value._cell.place if type(value) is Rows else None
    if name not in ("native_batch_norm",) or type(place) is not Placement or place.dim:
        return NotImplemented
    weight, bias, mean, var, training, momentum, eps = map(full, arguments[1:])
    local = value._cell.local
    if not training:
        made = aten.native_batch_norm(local, weight, bias, mean, var, False, momentum, eps)
        return wrap(made[0], place), made[1], made[2]
    own_var, own_mean = torch.var_mean(local, _channels(local), correction=0)
    there, n = local.numel() // local.shape[1], value.numel() // value.shape[1]
    parts = (
        summed(torch.stack([own_mean * (there / n), (own_var + own_mean * own_mean) * (there / n)]).double())
        if local.dtype is torch.float32
        else None
    )
    if parts is not None:  # in double precision, squares less the mean's lose nothing of fp32
        of_all = parts[0].to(own_mean.dtype)
        spread = (parts[1] - parts[0] * parts[0]).clamp_min_(0).to(own_mean.dtype)
    else:
        of_all = summed(own_mean * (there / n))
        spread = summed((own_var + (own_mean - of_all).square()) * (there / n))
    if mean is not None:
        mean.mul_(1 - momentum).add_(of_all.to(mean.dtype), alpha=momentum)
        var.mul_(1 - momentum).add_((spread * (n / max(1, n - 1))).to(var.dtype), alpha=momentum)
    made = aten.native_batch_norm(local, weight, bias, of_all, spread, False, 0.0, eps)[0]
    return wrap(made, place), of_all, (spread + eps).rsqrt()


@rule("native_batch_norm_backward")
def _batch_norm_backward(function: Any, arguments: Any, options: Any) -> Any:
    grad, value, weight, mean, var, saved, scale, training, eps, mask = arguments
    lead = leader((value, grad))
    if lead is None or lead._cell.place.dim:
        return NotImplemented
    place = lead._cell.place
    grad, x = part(grad, place, -grad.dim()), part(value, place, -value.dim())
    weight, saved, scale = full(weight), full(saved), full(scale)
    if not training:
        made = function(grad, x, weight, full(mean), full(var), saved, scale, False, eps, mask)
        return tuple(None if e is None else wrap(e, to) for e, to in zip(made, (place, PARTIAL, PARTIAL), strict=True))
    spread = scale.square().reciprocal() - eps
    by_eval, of_weight, of_bias = function(grad, x, weight, saved, spread, None, None, False, eps, [True, True, True])
    of_weight = (
        of_weight if of_weight is not None else ((x - _along(saved, x)) * _along(scale, x) * grad).sum(_channels(x))
    )
    of_bias = of_bias if of_bias is not None else grad.sum(_channels(x))
    sums = summed(torch.stack([of_bias, of_weight])) / (value.numel() // value.shape[1])
    gain = scale if weight is None else scale * weight
    slope = gain * sums[1] * scale
    by_eval -= _along(gain * sums[0] - slope * saved, x)
    by_eval.addcmul_(x, _along(slope, x), value=-1)
    return (
        wrap(by_eval, place) if mask[0] else None,
        wrap(of_weight, PARTIAL) if mask[1] else None,
        wrap(of_bias, PARTIAL) if mask[2] else None,
    )


def _along(channels: Tensor, value: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (value.dim() - 2))


# ---- Losses ------------------------------------------------------------------------------------------------

NONE, MEAN, SUM = range(3)


@rule("nll_loss_forward nll_loss2d_forward")
def _nll(function: Any, arguments: Any, options: Any) -> Any:
    value, target, weight, reduction, ignore = arguments
    lead = leader((value, target))
    if lead is None or lead._cell.place.dim or value.dim() < 2:
        return NotImplemented
    place = lead._cell.place
    parts = part(value, place, -value.dim()), part(target, place, -target.dim())
    if reduction == NONE:
        made = function(*parts, full(weight), NONE, ignore)
        return wrap(made[0], place), made[1]
    out, count = function(*parts, full(weight), SUM, ignore)
    without_messages = weight is None and (ignore < 0 or ignore >= value.shape[1]) and place.outer == 1
    if without_messages and (type(target) is not Rows or target._cell.whole is not None):
        total = full(count.new_tensor(float((full(target) != ignore).sum())))  # without a word to the others
    else:
        total = summed(count)
    return wrap(out / total if reduction == MEAN else out, PARTIAL), total


@rule("nll_loss_backward nll_loss2d_backward")
def _nll_backward(function: Any, arguments: Any, options: Any) -> Any:
    grad, value, target, weight, reduction, ignore, total = arguments
    lead = leader((value, target, grad))
    if lead is None or lead._cell.place.dim or value.dim() < 2:
        return NotImplemented
    place = lead._cell.place
    grad = part(grad, place, -grad.dim()) if reduction == NONE else full(grad)
    made = function(
        grad,
        part(value, place, -value.dim()),
        part(target, place, -target.dim()),
        full(weight),
        reduction,
        ignore,
        full(total),
    )
    return wrap(made, place)


@rule("mse_loss binary_cross_entropy smooth_l1_loss huber_loss binary_cross_entropy_with_logits soft_margin_loss")
def _loss(function: Any, arguments: Any, options: Any) -> Any:
    return _elementwise_loss(function, arguments, 0)


@rule(
    "mse_loss_backward binary_cross_entropy_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward"
)
def _loss_backward(function: Any, arguments: Any, options: Any) -> Any:
    return _elementwise_loss(function, arguments, 1)


def _elementwise_loss(function: Any, arguments: Any, first: int) -> Any:
    schema = [each.name for each in function._schema.arguments]
    at = schema.index("reduction")
    arguments = [*arguments] + [each.default_value for each in function._schema.arguments[len(arguments) :]]
    reduction = arguments[at]
    value = arguments[first]
    lead = leader(arguments)
    if lead is None or any(isinstance(e, Tensor) and e.shape != value.shape for e in arguments[first : first + 2]):
        return NotImplemented
    place = lead._cell.place
    parts = [part(e, place, place.dim - lead.dim()) if isinstance(e, Tensor) else e for e in arguments]
    if reduction != NONE:
        parts[at] = SUM
    made = function(*parts)
    if first:  # backward
        return wrap(made / value.numel() if reduction == MEAN else made, place)
    return (
        wrap(made, place) if reduction == NONE else wrap(made / value.numel() if reduction == MEAN else made, PARTIAL)
    )
