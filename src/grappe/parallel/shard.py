"""Sharding: FSDP2's fully_shard over the shard and replicate axes, for ZeRO stages 1 to 3."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from grappe.errors import TaskError
from grappe.launch.world import World, gather_into
from grappe.parallel.materialise import untied
from grappe.plan import Plan
from grappe.private_api.torch import is_sharded, read_numbers_of_all_parts
from grappe.step.clip import local_part
from grappe.step.exact import tree_sum, wire


def shard(model: nn.Module, units: Sequence[nn.Module], plan: Plan, world: World) -> None:
    """Shards each unit, then the root's remaining parameters, which include tied units' parameters. Collective.

    Gradients are summed, never averaged.
    """
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    pin = world.device.type == "cuda"
    policy = CPUOffloadPolicy(pin_memory=pin) if plan.offload == "cpu" else OffloadPolicy()
    assert world.mesh is not None
    _refuse(model)
    read_numbers_of_all_parts()
    mesh = world.sharded or (world.mesh["replicate", "shard"] if plan.replicate > 1 else world.mesh["shard"])
    scalars = set(_scalars(model))
    apart, several = set(scalars), list[nn.Module]()
    for module in [*untied(model, units), model]:
        several += [*_of_other_types(module, apart), module]
        apart.update(module.parameters())
    for module in several:
        if type(module).forward is nn.Module.forward:  # before which FSDP2 would gather
            raise TaskError(
                f"{type(module).__name__} has no forward of its own, before which shard= gathers parameters: make it "
                "an nn.Module whose forward calls its parts, or use replicate="
            )
        fully_shard(
            module, mesh=mesh, reshard_after_forward=plan.zero == 3, offload_policy=policy, ignored_params=scalars
        )
    for module in model.modules():
        if is_sharded(module):
            # grappe divides by the global count once; a mean over processes would weigh uneven slices wrongly.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters = _leave_apart  # type: ignore[method-assign]


def _refuse(model: nn.Module) -> None:
    """Raises TaskError for what FSDP2 cannot cut: scripted modules, and embeddings with sparse gradients."""
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise TaskError(
                f"{name} is made by torch.jit.script, which shard= cannot cut into pieces: give model() the module as "
                "it is, or use replicate="
            )
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            raise TaskError(
                f"{name} has sparse gradients, which shard= cannot cut into pieces: make it with sparse=False, or use "
                "replicate="
            )


def _of_other_types(unit: nn.Module, apart: set[nn.Parameter]) -> list[nn.Module]:
    """Lists a unit's modules whose parameters are of another type than most: FSDP2 reduces one type at once.

    Parameters that are `apart` are gathered by others. A module with parameters of two types is refused.
    """
    own = {
        name: [each for each in module.parameters(recurse=False) if each.requires_grad and each not in apart]
        for name, module in unit.named_modules()
    }
    numbers = Counter[torch.dtype]()
    for parameters in own.values():
        for each in parameters:
            numbers[each.dtype] += each.numel()
    if len(numbers) < 2:
        return []
    usual = numbers.most_common(1)[0][0]
    others = []
    for name, parameters in own.items():
        kinds = {each.dtype for each in parameters}
        if kinds <= {usual}:
            continue
        if len(kinds) > 1 or not name:
            raise TaskError(
                f"{name or type(unit).__name__} has parameters of {' and '.join(sorted(map(str, kinds | {usual})))}, "
                "which shard= cannot gather at once: put those of each type into a module of their own"
            )
        others.append(unit.get_submodule(name))
    return others


def _leave_apart() -> None:
    """Stands for RNNBase.flatten_parameters, which its forward calls for parameters that were gathered.

    On a GPU cuDNN would move them to memory of its own, where FSDP2 never writes the next step's values.
    """


def sum_scalars(model: nn.Module, world: World) -> None:
    """Sums each scalar parameter's gradient over the processes in every backward: FSDP2 takes no scalars.

    They stay whole. Call it when the parameters have their values: meta parameters are replaced.
    """
    group = world.gradient_group
    if group is None:
        return
    for parameter in _scalars(model):
        if parameter.requires_grad:
            parameter.register_hook(functools.partial(_summed, group=group, wire=wire(world)))


def _scalars(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if not parameter.dim()]


def _summed(gradient: Tensor, group: dist.ProcessGroup, wire: torch.device) -> Tensor:
    local = gradient.detach().reshape(1).to(wire)
    everyone = local.new_empty(dist.get_world_size(group))
    gather_into(everyone, local, group)
    # In the order of an exact plan's pieces; those have a power of two.
    total = tree_sum(everyone[:, None]) if len(everyone).bit_count() == 1 else everyone.sum(0, keepdim=True)
    return total.to(gradient.device).reshape(())


def reshard(model: nn.Module) -> None:
    """Frees gathered parameters: with zero=1 and 2 an evaluation, which has no backward, leaves them gathered."""
    for module in model.modules():
        if is_sharded(module):
            module.reshard()


def reduction_switch(model: nn.Module, plan: Plan) -> Callable[[bool], None] | None:
    """Returns a callback for the start of each microbatch (argument: is it the last?); None: every backward may reduce.

    For a model that FSDP2 shards.

    With zero=1, unsharded gradients accumulate and are reduced once a step; with 2 and 3, at each microbatch.
    The all-reduce over replicas always waits for the last microbatch.
    """
    if plan.microbatches == 1:
        return None
    assert is_sharded(model)
    if plan.zero == 1:
        return model.set_requires_gradient_sync
    if plan.replicate * plan.domain > 1:
        return model.set_requires_all_reduce
    return None


class SameParameters:
    """Compares, after each step, which parameters' gradients the processes' backwards have sent, and in which order.

    FSDP2 sends what a process has reached in one message: where another process has reached others of the same size,
    their gradients would be added to these.
    """

    def __init__(self, named: Sequence[tuple[str, nn.Parameter]], world: World) -> None:
        self._world, self._step = world, 0
        self._trace = 0
        self._reached: dict[str, None] = {}
        self._named = named
        self._frozen = list(enumerate(named))
        self._watch()

    def _watch(self) -> None:
        """Watches parameters that were frozen so far."""
        frozen, self._frozen = self._frozen, []
        for number, (name, parameter) in frozen:
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._noting(number, name))
            else:
                self._frozen.append((number, (name, parameter)))

    def _noting(self, number: int, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._trace = hash((self._trace, number))
            self._reached[name] = None

        return note

    def __call__(self) -> None:
        """Compares them after a step's last backward. Collective.

        Raises:
            TaskError: the processes have reached other parameters.
        """
        trace, self._trace = self._trace, 0
        reached, self._reached = self._reached, {}
        self._watch()
        most = torch.tensor((trace, -trace))  # on the CPU: nothing waits for a GPU
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self._world.control)
        if most[0] == -most[1]:
            return
        everyone = self._world.gather(list(reached))
        either = dict.fromkeys(name for names in everyone for name in names)
        name = next((each for each in either if any(each not in names for names in everyone)), next(iter(either)))
        raise TaskError(
            f"{name} has a gradient on some processes, and not on others: forward() takes branches by its data. "
            "Under shard= gradients would be added to those of other parameters: use replicate=, or let every "
            "branch run on every process"
        )


def check_gradients(everyone: list[tuple[int, Mapping[str, float | None]]]) -> None:
    """Raises TaskError where gradients were not summed over the processes.

    Args:
        everyone: of each process, its place among those that shard, and the norm of each parameter's gradient there.
    """
    first: dict[int, Mapping[str, float | None]] = {}
    for place, norms in everyone:
        expected = first.setdefault(place, norms)
        if all(norm is None for norm in norms.values()):
            raise TaskError("domain= found no gradient after the first step: nothing that is trained reached the loss")
        if expected != norms:
            odd = next(name for name, norm in norms.items() if expected.get(name) != norm)
            raise TaskError(
                f"domain= found other gradients of {odd} on processes that hold the same parameter: they were not "
                "summed over the processes. A module that runs torch.distributed itself, or that returns its tensors "
                "in an object of its own, hides them: return tensors, tuples or dictionaries"
            )


class SummedGradients(SameParameters):
    """Compares, after the first step, the gradients of the processes that hold the same parameters, under domain=."""

    def __call__(self) -> None:
        """Compares them after a step's last backward. Collective.

        Raises:
            TaskError: they differ, or there is none: the gradients of parts were not summed.
        """
        self._step += 1
        domain = self._world.domain
        assert domain is not None
        if self._step == 2:
            domain.of_step.update(domain.counted() - self._sent)
            gradients = (local_part(each.grad).nbytes for _, each in self._named if each.grad is not None)
            domain.of_step["gradients", "bytes"] = sum(gradients)
        if self._step > 1:
            return
        self._sent = domain.counted()
        norms = {
            name: None if parameter.grad is None else float(local_part(parameter.grad).double().norm())
            for name, parameter in self._named
        }
        check_gradients(self._world.gather((self._world.coordinates()["shard"][0], norms)))
