"""Tensor parallelism: splits the modules that the task, or a model of transformers, names over the tensor axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from grappe.data.whole_batch_draws import enter_split_layers, leave_split_layers
from grappe.errors import PlanError
from grappe.launch.world import World
from grappe.parallel.materialise import shared_parameters
from grappe.plan import Plan
from grappe.private_api import transformers
from grappe.task import Task

STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    **dict.fromkeys(("colwise_gather_output", "colwise_rep"), lambda: ColwiseParallel(output_layouts=Replicate())),
    **dict.fromkeys(
        ("embedding_rowwise", "rowwise_split_input", "rowwise_rep"), lambda: RowwiseParallel(input_layouts=Replicate())
    ),
}
"""By transformers' words for how a module is split."""


class SplitOutputs(ParallelStyle):
    """Splits the outputs of an nn.Linear, or the output channels of an nn.Conv2d, and gathers them.

    Inputs and outputs are whole on every process, so that any module may follow.

    Raises:
        PlanError: the outputs do not divide, or the module computes something else: a subclass with a `forward` of its
            own, a convolution with groups or another padding than zeros.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        layer: Any = module
        if not _is_linear(module) and not _is_plain_convolution(module):
            raise PlanError(
                f"tensor={device_mesh.size()}: {module} is neither an nn.Linear nor an nn.Conv2d without groups that "
                "pads zeros, with their own forward(): take it out of the tensor_plan()"
            )
        outputs, size = len(layer.weight), device_mesh.size()
        if outputs % size:
            raise PlanError(
                f"tensor={size}: {module} has {outputs} outputs, which {size} processes cannot share: take a divisor"
            )
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter, device_mesh, [Shard(0)], src_data_rank=self.src_data_rank)
            module.register_parameter(name, nn.Parameter(part, requires_grad=parameter.requires_grad))
        linear = _is_linear(module)
        dim = -1 if linear else 1

        def forward(inputs: Tensor) -> Tensor:
            # Each process has the part of the inputs' gradient that comes from its own outputs.
            copied = DTensor.from_local(inputs, device_mesh, [Replicate()], run_check=False)
            local, weight = copied.to_local(grad_placements=[Partial()]), layer.weight.to_local()
            bias = None if layer.bias is None else layer.bias.to_local()
            if linear:
                output = F.linear(local, weight, bias)
            else:
                output = F.conv2d(local, weight, bias, layer.stride, layer.padding, layer.dilation)
            parts = DTensor.from_local(output, device_mesh, [Shard(dim)], run_check=False)
            return parts.redistribute(placements=[Replicate()]).to_local()

        layer.forward = forward
        return module


class _Announced(ParallelStyle):
    """A style that tells whole_batch_draws where the activations have a part of their columns, and where all again."""

    def __init__(self, style: ParallelStyle) -> None:
        super().__init__()
        self._style = style

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        style: Any = self._style
        if isinstance(style, RowwiseParallel) and Shard(-1) in style.input_layouts:
            module.register_forward_pre_hook(lambda *_: leave_split_layers())
        module = parallelize_module(module, device_mesh, style, src_data_rank=self.src_data_rank)
        if isinstance(style, ColwiseParallel) and Shard(-1) in style.output_layouts:
            rank, processes = device_mesh.get_local_rank(), device_mesh.size()

            def entered(_: nn.Module, inputs: Any, output: Any) -> None:
                if not isinstance(output, DTensor):
                    enter_split_layers(output, rank, processes)

            module.register_forward_hook(entered)
        return module


def split_convolutions(model: nn.Module) -> dict[str, ParallelStyle]:
    """Returns the styles that split the channels of each convolution without groups, by name."""
    return {name: SplitOutputs() for name, module in model.named_modules() if _is_plain_convolution(module)}


def _is_linear(module: nn.Module) -> bool:
    return type(module).forward is nn.Linear.forward


def _is_plain_convolution(module: Any) -> bool:
    """Returns whether it computes what F.conv2d does: no subclass that standardises its weights, say."""
    return type(module).forward is nn.Conv2d.forward and module.groups == 1 and module.padding_mode == "zeros"


def split_tensors(model: nn.Module, task: Task, plan: Plan, world: World) -> None:
    """Splits the model's matrices as `task.tensor_plan` says. Collective over the tensor axis.

    Raises:
        PlanError: neither the task nor its model has a tensor plan, or the model's own cannot be followed.
    """
    styles = tensor_styles(model, task, plan)
    assert world.mesh is not None
    split = any(isinstance(style, SplitOutputs) for style in styles.values())
    if split and plan.shard > 1 and torch.__version__.startswith("2.8."):
        raise PlanError(
            f"plan: {plan}: torch 2.8 shards layers whose outputs are split wrongly: use torch 2.9 or newer, or "
            "replicate= in place of shard="
        )
    modules = dict(model.named_modules())
    for name, own_style in styles.items():
        style = _Announced(own_style) if plan.draws_whole_batches else own_style
        # Under torch 2.8 a dotted name also styles a module of the outermost that has the name's last part.
        if name in modules:
            parallelize_module(modules[name], world.mesh["tensor"], style)
        else:
            parallelize_module(model, world.mesh["tensor"], {name: style})


def tensor_styles(model: nn.Module, task: Task, plan: Plan) -> dict[str, ParallelStyle]:
    """Returns how each module is split, by its name or a pattern: as the task says, else as its model does.

    Raises:
        PlanError: neither the task nor its model has a tensor plan, or the model's own cannot be followed.
    """
    styles = dict(task.tensor_plan(model))
    for name, part in transformers.models(model).items() if not styles else ():
        styles |= _styles(part, plan, model, f"{name}." if name else "")
    if not styles:
        raise PlanError(
            f"tensor={plan.tensor}: {type(task).__name__} does not define how its model "
            "is split: give it a tensor_plan() (see grappe/tasks/pysource.py), or use shard= instead"
        )
    return styles


def _styles(part: Any, plan: Plan, model: nn.Module, prefix: str) -> dict[str, ParallelStyle]:
    """Returns the styles that a transformers model declares; a parameter that two modules share stays whole."""
    words, where = transformers.tensor_styles(part), f"tensor={plan.tensor}: {type(part).__name__}"
    if not words:
        raise PlanError(
            f"{where} has no tensor plan in transformers: give the task a tensor_plan(), or use shard= instead"
        )
    for name in ("num_attention_heads", "num_key_value_heads"):
        heads = getattr(part.config, name, None)
        if isinstance(heads, int) and heads % plan.tensor:
            raise PlanError(f"{where} has {name}={heads}, which {plan.tensor} processes cannot share: take a divisor")
    shared = shared_parameters(model)
    styles = {}
    for name, word in words.items():
        module = part.get_submodule(name)
        make = STYLES.get(word) if isinstance(module, nn.Linear | nn.Embedding) else None
        if make is None:
            raise PlanError(
                f"{where}: {prefix}{name}, of {type(module).__module__}.{type(module).__name__}, is split as "
                f"'{word}' in transformers, which is not known here: give the task a tensor_plan(), or use shard="
            )
        if not any(id(parameter) in shared for parameter in module.parameters()):
            styles[f"{prefix}{name}"] = make()
    return styles
