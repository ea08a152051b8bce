"""Applies a plan's keys to the models of a script that knows no plan: precision, layout, memory, compilation, shards.

A model is a module with trained parameters that the script calls from outside of any other; it gets the keys at its
first call.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from grappe.checkpoint.weights import gathered
from grappe.data.batch import stored_in
from grappe.data.collate import in_float64
from grappe.errors import TaskError
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import (
    gradient_hooks,
    gradients_handed_over,
    is_dtensor,
    sharded_draws,
    tree_leaves,
    tree_map,
)
from grappe.rows.context import NOW
from grappe.rows.tensor import own_term
from grappe.step.clip import backward_scaled, gradient_norm
from grappe.step.closure import gradients_first, needs_closure
from grappe.step.precision import LossScale, set_gpu_arithmetic
from grappe.training.interception import PLANS_FORWARD, alive, parameters_of, replaced

KEYS = ("precision", "recompute", "channels_last", "compile", "shard", "offload")


class PlanKeys:
    """A plan's keys in a script's models."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self._world = plan, world
        self.names = [key for key in KEYS if key in plan.changed_keys()]
        """The plan's keys that change a model."""
        self.scale = LossScale(plan.precision)
        self.on = False
        """Whether a model has the keys."""
        self.skipped = False
        """Whether the last update was left out, since an fp16 gradient had an infinity."""
        self._prepared = weakref.WeakSet[nn.Module]()
        self.unsaved = ""
        """Why the script's state cannot be saved; "" if it can."""
        if plan.shard > 1:
            self.unsaved = "shard=… cuts its tensors into pieces: replicate=… has checkpoints"
        elif self.scale.is_dynamic:
            self.unsaved = "precision=fp16 leaves out steps by what it sees: take bf16"

    def prepare(
        self, model: nn.Module, optimizers: Sequence[Optimizer], units: Sequence[nn.Module] | None = None
    ) -> None:
        """Applies the keys to a model before its first call; afterwards optimizers have its parameters. Collective.

        Args:
            units: blocks in order, each of which is sharded, recomputed or compiled; None: repeated blocks are found.

        Raises:
            TaskError: the model cannot have a key.
        """
        if not self.names or model in self._prepared:
            return
        trained = set(map(id, parameters_of(optimizers)))
        is_trained = torch.is_grad_enabled() and any(id(each) in trained for each in model.parameters())
        if not is_trained and self.plan.precision != "fp64":  # which every module needs, as its batches are in it
            return
        if is_trained and not self.on:
            self.on = True
            for schedule in alive(LRScheduler) if self.scale.is_dynamic else ():
                self.leave_out(schedule)
        self._prepared.update(model.modules())
        plain = {module for module in model.modules() if "forward" not in vars(module)}
        before = {each: name for name, each in model.named_parameters()}
        self._apply(model, units)
        PLANS_FORWARD.update(module for module in plain if "forward" in vars(module))
        after = dict(model.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["params"] = [after[before[each]] if each in before else each for each in group["params"]]
        old = [each for each in before if after[before[each]] is not each]
        if any(any(gradient_hooks(each)) for each in old):
            raise TaskError("a hook on a parameter's gradient gets no gradient under shard: leave shard out")
        renewed = {id(each): after[before[each]] for each in old}
        for owner in gc.get_referrers(*old) if old else ():
            if owner is not before and owner is not old and not _rebound(owner, renewed):
                raise TaskError(
                    f"the script keeps parameters in {_variable(owner, renewed)}, which would not be those that shard "
                    "trains: write model.parameters() where it uses them, or del of what a loop has left"
                )

    def _apply(self, model: nn.Module, units: Sequence[nn.Module] | None) -> None:
        from grappe.parallel.parallelize import prepare_made
        from grappe.parallel.shard import shard
        from grappe.parallel.units import repeated_blocks

        plan = self.plan
        if plan.precision != "fp32":
            set_gpu_arithmetic(plan.precision)
        if plan.precision == "fp64":
            torch.set_default_dtype(torch.float64)
            forward = model.to(stored_in(plan)).forward
            model.forward = lambda *arguments, **options: forward(*in_float64(arguments), **in_float64(options))
        if units is None:
            units = [model.get_submodule(name) for name in repeated_blocks(model)]
        # Batch normalisation has a rule for rows. So have gradients: each process's are terms of a sum.
        keys = {key: getattr(plan, key) for key in ("precision", "recompute", "channels_last", "compile")}
        if plan.uses_fsdp:
            keys["channels_last"] = False  # FSDP2 refuses parameters that are not contiguous
        prepare_made(model, units, dataclasses.replace(Plan(), **keys), self._world)
        if plan.uses_fsdp:
            shard(model, units, plan, self._world)

    def batch(self, batch: Any) -> Any:
        """Returns a batch in the models' precision."""
        return in_float64(batch) if self.plan.precision == "fp64" else batch

    def backward(self, optimizers: Sequence[Optimizer], run: Callable[[float], None]) -> None:
        """Runs a backward, in fp16 of the scaled loss, and unscales the gradients."""
        backward_scaled(self.scale, lambda: parameters_of(optimizers), run)

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Has an optimizer leave out an update whose fp16 gradient has an infinity.

        Raises:
            TaskError: it computes its gradients in a closure, after it was asked whether they are finite.
        """
        if not self.scale.is_dynamic:
            return
        if needs_closure(optimizer) and not gradients_first(optimizer):
            raise TaskError(f"{type(optimizer).__name__} computes its gradients in a closure: leave precision=fp16 out")

        def check(*_: object) -> None:
            parameters = [each for each in parameters_of([optimizer]) if each.grad is not None]
            self.skipped = bool(parameters) and not torch.isfinite(gradient_norm(parameters))  # type: ignore[arg-type]
            if self.skipped:
                for each in parameters:
                    each.grad = None

        optimizer.register_step_pre_hook(check)
        optimizer.register_step_post_hook(lambda *_: self.scale.update(self.skipped))

    def leave_out(self, schedule: LRScheduler) -> None:
        """Has a schedule's step do nothing after an update that was left out."""
        step = schedule.step
        schedule.step = lambda *arguments, **options: None if self.skipped else step(*arguments, **options)  # type: ignore[method-assign]


def _rebound(owner: Any, renewed: Mapping[int, Tensor]) -> bool:
    """Has a list's or a dictionary's items, and so a script's global variables, be the parameters of a shard."""
    if not isinstance(owner, list | dict) or (isinstance(owner, dict) and any(id(key) in renewed for key in owner)):
        return False
    for key, value in [*(owner.items() if isinstance(owner, dict) else enumerate(owner))]:
        if id(value) in renewed:
            owner[key] = renewed[id(value)]
    return True


def _variable(owner: Any, renewed: Mapping[int, Tensor]) -> str:
    """Names the variable of a script that keeps parameters."""
    if isinstance(owner, types.FrameType):
        name = next((name for name, each in owner.f_locals.items() if id(each) in renewed), "a variable")
        return f"{name} ({Path(owner.f_code.co_filename).name}, {owner.f_code.co_name}())"
    names = vars(sys.modules["__main__"])
    return next((name for name, each in names.items() if each is owner), f"a {type(owner).__name__} of its own")


# ---- Shards ------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def gradients_summed(world: World) -> Iterator[None]:
    """Context of a script whose models are sharded: gradients are terms of a sum."""
    with gradients_handed_over(lambda gradient: own_term(gradient, world.data_size)):
        yield


@contextlib.contextmanager
def shards_whole() -> Iterator[None]:
    """Context of a script whose models are sharded: its files hold whole tensors."""
    from torch.distributed.tensor import distribute_tensor

    def saving(save: Callable[..., None]) -> Callable[..., None]:
        return lambda value, *arguments, **options: save(tree_map(gathered, value), *arguments, **options)

    def filling(fill: Callable[..., Any]) -> Callable[..., Any]:
        def filled(module: nn.Module, state: Any, *arguments: Any, **options: Any) -> Any:
            own = dict(module.named_parameters())
            shards = {
                name: distribute_tensor(value, own[name].device_mesh, own[name].placements)  # type: ignore[union-attr]
                for name, value in state.items()
                if is_dtensor(own.get(name)) and not is_dtensor(value)
            }
            return fill(module, {**state, **shards} if shards else state, *arguments, **options)

        return filled

    def restoring(restore: Callable[..., Any]) -> Callable[..., Any]:
        def restored(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            made = restore(optimizer, *arguments, **options)
            for own, state in optimizer.state.items():
                if not is_dtensor(own):
                    continue
                for name, value in state.items():
                    if type(value) is Tensor and value.shape == own.shape:
                        state[name] = distribute_tensor(value, own.device_mesh, own.placements, src_data_rank=None)
            return made

        return restored

    def once(plain: Callable[..., Any], place: int) -> Callable[..., Any]:
        def derive(*arguments: Any, **options: Any) -> Any:
            if options.get("create_graph") or any(arguments[place : place + 1]):
                raise TaskError(
                    f"{NOW.context.line()} takes a derivative of a derivative, for which shard has freed the weights: "
                    "use replicate instead"
                )
            return plain(*arguments, **options)

        return derive

    def drawn(operator: Any, arguments: Any, options: Any) -> Any:
        like = next(each for each in tree_leaves((arguments, options)) if is_dtensor(each))

        def shards(each: Any) -> Any:
            is_like = isinstance(each, Tensor) and each.shape == like.shape
            return distribute_tensor(each, like.device_mesh, like.placements, src_data_rank=None) if is_like else each

        every, rest = tree_map(
            lambda each: gathered(each).clone() if each is like else gathered(each), (arguments, options)
        )
        made = tree_map(shards, operator(*every, **rest))
        if operator.overloadpacket.__name__.endswith("_"):
            like.to_local().copy_(made.to_local())
            return like
        return made

    with (
        replaced(
            (torch, "save", saving),
            (nn.Module, "load_state_dict", filling),
            (Optimizer, "load_state_dict", restoring),
            (torch.autograd, "backward", lambda plain: once(plain, 3)),
            (torch.autograd, "grad", lambda plain: once(plain, 4)),
        ),
        sharded_draws(drawn),
    ):
        yield
