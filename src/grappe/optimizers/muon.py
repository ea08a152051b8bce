"""Muon: momentum made orthogonal, for matrices; AdamW for all other parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grappe.checkpoint.weights import gathered
from grappe.errors import TaskError
from grappe.optimizers.common import GroupOptimizer, adam_direction, check, check_below_one, local_gradient
from grappe.private_api.torch import is_dtensor, local_shape_and_offset
from grappe.step.clip import local_part

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
TINY = 1e-7
SCALES: dict[str, Callable[[int, int], float]] = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
    "spectral_unclamped": lambda rows, columns: math.sqrt(rows / columns),
}
"""The factor of an orthogonal update, by the name that torch.optim.Muon gives it too."""


class Muon(GroupOptimizer):
    """Momentum orthogonalised by Newton and Schulz's iteration.

    For each matrix W with gradient G, learning rate lr, weight decay b, momentum m::

        B = m B + (1 - m) G
        U = (1 - m) G + m B      with Nesterov's momentum, else B
        W = (1 - lr b) W - lr s orthogonal(U)

    orthogonal(U) is U with all singular values near 1; s is sqrt(max(1, rows / columns)), or with
    adjust_lr_fn="match_rms_adamw" 0.2 sqrt(max(rows, columns)), with "spectral_unclamped" sqrt(rows / columns). A
    parameter of more than two dimensions, such as a convolution's, is taken as a matrix [first, all others]. What has
    fewer than two dimensions, and what a pattern of `rest` names (embeddings and the last layer, usually), is updated
    by AdamW with `rest_lr`.

    If a matrix is sharded, its momentum is gathered, and every process runs the iteration on the whole matrix,
    in float32: on parts, or in bfloat16, other plans would learn other weights.

    Args:
        params: named parameters, or groups. A group with `muon` True or False is taken as it is; others are split.
        rest: patterns of the names of parameters that are updated by AdamW.

    Sources: Jordan et al. 2024, kellerjordan.github.io/posts/muon; "match_rms_adamw": Liu et al. 2025,
    arXiv:2502.16982; "spectral_unclamped": Bernstein 2025, jeremybernste.in/writing/deriving-muon. torch.optim.Muon is
    the same, in bfloat16 and for two dimensions only.

    Raises:
        TaskError: a number is out of its range; or a pattern matches nothing.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.0,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] = "original",
        rest: Sequence[str] = (),
        rest_lr: float = 3e-4,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
    ) -> None:
        check("Muon", lr=lr, weight_decay=weight_decay, ns_steps=ns_steps, rest_lr=rest_lr, eps=eps)
        check_below_one("Muon", momentum=momentum, beta1=betas[0], beta2=betas[1])
        if adjust_lr_fn not in SCALES:
            raise TaskError(f"Muon(adjust_lr_fn={adjust_lr_fn!r}): it is {' or '.join(SCALES)}")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "nesterov": nesterov,
            "weight_decay": weight_decay,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "eps": eps,
        }
        super().__init__(list(_split(params, rest, rest_lr)), defaults)

    def move(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        for parameter in parameters:
            local_part(parameter).mul_(1 - group["lr"] * group["weight_decay"])
            if group["muon"]:
                self._orthogonal(parameter, group)
            else:
                direction = adam_direction(parameter, self.state[parameter], group)
                local_part(parameter).sub_(direction, alpha=group["lr"])

    def _orthogonal(self, parameter: nn.Parameter, group: Mapping[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter)
        buffer, gradient = local_part(state["momentum_buffer"]), local_gradient(parameter)
        buffer.lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        matrix = _gathered(update, parameter).flatten(1)
        scale = SCALES[group["adjust_lr_fn"]](*matrix.shape)
        update = orthogonal(matrix, group["ns_steps"]).view(parameter.shape)
        local_part(parameter).sub_(_part(update, parameter), alpha=group["lr"] * scale)


def orthogonal(matrix: Tensor, steps: int) -> Tensor:
    """Brings all singular values of a matrix [m, n] to about 1 (0.7 to 1.2), at least in float32.

    The quintic iteration of Jordan et al. 2024: X = a X + (b X X' + c (X X')^2) X, from X = matrix / |matrix|.
    """
    a, b, c = COEFFICIENTS
    x = matrix.to(torch.promote_types(matrix.dtype, torch.float32))
    if tall := len(x) > x.shape[1]:
        x = x.T
    x = x / x.norm().clamp_min(TINY)
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return (x.T if tall else x).contiguous()


def _gathered(part: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns the whole tensor from this process's `part`, sharded as `parameter` is. Collective where sharded."""
    if not is_dtensor(parameter):
        return part
    mesh, placed = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return gathered(parameter.from_local(part, mesh, placed, run_check=False, shape=shape, stride=stride))


def _part(tensor: Tensor, parameter: nn.Parameter) -> Tensor:
    """Returns this process's part of a tensor, sharded as `parameter` is."""
    if not is_dtensor(parameter):
        return tensor
    shape, offset = local_shape_and_offset(parameter)
    return tensor[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))]


def _split(params: Any, rest: Sequence[str], rest_lr: float) -> Iterator[dict[str, Any]]:
    """Groups of matrices and groups of what AdamW updates."""
    entries = list(params)
    groups = entries if entries and isinstance(entries[0], dict) else [{"params": entries}]
    matched: set[str] = set()
    for group in groups:
        if "muon" in group:
            yield group
            continue
        kinds: dict[bool, list[Any]] = {True: [], False: []}
        for entry in group["params"]:
            name, parameter = entry if isinstance(entry, tuple) else ("", entry)
            patterns = {pattern for pattern in rest if fnmatchcase(name, pattern)}
            matched |= patterns
            kinds[parameter.dim() >= 2 and not patterns].append(entry)
        options = {key: value for key, value in group.items() if key != "params"}
        if kinds[True]:
            yield {**options, "params": kinds[True], "muon": True}
        if kinds[False]:
            yield {"lr": rest_lr, **options, "params": kinds[False], "muon": False}
    if missing := sorted(set(rest) - matched):
        raise TaskError(
            f"Muon(rest=…): no parameter is called {', '.join(missing)}; are the parameters given with their names?"
        )
