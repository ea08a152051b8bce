"""Rules of normalisations and losses: statistics and counts of all rows."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.rows.gathered import write
from grappe.rows.layout import PARTIAL, Placement, TensorLayout, layout_of
from grappe.rows.messages import own_part, summed
from grappe.rows.plans import RuleCall, Way, along_by, results_on_meta, rule
from grappe.rows.rules import all_of, aten, contiguous, everywhere, rule_of_rows
from grappe.rows.tensor import Rows, full, own_local, own_of, wrapped

# ---- Within each sample -------------------------------------------------------------------------------------


@rule_of_rows(
    "native_layer_norm native_layer_norm_backward _fused_rms_norm _fused_rms_norm_backward native_group_norm "
    "native_group_norm_backward"
)
def _within_samples(call: RuleCall) -> Way | None:
    """Statistics of each sample's own numbers; weights and biases are the same for all samples."""
    value, placement, by_groups = call["input"], call.placement, "N" in call.values
    samples = 1 if by_groups else len(value.shape) - len(call["normalized_shape"])
    if len(call.lead.shape) != len(value.shape) or placement.dim >= samples:
        return None
    at = everywhere(call, placement) | {name: None for name in ("weight", "bias") if name in call.values}
    constants = {"N": placement.outer * placement.rows} if by_groups else {}
    results = (placement, PARTIAL, PARTIAL) if call.name.endswith("_backward") else (placement,) * 3
    return Way(at=at, constants=constants, results=results[: 2 if "rms" in call.name else 3])


# ---- Batch normalisation, with the statistics of all rows --------------------------------------------------


@rule("native_batch_norm cudnn_batch_norm native_batch_norm_backward cudnn_batch_norm_backward")
def _batch_norm(call: RuleCall) -> Any:
    backward = call.name.endswith("_backward")
    if call.lead is None or len(call.lead.shape) != len(call["input"].shape):
        return all_of(call) if backward else _of_all_rows
    placement = call.placement
    training = call.values.get("training", call.values.get("train", True))
    if placement.dim == 1:  # instance normalisation: channels of all samples
        if not backward and training and type(call["running_mean"]) is TensorLayout:
            return _of_all_rows
        channels = placement._replace(dim=0)
        every = placement.outer * placement.total
        at = {
            name: placement if len(call[name].shape) > 1 else channels if call[name].shape[0] == every else None
            for name in everywhere(call, None)
        }
        if not call.name.startswith("native"):
            return None
        if backward or training:
            return Way(at=at, results=(placement, channels, channels))
        return Way(at=at, results=(placement, None, None), after=_unread)
    if not (backward or training):
        return Way(at=_samples_at(call, placement), results=(placement, *[None] * 3), after=_unread)
    value = call["input"] if type(call["input"].placement) is Placement else call.lead
    meta = torch.empty_strided(value.shape, value.stride, dtype=value.dtype, device="meta")
    stride = results_on_meta(aten.native_batch_norm.default, (meta, *[None] * 4, True, 0.0, 1.0), {})[0].stride()
    result = layout_of(value.shape, stride, value.dtype, value.device, placement)
    if backward and not training:
        return Way(at=_samples_at(call, placement), results=(placement, PARTIAL, PARTIAL))
    return functools.partial(_backward if backward else _forward, result)


def _unread(made: Any) -> Any:
    """Statistics of evaluation, whose shapes differ between kernels, and which nobody reads."""
    return made[0], *(each[:0] for each in made[1:])


def _of_all_rows(operator: Any, arguments: Any, options: Any) -> Any:
    """Running statistics are written, which the operator does not declare."""
    plain = [
        full(each).clone() if type(each) is Rows and at in (3, 4) else full(each) for at, each in enumerate(arguments)
    ]
    made = operator(*plain, **options)
    for statistics, after in zip(arguments[3:5], plain[3:5], strict=True):
        if type(statistics) is Rows and arguments[5]:
            write(statistics, after)
    return made


def _samples_at(call: RuleCall, placement: Placement) -> dict[str, Any]:
    return {
        name: placement if name in ("input", "grad_out", "grad_output") else None for name in everywhere(call, None)
    }


def _channels(value: Tensor) -> list[int]:
    return [dim for dim in range(value.dim()) if dim != 1]


