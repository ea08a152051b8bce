"""Applies a plan's keys to the models of a script that knows no plan: precision, layout, memory, compilation, shards.

The rehearsal finds the models: the modules that a training step calls from outside of any other. A model is named by
its class and by the numbers of its parameters among the optimizers', which are the same in every process.

Shapes: a process's slice of b rows, in a batch of N rows; pieces of it for microbatches.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.data.batch import BatchRows, InModel, stored_in
from grappe.data.collate import in_float64
from grappe.data.sampling import cut
from grappe.data.whole_batch_draws import torchs_generator, whole_batch_draws
from grappe.errors import TaskError
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import BatchNormBase, tree_flatten, tree_map, tree_unflatten
from grappe.step.precision import LossScale, set_gpu_arithmetic
from grappe.verbs.launch.interception import PLANS_FORWARD, alive, modules_alive, parameters_of, place_of

TRIED = {
    "channels_last": 1e-3,
    "precision": 1e-3,
    "recompute": 1e-4,
    "compile": 1e-3,
    "microbatches": 1e-4,
    "shard": 1e-4,
}
"""Keys in the order in which they are applied; |gradient - plain one| / |plain one| of the first batch that each may
make, in the precision of its own."""
ROUNDING = {"fp32": 1e-3, "fp64": 1e-3, "tf32": 1e-2, "fp16": 5e-2, "bf16": 2e-1}
"""The same for each precision."""
REHEARSED_SCALE = 2.0**10
"""Loss scale of a rehearsal, which does not search for the largest."""


class PlanKeys:
    """A plan's keys in a script's models.

    Args:
        models: the names of the models, as `names_called` gives them.
    """

    def __init__(self, plan: Plan, world: World, models: Sequence[str]) -> None:
        self.plan, self._world, self._models = plan, world, models
        self.scale = LossScale(plan.precision)
        self.on = False
        """Whether the keys are applied."""
        self.skipped = False
        """Whether an update of this step was left out, since an fp16 gradient had an infinity."""

    @property
    def names(self) -> list[str]:
        """Lists the plan's keys that change a model, in the order in which they are applied."""
        changed = self.plan.changed_keys()
        return [key for key in TRIED if key in changed]

    def text(self, key: str) -> str:
        """Returns a key as the plan writes it."""
        value = getattr(self.plan, key)
        return key if value is True else f"{key}={value}"

    def of(self, key: str, models: Sequence[str]) -> PlanKeys:
        """Returns one of these keys alone, with `zero` where it shards."""
        plan = dataclasses.replace(Plan(), **{key: getattr(self.plan, key)})
        if key == "shard":
            plan = dataclasses.replace(plan, zero=self.plan.zero)
        trial = PlanKeys(plan, self._world, models)
        trial.scale.value = min(trial.scale.value, REHEARSED_SCALE)
        return trial

    def apply(self, optimizers: Sequence[Optimizer]) -> None:
        """Applies the keys to the models; afterwards the optimizers have the parameters that train. Collective.

        Raises:
            TaskError: a model cannot have a key.
        """
        plan, self.on = self.plan, True
        if not self.names:
            return
        from grappe.parallel.parallelize import prepare_made
        from grappe.parallel.units import repeated_blocks

        if plan.precision != "fp32":
            set_gpu_arithmetic(plan.precision)
        if plan.precision == "fp64":
            torch.set_default_dtype(torch.float64)
        for model in self._models_alive(optimizers):
            before = {each: name for name, each in model.named_parameters()}
            plain = {module for module in model.modules() if "forward" not in vars(module)}
            if plan.precision == "fp64":
                model.to(stored_in(plan)).forward = _taking_float64(model.forward)
            units = [model.get_submodule(name) for name in repeated_blocks(model)]
            # The slices synchronise batch normalisation themselves, as it may be in no model that is called.
            prepare_made(model, units, dataclasses.replace(plan, batchnorm="local"), self._world)
            if plan.microbatches > 1:
                _Pieces(model, plan.microbatches, self._world.device)
            PLANS_FORWARD.update(module for module in plain if "forward" in vars(module))
            after = dict(model.named_parameters())
            for optimizer in optimizers:
                for group in optimizer.param_groups:
                    group["params"] = [after[before[each]] if each in before else each for each in group["params"]]
            old = [each for each in before if after[before[each]] is not each]
            if old and any(each is not before and each is not old for each in gc.get_referrers(*old)):
                raise TaskError(
                    "the script keeps parameters in a variable of its own, which would not be those that shard trains: "
                    "write model.parameters() where it uses them"
                )
        for schedule in alive(LRScheduler) if self.scale.is_dynamic else ():
            schedule.step = _unless(self, schedule.step)  # type: ignore[method-assign]

    def _models_alive(self, optimizers: Sequence[Optimizer]) -> list[nn.Module]:
        """Returns the models in the order of their names; of nested ones with one name the outermost."""
        numbers = _numbers(optimizers)
        named = [(name, module) for module in modules_alive() if (name := _name(module, numbers)) in self._models]
        inner = {id(each) for _, module in named for each in module.modules() if each is not module}
        named = [(name, module) for name, module in named if id(module) not in inner]
        return [module for _, module in sorted(named, key=lambda pair: self._models.index(pair[0]))]

    def batch(self, batch: Any) -> Any:
        """Returns a batch in the models' precision."""
        return in_float64(batch) if self.on and self.plan.precision == "fp64" else batch

    def backward(self, optimizers: Sequence[Optimizer], run: Callable[[float], None], factor: float) -> None:
        """Runs a backward of the loss times `factor`, in fp16 of the scaled loss, and unscales the gradients."""
        if not self.scale.is_dynamic:
            run(factor)
            return
        from grappe.step.clip import backward_scaled

        backward_scaled(self.scale, lambda: parameters_of(optimizers), lambda by: run(factor * by))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Has an optimizer leave out an update whose fp16 gradient has an infinity."""
        if not self.scale.is_dynamic:
            return
        from grappe.step.clip import gradient_norm

        def leave_out(*_: object) -> None:
            parameters = [each for each in parameters_of([optimizer]) if each.grad is not None]
            if self.on and parameters and not torch.isfinite(gradient_norm(parameters)):  # type: ignore[arg-type]
                self.skipped = True
                for each in parameters:
                    each.grad = None

        optimizer.register_step_pre_hook(leave_out)

    def end_step(self) -> None:
        """Counts a step for the loss scale."""
        self.scale.update(self.skipped)
        self.skipped = False


def _taking_float64(forward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *arguments, **options: forward(*in_float64(arguments), **in_float64(options))


def _unless(keys: PlanKeys, step: Callable[..., None]) -> Callable[..., None]:
    return lambda *arguments, **options: None if keys.skipped else step(*arguments, **options)


# ---- Models ------------------------------------------------------------------------------------------------


def _numbers(optimizers: Sequence[Optimizer]) -> dict[int, int]:
    return {id(each): number for number, each in enumerate(parameters_of(optimizers))}


def _name(module: nn.Module, numbers: dict[int, int]) -> str:
    """Names a module by its class and its trained parameters; "": it has none."""
    own = sorted({numbers[id(each)] for each in module.parameters() if id(each) in numbers})
    return f"{type(module).__qualname__}:{','.join(map(str, own))}" if own else ""


@contextlib.contextmanager
def names_called(optimizers: Sequence[Optimizer], names: list[str]) -> Iterator[None]:
    """Context that adds to `names` each trained module that is called from outside of any other."""
    running: list[nn.Module] = []
    called: dict[int, nn.Module] = {}

    def enter(module: nn.Module, _: Any) -> None:
        if not running and torch.is_grad_enabled():
            called[id(module)] = module
        running.append(module)

    def leave(*_: Any) -> None:
        running.pop()

    hooks = (
        nn.modules.module.register_module_forward_pre_hook(enter),
        nn.modules.module.register_module_forward_hook(leave, always_call=True),
    )
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        inner = {id(each) for module in called.values() for each in module.modules() if each is not module}
        numbers = _numbers(optimizers)
        names += filter(None, (_name(module, numbers) for number, module in called.items() if number not in inner))


def gathered(tensor: Tensor) -> Tensor:
    """Returns the whole of a tensor that may be sharded."""
    if type(tensor) in (Tensor, nn.Parameter):
        return tensor
    from grappe.checkpoint import weights  # imports torch.distributed.tensor, a third of a rehearsal's imports

    return weights.gathered(tensor)


def wide(tensor: Tensor) -> NDArray[Any]:
    """Returns a tensor that is saved as an array, which has no bfloat16: no line of the script reads it."""
    tensor = tensor.detach().cpu()
    return np.asarray((tensor.double() if tensor.is_floating_point() else tensor).numpy())


class _Pieces:
    """The forward of a model, in pieces of the rows, of which backward keeps one piece's activations at a time.

    The output is that of all rows: the script's loss does not see the pieces. Each piece draws what one process draws
    for its rows.
    """

    def __init__(self, model: nn.Module, number: int, device: torch.device) -> None:
        self._name, self._number, self._device = type(model).__name__, number, device
        if any(isinstance(module, BatchNormBase) and module.training for module in model.modules()):
            raise TaskError(f"{self._name} has batch normalisation, whose statistics would be those of a microbatch")
        from grappe.parallel.activation_checkpointing import checkpoint_activations

        checkpoint_activations([model], Plan(recompute=True))
        self._forward, model.forward = model.forward, self

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        place = InModel.place
        leaves, form = tree_flatten((arguments, options))
        rows = 0 if place is None or not torch.is_grad_enabled() else place.size
        cuts = [n for n, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == rows]
        if place is None or rows < 2 or not cuts:
            return self._forward(*arguments, **options)
        generator = torchs_generator(self._device)
        start = generator.get_state()
        outputs, form_of_output = [], form
        for piece in range(min(self._number, rows)):
            first, last = cut(rows, min(self._number, rows), piece)
            generator.set_state(start)  # each piece draws for the whole batch, and keeps its rows
            with whole_batch_draws(BatchRows(place.first + first, last - first, place.of), others_alike=True):
                taken = [leaf[first:last] if number in cuts else leaf for number, leaf in enumerate(leaves)]
                own_arguments, own_options = tree_unflatten(taken, form)
                output, form_of_output = tree_flatten(self._forward(*own_arguments, **own_options))
            if not all(isinstance(leaf, Tensor) and leaf.dim() and len(leaf) == last - first for leaf in output):
                raise TaskError(f"{self._name} returns something without a row for each sample")
            outputs.append(output)
        return tree_unflatten([torch.cat(parts) for parts in zip(*outputs, strict=True)], form_of_output)


# ---- Shards ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def files_shared(world: World, check: Callable[[Any, str], Any]) -> Iterator[None]:
    """Context in which process 0's files are all processes': sharded tensors are whole in them, and cut when loaded.

    A load waits for the saves before it. Collective, as the whole script is.

    Args:
        check: returns what shall be saved at a place of the script, for what the script saves there.
    """
    from torch.distributed.tensor import DTensor, distribute_tensor

    save, load, fill = torch.save, torch.load, nn.Module.load_state_dict
    is_saved = False

    def saved(value: Any, *arguments: Any, **options: Any) -> None:
        nonlocal is_saved
        save(check(tree_map(gathered, value), place_of(sys._getframe(1))), *arguments, **options)
        is_saved = True

    def loaded(*arguments: Any, **options: Any) -> Any:
        nonlocal is_saved
        if is_saved:
            is_saved = False
            world.barrier()
        return load(*arguments, **options)

    def filled(module: nn.Module, state: Any, *arguments: Any, **options: Any) -> Any:
        own = dict(module.named_parameters())
        shards = {
            name: distribute_tensor(value, own[name].device_mesh, own[name].placements)  # type: ignore[union-attr]
            for name, value in state.items()
            if isinstance(own.get(name), DTensor) and not isinstance(value, DTensor)
        }
        return fill(module, {**state, **shards} if shards else state, *arguments, **options)

    torch.save, torch.load, nn.Module.load_state_dict = saved, loaded, filled  # type: ignore
    try:
        yield
    finally:
        torch.save, torch.load, nn.Module.load_state_dict = save, load, fill  # type: ignore
