"""Attention along the dimension of the rows: from own queries to the keys of all, fetched again in backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.rows.context import NOW
from grappe.rows.exchange import RowExchange, every_row, intervals, refused
from grappe.rows.layout import Placement, TensorLayout
from grappe.rows.plans import RuleCall, Way, along_by
from grappe.rows.tensor import Rows

EFFICIENT = 2
"""torch's number of the kernel on a GPU that takes any mask."""
_ALIGNED = 16
"""Multiple of columns in whose memory that kernel wants a mask."""


class _Attending(NamedTuple):
    query: Placement
    key: Placement
    rows: RowExchange
    """The keys and values that each process needs."""
    mask: Any
    """Placement at which the mask [..., queries, keys] is taken."""
    causal: bool

    @property
    def own(self) -> tuple[int, int]:
        return intervals(self.query.sizes)[NOW.context.rank]

    def seen(self, mask: Tensor | None, queries: Tensor) -> Tensor | None:
        """Returns the mask of own queries and fetched keys, which is not kept for backward."""
        first, end = self.own
        if self.causal:
            keys = self.rows.want[NOW.context.rank][1]
            later = torch.arange(keys, device=queries.device) > torch.arange(first, end, device=queries.device)[:, None]
            wide = queries.new_zeros((end - first, -(-keys // _ALIGNED) * _ALIGNED))
            return wide[:, :keys].masked_fill_(later, -torch.inf)
        if mask is None or self.mask is None or self.mask.dim < mask.dim() - 1:
            return mask
        mask = every_row(mask, self.mask, "masks")
        return mask.narrow(-2, first, end - first) if mask.shape[-2] == self.query.total > 1 else mask


def _attending(call: RuleCall) -> _Attending | None:
    """Returns how queries meet keys; None: rows are not the positions of all three."""
    query, key, value = (call[name].placement for name in ("query", "key", "value"))
    if any(type(each) is not Placement or each.dim != 2 or each.outer > 1 for each in (query, key, value)):
        return None
    if call["dropout_p"]:
        return None
    # Under a causal mask up to the last of the own queries.
    want = [(0, min(b, key.total) if call["is_causal"] else key.total) for _, b in intervals(query.sizes)]
    mask, at = call.values.get("attn_mask", call.values.get("attn_bias")), None
    if type(mask) is TensorLayout:
        queries = len(mask.shape) - 2
        if type(mask.placement) is Placement and mask.placement.dim == queries + 1:
            at = mask.placement
        elif queries >= 0 and mask.shape[queries] == query.total > 1:
            at = query._replace(dim=queries)
    rows = RowExchange(dim=2, sizes=key.sizes, want=tuple(want), purpose="attention")
    return _Attending(query, key, rows, at, call["is_causal"])


def _places(how: _Attending, *of_queries: str) -> dict[str, Any]:
    return dict.fromkeys(("query", *of_queries), how.query) | {
        "key": how.key, "value": how.key, "attn_mask": how.mask, "attn_bias": how.mask, "philox_seed": None,
        "philox_offset": None,
    }  # fmt: skip


@along_by("_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention", _attending)
def _attention(call: RuleCall, how: _Attending) -> Way:
    on_cpu, scale, operator, names = call.name.endswith("cpu"), call["scale"], call.operator, call.names

    def attended(queries: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        named = dict(zip(names[3:], rest, strict=False)) | options
        fetched = how.rows.brought(keys), how.rows.brought(values)
        mask = how.seen(named.get("attn_mask", named.get("attn_bias")), queries)
        if on_cpu:
            return operator(queries, *fetched, 0.0, False, attn_mask=mask, scale=scale)
        mask = None if mask is None else mask.expand(*queries.shape[:3], mask.shape[-1])
        return operator(queries, *fetched, mask, named["compute_log_sumexp"], 0.0, False, scale=scale)

    # A GPU's kernel gives more sums than queries, which only its backward looks at: it finds its own.
    results = (how.query, how.query) if on_cpu else (how.query, None, None, None)
    return Way(at=_places(how), operator=attended, results=results)


_BACKWARD = "_scaled_dot_product_flash_attention_for_cpu_backward _scaled_dot_product_efficient_attention_backward"


@along_by(_BACKWARD, _attending)
def _attention_backward(call: RuleCall, how: _Attending) -> Way:
    on_cpu, scale, operator, names = "_for_cpu" in call.name, call["scale"], call.operator, call.names

    def gradients(grad: Tensor, queries: Tensor, keys: Tensor, values: Tensor, *rest: Any, **options: Any) -> Any:
        named = dict(zip(names[4:], rest, strict=False)) | options
        fetched = how.rows.brought(keys), how.rows.brought(values)
        mask = how.seen(named.get("attn_mask", named.get("attn_bias")), queries)
        out, sums = named["out"], named["logsumexp"]
        if on_cpu:
            made = operator(grad, queries, *fetched, out, sums, 0.0, False, attn_mask=mask, scale=scale)
        else:
            mask = None if mask is None else mask.expand(*queries.shape[:3], mask.shape[-1])
            draws, needed = (named["philox_seed"], named["philox_offset"]), named["grad_input_mask"]
            made = operator(grad, queries, *fetched, mask, out, sums, *draws, 0.0, needed, False, scale=scale)
        of_own, of_keys, of_values, *of_mask = made
        back = [how.rows.give_back(each, own.shape) for each, own in ((of_keys, keys), (of_values, values))]
        return of_own, *back, *of_mask

    grad = next(name for name in names if name.startswith("grad_out"))
    of_mask = [how.mask] * (len(call.results) - 3)
    return Way(
        at=_places(how, grad, "out", *(["logsumexp"] if on_cpu else [])),
        operator=gradients,
        results=(how.query, how.key, how.key, *of_mask),
    )


def choice_of_kernel(query: Any, dropout_p: float) -> int | None:
    """Returns torch's number of the kernel for queries whose positions are the rows; None: torch chooses."""
    at = query._cell.layout.placement if type(query) is Rows else None
    if type(at) is not Placement or at.dim != 2 or query.device.type == "cpu":
        return None
    if dropout_p:
        raise refused("the dropout of attention on a GPU", "set that of attention to 0")
    return EFFICIENT if query.shape[-1] % 8 == 0 else 0
