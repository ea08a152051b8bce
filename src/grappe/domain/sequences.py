"""Rules for sequences: embeddings, linear layers, attention, and the losses of classes."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from grappe.domain.cut import DIFFERENT, Cut, along, intervals, like, name_of, refused, rule
from grappe.domain.exchange import all_sum, gathered, realigned, reduced, refetching

OF_WEIGHTS = "a table or a weight that is cut"


@rule(F.embedding)
def _embedded(input: Any, weight: Any, padding_idx: Any = None, *arguments: Any, **options: Any) -> Any:
    if isinstance(weight, Cut):
        raise refused(OF_WEIGHTS)
    return like(input, F.embedding(input.local, weight, padding_idx, *arguments, **options))


@rule(F.linear)
def _linear(inputs: Any, weight: Any, bias: Any = None) -> Any:
    if isinstance(weight, Cut) or not isinstance(inputs, Cut):
        raise refused(OF_WEIGHTS)
    at = inputs.at
    if at.dim < inputs.dim() - 1:
        return like(inputs, F.linear(inputs.local, weight, bias))
    # Each process has some of the features, as after Flatten: their products are summed, and nothing is gathered.
    total = all_sum(F.linear(inputs.local, at.part_of(weight, 1)), at.domain)
    return total if bias is None else total + bias


@rule(F.one_hot)
def _one_hot(input: Cut, num_classes: int = -1) -> Any:
    if num_classes < 0:
        raise refused("F.one_hot without num_classes")
    return like(input, F.one_hot(input.local, num_classes))


@rule(F.scaled_dot_product_attention)
def _attention(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, is_causal: bool = False,
    scale: Any = None, enable_gqa: bool = False,
) -> Any:  # fmt: skip
    """Attends from this process's queries to all keys, or under a causal mask to those up to its last query's.

    The other processes' keys and values are fetched, and fetched again in backward.
    """
    several, mask, positions = (query, key, value), attn_mask, query.dim() - 2
    if not all(isinstance(each, Cut) for each in several):
        raise refused("attention between what is cut and what is whole")
    dims = {each.at.dim for each in several}
    extra = {"scale": scale, "enable_gqa": enable_gqa}
    if dims != {positions}:
        if dims & {positions, positions + 1} or dropout_p:
            raise refused(DIFFERENT)
        q, k, v = (realigned(each, query.at.sizes).local for each in several)
        mask = mask.local if isinstance(mask, Cut) else mask
        return like(query, F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal, **extra))
    at, length, domain = query.at, key.shape[-2], query.at.domain
    want = [(0, min(b, length) if is_causal else length) for _, b in intervals(at.sizes)]
    if isinstance(mask, Cut) and mask.at.dim == mask.dim() - 1:  # of keys
        mask = gathered(mask, "masks")
    if isinstance(mask, Cut):
        mask = realigned(mask, at.sizes).local
    elif isinstance(mask, Tensor) and mask.dim() > 1 and mask.shape[-2] > 1:
        mask = at.part_of(mask, -2)
    kept = None
    if dropout_p:
        if query.device.type != "cpu":
            raise refused("the dropout of attention on a GPU", "set that of attention to 0")
        chances = torch.empty([*query.shape[:-1], length], dtype=query.dtype).bernoulli_(1 - dropout_p)
        kept = at.part_of(chances, -2)[..., : want[domain.rank][1]].bool()  # of what one process draws

    def attend(keys: Tensor, values: Tensor, queries: Tensor, *bias: Tensor) -> Tensor:
        [seen] = bias or [None]
        if is_causal:  # not kept for backward
            places = torch.arange(*at.own, device=queries.device)[:, None]
            seen = places >= torch.arange(keys.shape[-2], device=queries.device)
        elif seen is not None and seen.is_floating_point():
            seen = seen.to(queries.dtype)
        if kept is None:
            return F.scaled_dot_product_attention(queries, keys, values, seen, **extra)
        if enable_gqa:
            keys, values = (each.repeat_interleave(queries.shape[-3] // each.shape[-3], -3) for each in (keys, values))
        scores = queries @ keys.transpose(-2, -1) * (scale or queries.shape[-1] ** -0.5)
        if seen is not None:
            scores = scores + seen if seen.is_floating_point() else scores.masked_fill(~seen, -math.inf)
        return scores.softmax(-1).where(kept, 0) @ values / (1 - dropout_p)

    value = realigned(value, key.at.sizes)
    more = () if mask is None else (mask,)
    return like(query, refetching(attend, [(key, want), (value, want)], query.local, *more))


@rule(F.multi_head_attention_forward)
def _several_heads(
    query: Any, key: Any, value: Any, embed_dim_to_check: int, num_heads: int, in_proj_weight: Any, in_proj_bias: Any,
    bias_k: Any, bias_v: Any, add_zero_attn: bool, dropout_p: float, out_proj_weight: Any, out_proj_bias: Any,
    training: bool = True, key_padding_mask: Any = None, need_weights: bool = True, attn_mask: Any = None,
    use_separate_proj_weight: bool = False, q_proj_weight: Any = None, k_proj_weight: Any = None,
    v_proj_weight: Any = None, static_k: Any = None, static_v: Any = None, average_attn_weights: bool = True,
    is_causal: bool = False,
) -> Any:  # fmt: skip
    """nn.MultiheadAttention: inputs [T, B, width]."""
    odd = bias_k is not None or add_zero_attn or static_k is not None or query.dim() != 3
    if odd or use_separate_proj_weight or need_weights:
        raise refused("nn.MultiheadAttention that returns weights", "call it with need_weights=False")
    heads: list[Any] = []
    biases = [None] * 3 if in_proj_bias is None else in_proj_bias.chunk(3)
    for each, weight, bias in zip((query, key, value), in_proj_weight.chunk(3), biases, strict=True):
        several = F.linear(each, weight, bias)  # [T, B, width] to [B, heads, T, each]
        heads.append(several.unflatten(-1, (num_heads, -1)).permute(1, 2, 0, 3))
    mask = attn_mask
    if isinstance(mask, Tensor) and mask.dim() == 3:
        mask = mask.unflatten(0, (-1, num_heads))
    if key_padding_mask is not None:
        ignored = key_padding_mask
        if isinstance(ignored, Cut):
            ignored = gathered(ignored, "masks")
        if not ignored.is_floating_point():
            ignored = torch.zeros(ignored.shape, device=ignored.device).masked_fill_(ignored, -math.inf)
        ignored = ignored[:, None, None, :]
        if mask is not None and not mask.is_floating_point():
            mask = torch.zeros(mask.shape, device=mask.device).masked_fill_(mask, -math.inf)
        mask = ignored if mask is None else mask + ignored
    elif mask is not None and not mask.is_floating_point():
        mask = ~mask  # here True is what is not seen
    causal = is_causal and key_padding_mask is None and attn_mask is None
    output = F.scaled_dot_product_attention(
        *heads, attn_mask=mask, dropout_p=dropout_p if training else 0.0, is_causal=causal
    )
    return F.linear(output.permute(2, 0, 1, 3).flatten(2), out_proj_weight, out_proj_bias), None


# ---- Losses of classes -------------------------------------------------------------------------------------


def _of_classes(function: Any) -> Any:
    def run(
        input: Any, target: Any, weight: Any = None, size_average: Any = None, ignore_index: int = -100,
        reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
    ) -> Any:  # fmt: skip
        if not isinstance(input, Cut):
            raise refused("a loss of whole outputs and targets that are cut")
        at = input.at
        classes = min(1, input.dim() - 1)
        if at.dim == classes and input.dim() > 1:
            raise along(name_of(function))
        dim = at.dim if target.dim() == input.dim() or at.dim < classes else at.dim - 1
        asked = realigned(target, at.sizes).local if isinstance(target, Cut) else at.part_of(target, dim)
        smooth = {"label_smoothing": label_smoothing} if function is F.cross_entropy else {}
        each = function(input.local, asked, weight, ignore_index=ignore_index, reduction="none", **smooth)
        if reduction == "none":
            return Cut(each, at._replace(dim=at.dim if at.dim < classes else at.dim - 1))
        total = all_sum(each.sum(), at.domain)
        if reduction == "sum":
            return total
        if asked.is_floating_point():
            return total / (input.numel() // input.shape[classes])
        counted = asked != ignore_index
        shares = counted if weight is None else weight[asked.where(counted, 0)] * counted
        return total / reduced(shares.sum().float(), at.domain)

    return run


for _function in (F.cross_entropy, F.nll_loss):
    rule(_function)(_of_classes(_function))
