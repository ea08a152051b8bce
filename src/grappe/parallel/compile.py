"""Compilation: torch.compile on each unit, in place; with CUDA graphs, which replay a unit's kernels in one launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from grappe.plan import Plan
from grappe.private_api.torch import tree_map
from grappe.private_api.torch_inductor import graphs_left_out

Forward = Callable[[Any], Any]

WITHOUT_GRAPHS: dict[str, Callable[[Plan], bool]] = {
    "microbatches": lambda plan: plan.microbatches > 1,
    "recompute": lambda plan: bool(plan.recompute),
    "shard": lambda plan: plan.shard > 1,
    "tensor": lambda plan: plan.tensor > 1,
    "pipeline": lambda plan: plan.pipeline > 1,
    "offload": lambda plan: plan.offload != "none",
    "batchnorm": lambda plan: plan.batchnorm == "sync",
}
"""Keys under which a unit runs several times a step, sends messages, or has parameters at changing addresses."""


def compile_units(units: Sequence[nn.Module], plan: Plan) -> None:
    """Compiles each unit separately: equal blocks are compiled once, and names stay the same."""
    for unit in units:
        unit.compile(mode="reduce-overhead" if plan.cuda_graphs else None)


def replaying(forward: Forward, *, keeps: bool) -> Forward:
    """Returns a `forward` with CUDA graphs, each call of which may use the memory of the last call's graphs again.

    Without `torch.compiler.cudagraph_mark_step_begin`, torch would take each unit for a step of its own, and record a
    graph again for each order in which it finds the units' outputs alive (torch/_inductor/cudagraph_trees.py).

    Args:
        keeps: whether an output may be used after the next call, as a metric's may be: then the output is copied, since
            a unit's output is in the memory of its graph.
    """

    def replay(inputs: Any) -> Any:
        torch.compiler.cudagraph_mark_step_begin()
        output = forward(inputs)
        if not keeps:
            return output
        return tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, output)

    return replay


def unsupported_reason(plan: Plan) -> str | None:
    """Returns the reason why CUDA graphs, which the plan asks for, do not work under it; None: they work."""
    if not plan.compile:
        return "cuda_graphs replays the kernels that compile makes: add compile"
    for key, used in WITHOUT_GRAPHS.items():
        if used(plan):
            value = getattr(plan, key)
            return (
                f"cuda_graphs with {key}={value} is not supported: a graph's kernels are replayed once a "
                "step, at the same addresses, without messages between them; leave cuda_graphs out"
            )
    return None


def remarks(plan: Plan) -> Sequence[str]:
    """Returns a remark if compiled functions of this process run without the CUDA graph that the plan asks for."""
    left_out = graphs_left_out() if plan.cuda_graphs else 0
    return (f"{left_out} compiled functions without a CUDA graph; TORCH_LOGS=cudagraphs says why",) * bool(left_out)