def _forward(result: TensorLayout, operator: Any, arguments: Any, options: Any) -> Any:
    """Statistics from each process's count, mean and squares around it."""
    value = arguments[0]
    if any(type(each) is Rows for each in arguments[3:5]):
        return _of_all_rows(operator, arguments, options)
    weight, bias, mean, var, _, momentum, eps = map(full, arguments[1:])
    local = own_local(value)
    n, there = value.numel() // value.shape[1], local.numel() // local.shape[1]
    wide = local.float() if local.dtype in (torch.float16, torch.bfloat16) else local
    if there:
        own_var, own_mean = torch.var_mean(wide, _channels(wide), correction=0)
    else:
        own_var, own_mean = wide.new_zeros((2, local.shape[1]))
    share = there / n
    if wide.dtype is torch.float32:  # in double precision, squares less the mean's lose nothing of fp32
        own_mean, own_var = own_mean.double(), own_var.double()
        of_all, squares = summed(torch.stack([own_mean, own_var + own_mean * own_mean]) * share)
        of_all, spread = of_all.float(), (squares - of_all * of_all).clamp_min_(0).float()
    else:
        of_all = summed(own_mean * share)
        spread = summed((own_var + (own_mean - of_all).square()) * share)
    if mean is not None:
        mean.mul_(1 - momentum).add_(of_all.to(mean.dtype), alpha=momentum)
        var.mul_(1 - momentum).add_((spread * (n / max(1, n - 1))).to(var.dtype), alpha=momentum)
    made = aten.native_batch_norm(local, weight, bias, of_all, spread, False, 0.0, eps)[0] if there else local.clone()
    rest = (wide.new_empty(0, dtype=torch.uint8),) if "cudnn" in operator.name() else ()
    return wrapped(made, result), of_all, (spread + eps).rsqrt(), *rest


