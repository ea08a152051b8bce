"""Tests of the native engine's memory, and of its state's equality on all processes."""

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from grappe import Arrays, Task, engines
from grappe.checkpoint.initial import built
from grappe.data.loader import training_loader
from grappe.engines.base import EngineSetup
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan
from tests.processes import Pool

WIDTH, DEPTH = 64, 4
UNIT_BYTES = 4 * (WIDTH * WIDTH + WIDTH)


class Wide(Task):
    """Equal units, so that bytes can be counted by hand."""

    batch_size: int = 8

    def model(self) -> nn.Module:
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)))

    def data(self, split: str, folder: Path) -> Arrays:
        generator = torch.Generator().manual_seed(1)
        return Arrays(torch.randn(16, WIDTH, generator=generator), torch.randn(16, WIDTH, generator=generator))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square()

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters)

    def units(self, model: nn.Sequential) -> list[nn.Module]:
        return list(model)


def held(process: ProcessRank, rendezvous_folder: Path, text: str) -> dict[str, int]:
    """Bytes that this process holds: parameters after the forward, gradients after the first microbatch."""
    plan = Plan.parse(text)
    world = join(plan, process, rendezvous_folder)
    task = Wide()
    loader = training_loader(task, task.data("train", Path()), plan, world)
    engine = engines.check(plan)(EngineSetup(task=task, plan=plan, world=world, weights=built(task), total_steps=2))
    found: dict[str, int] = {}
    model = engine._model.module
    engine.train(loader.batches(0, 1), lambda result: False)  # lazily made state exists from here on

    calls = []

    def watch(module: nn.Module, *rest: object) -> None:
        calls.append(module)
        if len(calls) == 2:  # the second microbatch's forward begins
            found["gradients"] = gradient_bytes(model)

    handle = model.register_forward_pre_hook(watch)
    last = model[-1].register_forward_hook(
        lambda *_: found.update(parameters=parameter_bytes(model)),
        prepend=True,  # before FSDP2 gives the last unit's parameters back
    )
    engine.train(loader.batches(1, 2), lambda result: False)
    handle.remove()
    last.remove()
    found["optimizer"] = sum(
        bytes_of(value)
        for state in engine._step_optimizer._optimizer.state.values()
        for value in state.values()
        if isinstance(value, torch.Tensor) and value.dim()
    )
    engine.close()
    world.leave()
    return found


def bytes_of(tensor: torch.Tensor) -> int:
    local = tensor._local_tensor if hasattr(tensor, "_local_tensor") else tensor
    return local.numel() * local.element_size()


def parameter_bytes(model: nn.Module) -> int:
    return sum(bytes_of(parameter) for parameter in model.parameters())


def gradient_bytes(model: nn.Module) -> int:
    """Gradients wherever FSDP2 keeps them: reduced ones on the parameters, unreduced ones beside."""
    found: dict[int, torch.Tensor] = {}  # since torch 2.15 two names have the same tensor
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = module._get_fsdp_state()
            # torch 2.11 has one group for each module, or none.
            for group in getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]:
                for one in group.fsdp_params if group is not None else ():
                    unsharded = getattr(one, "_unsharded_param", None)
                    grads = [one.sharded_param.grad, one.unsharded_accumulated_grad]
                    grads.append(unsharded.grad if unsharded is not None else None)
                    found |= {id(grad): grad for grad in grads if grad is not None}
    return sum(bytes_of(grad) for grad in found.values())


@pytest.mark.parametrize(
    ("zero", "parameters", "gradients"),
    [
        (1, DEPTH * UNIT_BYTES, DEPTH * UNIT_BYTES),
        (2, DEPTH * UNIT_BYTES, DEPTH * UNIT_BYTES // 2),
        # One unit at a time is whole; the others are halves.
        (3, UNIT_BYTES + (DEPTH - 1) * UNIT_BYTES // 2, DEPTH * UNIT_BYTES // 2),
    ],
)
def test_zero_stages_hold_what_they_say(pool: Pool, zero: int, parameters: int, gradients: int) -> None:
    for found in pool.run(f"{__name__}:held", 2, f"shard=2,zero={zero},microbatches=2"):
        assert found["optimizer"] == 2 * DEPTH * UNIT_BYTES // 2, "two moments, half of each"
        assert found["parameters"] == parameters
        assert found["gradients"] == gradients
