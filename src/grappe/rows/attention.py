"""Rules of attention, of whole samples or along the rows: own queries meet all keys, fetched again in backward."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from grappe.rows.context import NOW
from grappe.rows.exchange import RowExchange, every_row, intervals, refused
from grappe.rows.layout import Placement, TensorLayout
from grappe.rows.plans import RuleCall, Way, along_by, procedure
from grappe.rows.rules import everywhere, rule_of_rows
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


_KERNELS = "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention"


@along_by(f"{_KERNELS} {' '.join(f'{name}_backward' for name in _KERNELS.split())}", _attending)
def _attention(call: RuleCall, how: _Attending) -> Way:
    names, operator, is_backward = call.names, call.operator, call.name.endswith("_backward")
    on_cpu, bias = "_for_cpu" in call.name, "attn_mask" if "attn_mask" in names else "attn_bias"

    def attended(*arguments: Any, **options: Any) -> Any:
        named = dict(zip(names, arguments, strict=False)) | options
        own = named["key"], named["value"]
        keys, values = map(how.rows.brought, own)
        mask = how.seen(named.get(bias), named["query"])
        if mask is not None and not on_cpu:
            mask = mask.expand(*named["query"].shape[:3], mask.shape[-1])
        made = operator(**named | {"key": keys, "value": values, bias: mask, "is_causal": False})
        if not is_backward:
            return made
        of_own, *of_fetched = made[:3]
        back = [how.rows.give_back(each, part.shape) for each, part in zip(of_fetched, own, strict=True)]
        return of_own, *back, *made[3:]

    if is_backward:
        grad = next(name for name in names if name.startswith("grad_out"))
        of_mask = [how.mask] * (len(call.results) - 3)
        at = _places(how, grad, "out", *(["logsumexp"] if on_cpu else []))
        return Way(at=at, operator=attended, results=(how.query, how.key, how.key, *of_mask))
    # A GPU's kernel gives more sums than queries, which only its backward looks at: it finds its own.
    results = (how.query, how.query) if on_cpu else (how.query, None, None, None)
    return Way(at=_places(how), operator=attended, results=results)


# ---- Whole samples -----------------------------------------------------------------------------------------


@rule_of_rows(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
    "_scaled_dot_product_flash_attention_for_cpu_backward",
    first=True,
)
def _of_samples(call: RuleCall) -> Way | None:
    """Attention of samples in the first dimension; with dropout, which the kernel draws, it is gathered."""
    if call["dropout_p"]:
        return None
    placement, at = call.placement, everywhere(call, call.placement)
    for name in ("attn_mask", "attn_bias"):
        bias = call.values.get(name)
        if type(bias) is TensorLayout and (len(bias.shape) != 4 or bias.shape[0] != placement.total * placement.outer):
            if len(bias.shape) == 4 and bias.shape[0] != 1:
                return None
            at[name] = None
    is_backward = call.name.endswith("_backward")
    return Way(at=at, results=(placement,) * 3 if is_backward else (placement, placement, *[None] * 12))


@procedure("_fused_sdp_choice")
def _sdp_choice(operator: Any, arguments: Any, options: Any) -> Any:
    """torch's choice of a kernel, which looks at shapes, types and whether gradients are needed."""
    query = arguments[0]
    at = query._cell.layout.placement if type(query) is Rows and NOW.context.exchanges else None
    if type(at) is Placement and at.dim == 2 and query.device.type != "cpu":  # its positions are the rows
        if arguments[4] if len(arguments) > 4 else options.get("dropout_p", 0.0):
            raise refused("the dropout of attention on a GPU", "set that of attention to 0")
        return EFFICIENT if query.shape[-1] % 8 == 0 else 0

    def as_is(value: Any) -> Any:
        if type(value) is not Rows:
            return value
        layout = value._cell.layout
        plain = torch.empty_strided((1, *layout.shape[1:]), layout.stride, dtype=layout.dtype, device=layout.device)
        return plain.requires_grad_(value.requires_grad)

    return operator(*map(as_is, arguments), **{name: as_is(value) for name, value in options.items()})