def _backward(result: TensorLayout, operator: Any, arguments: Any, options: Any) -> Any:
    if "cudnn" in operator.name():
        value, grad, weight, _, _, saved, scale, eps, _ = arguments
        mask = [True, weight is not None, weight is not None]
    else:
        grad, value, weight, _, _, saved, scale, _, eps, mask = arguments
    placement = result.placement
    grad, x = own_of(grad, placement), own_of(value, placement)
    weight, saved, scale = full(weight), full(saved), full(scale)
    channels = saved.numel()
    if x.numel():
        spread = scale.square().reciprocal() - eps
        own, of_weight, of_bias = aten.native_batch_norm_backward(
            grad, x, weight, saved, spread, None, None, False, eps, [True, True, True]
        )
        if of_weight is None:
            of_weight = ((x - _along(saved, x)) * _along(scale, x) * grad).sum(_channels(x))
        of_bias = grad.sum(_channels(x)) if of_bias is None else of_bias
    else:
        own, (of_weight, of_bias) = torch.empty_like(x), scale.new_zeros((2, channels))
    sums = summed(torch.stack([of_bias, of_weight])) / (value.numel() // value.shape[1])
    gain = scale if weight is None else scale * weight
    slope = gain * sums[1] * scale
    own = own - _along(gain * sums[0] - slope * saved, x) - x * _along(slope, x)
    terms = (layout_of(each.shape, each.stride(), each.dtype, each.device, PARTIAL) for each in (of_weight, of_bias))
    results = ((own.to(x.dtype), result), *zip((of_weight, of_bias), terms, strict=True))
    return tuple(wrapped(*each) if needed else None for each, needed in zip(results, mask, strict=True))


def _along(channels: Tensor, value: Tensor) -> Tensor:
    return channels.view(1, -1, *[1] * (value.dim() - 2))


# ---- Over dimensions one of which has the rows ---------------------------------------------------------------


class _Statistics(NamedTuple):
    at: Placement
    dims: list[int]
    """Dimensions of a mean, of the grouped input."""
    count: int
    """Numbers that each mean is of."""
    groups: int
    """Groups of channels; 0: layer normalisation."""

    def grouped(self, value: Tensor) -> Tensor:
        return value.unflatten(1, (self.groups, -1)) if self.groups else value

    def spread(self, weight: Any) -> Any:
        """Returns own weights, or biases, in a shape that broadcasts to the grouped input's."""
        if weight is None:
            return None
        if self.groups:
            return weight.view([1, self.groups, -1] + [1] * (len(self.dims) - 1))
        return own_part(weight, self.of_weights)

    @property
    def of_weights(self) -> Placement:
        return self.at._replace(dim=self.at.dim - self.dims[0])


def _statistics(call: RuleCall) -> _Statistics | None:
    value, groups = call["input"], call.values.get("group", 0)
    at, shape = value.placement, value.shape
    first = 2 if groups else len(shape) - len(call["normalized_shape"])
    if type(at) is not Placement or at.outer > 1 or at.dim < first:
        return None
    dims = list(range(first, len(shape) + bool(groups)))
    return _Statistics(at, dims, math.prod(shape[1 if groups else first :]) // (groups or 1), groups)


@along_by("native_group_norm native_layer_norm", _statistics)
def _normalised(call: RuleCall, how: _Statistics) -> Way:
    names, shapes = call.names, [each.shape for each in call.results]

    def normalised(*arguments: Any) -> Any:
        named = dict(zip(names, arguments, strict=True))
        value, weight, bias = how.grouped(named["input"]), how.spread(named["weight"]), how.spread(named["bias"])
        kind = torch.promote_types(value.dtype, torch.float32)
        mean = summed(value.sum(how.dims, keepdim=True, dtype=kind)).div_(how.count)
        variance = summed((value - mean).square().sum(how.dims, keepdim=True, dtype=kind)).div_(how.count)
        scale = (variance + named["eps"]).rsqrt_()
        made = (value - mean).mul_(scale if weight is None else scale * weight)
        made = (made if bias is None else made.add_(bias)).to(value.dtype)
        return made.view(named["input"].shape), mean.view(shapes[1]), scale.view(shapes[2])

    return Way(at=_samples_at(call, how.at), operator=normalised, results=(how.at, None, None))


@along_by("native_group_norm_backward native_layer_norm_backward", _statistics)
def _normalised_backward(call: RuleCall, how: _Statistics) -> Way:
    names, dtype = call.names, next((each.dtype for each in call.results[1:] if each is not None), None)
    affine = (call["C"],) if how.groups else ()

    def gradients(*arguments: Any) -> Any:
        named = dict(zip(names, arguments, strict=True))
        own, mask = named["input"], named["output_mask"]
        gradient, value = how.grouped(named["grad_out"]), how.grouped(own)
        ones = [1 if dim in how.dims else size for dim, size in enumerate(value.shape)]
        normal = (value - named["mean"].view(ones)).mul_(scale := named["rstd"].view(ones))
        shape = affine or own.shape[how.dims[0] :]
        like = [1, how.groups, shape[0] // how.groups] + [1] * (len(how.dims) - 1) if how.groups else shape
        of_weight = (gradient * normal).sum_to_size(like).view(shape).to(dtype) if mask[1] else None
        of_bias = gradient.sum_to_size(like).view(shape).to(dtype) if mask[2] else None
        if not mask[0]:
            return None, of_weight, of_bias
        weight = how.spread(named["weight"])
        weighted = gradient if weight is None else gradient * weight
        sums = torch.stack([each.sum(how.dims, keepdim=True) for each in (weighted, weighted * normal)])
        level, slope = summed(sums).div_(how.count)
        of_value = normal.mul_(-slope).sub_(level).add_(weighted).mul_(scale)
        return of_value.to(own.dtype).view(own.shape), of_weight, of_bias

    of_affine = PARTIAL if how.groups else how.of_weights
    return Way(at=_samples_at(call, how.at), operator=gradients, results=(how.at, of_affine, of_affine))


# ---- Losses ------------------------------------------------------------------------------------------------

NONE, MEAN, SUM = range(3)


@rule_of_rows("nll_loss_forward nll_loss2d_forward nll_loss_backward nll_loss2d_backward")
def _nll(call: RuleCall) -> Any:
    tensors = [call[name] for name in ("self", "target", "grad_output") if name in call.values]
    led, in_classes = next((each for each in tensors if type(each.placement) is Placement), None), tensors[0].placement
    if led is None or (type(in_classes) is Placement and in_classes.dim == 1) or len(tensors[0].shape) < 2:
        return None
    at = led.placement
    dim = at.dim - (at.dim > 0) if led is tensors[0] else at.dim  # of targets [N, ...]; outputs are [N, classes, ...]
    run = _nll_backward if call.name.endswith("_backward") else _nll_forward
    return functools.partial(run, at._replace(dim=dim + (dim > 0)), at._replace(dim=dim))


def _nll_forward(of_value: Placement, placement: Placement, operator: Any, arguments: Any, options: Any) -> Any:
    value, target, weight, reduction, ignore = arguments
    own, weight = (own_of(value, of_value), own_of(target, placement)), full(weight)
    if reduction == NONE:
        made = operator(*own, weight, NONE, ignore)
        return wrapped(made[0], contiguous(target.shape, made[0], placement)), made[1]
    if placement.rows:
        total, count = operator(*own, weight, SUM, ignore)
    else:
        total, count = own[0].new_zeros(()), own[0].new_zeros(())
    if weight is None and (type(target) is not Rows or target._cell.is_current()):  # without a message
        count = (full(target) != ignore).sum().to(count.dtype)
    else:
        count = summed(count)
    total = total / count if reduction == MEAN else total
    return wrapped(total, layout_of(total.shape, (), total.dtype, total.device, PARTIAL)), count


def _nll_backward(of_value: Placement, placement: Placement, operator: Any, arguments: Any, options: Any) -> Any:
    grad, value, target, weight, reduction, ignore, total = arguments
    grad = own_of(grad, placement) if reduction == NONE else full(grad)
    own = own_of(value, of_value)
    made = operator(grad, own, own_of(target, placement), full(weight), reduction, ignore, full(total))
    return wrapped(made, contiguous(value.shape, made, of_value))


_ELEMENTWISE = "mse_loss binary_cross_entropy smooth_l1_loss huber_loss soft_margin_loss"


@rule_of_rows(
    f"{_ELEMENTWISE} binary_cross_entropy_with_logits {' '.join(f'{name}_backward' for name in _ELEMENTWISE.split())}"
)
def _elementwise_loss(call: RuleCall) -> Way | None:
    """Losses of each number: of own rows, weighted by their share."""
    value, target, placement = call["self"], call["target"], call.placement
    if value.shape != target.shape or len(call.lead.shape) != len(value.shape) or not value.shape.numel():
        return None
    local = placement.rows * placement.outer / max(1, placement.total * placement.outer)
    after = (lambda made: made * local) if call["reduction"] == MEAN else None
    if call.name.endswith("_backward") or call["reduction"] == NONE:
        return Way(results=placement, after=after)
    return Way(results=PARTIAL, after=after)
