"""Private names of torch."""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNormBase
from torch.nn.modules.loss import _Loss as LossBase
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import (
    TreeSpec,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
    treespec_dumps,
    treespec_loads,
)
from torch.utils.data._utils.fetch import _MapDatasetFetcher as MapFetcher

from grappe.private_api import check_torch, private_names
from grappe.private_api.torch_dynamo import is_wrapped

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from typing_extensions import TypeIs

__all__ = [
    "BatchNormBase", "LossBase", "MapFetcher", "TorchDispatchMode", "TreeSpec", "tree_flatten", "tree_leaves",
    "tree_map", "tree_unflatten", "treespec_dumps", "treespec_loads",
]  # fmt: skip
"""Names that other modules import from here."""

SEEN = "2.8 to 2.15"

USED = private_names(
    SEEN,
    {
        "torch": "_C _foreach_add_ _foreach_mul_ _foreach_norm _functorch _ops _subclasses",
        "torch._C": (
            "_current_graph_task_id _disabled_torch_function_impl _DisableTorchDispatch _set_throw_on_mutable_data_ptr "
            "_are_functorch_transforms_active _nn _autograd _len_torch_dispatch_stack "
            "_distributed_c10d _SetExcludeDispatchKeyGuard _dispatch_key_parse _dispatch_tls_is_dispatch_key_excluded "
            "_dispatch_tls_is_dispatch_key_included _dispatch_tls_set_dispatch_key_excluded "
            "_dispatch_tls_set_dispatch_key_included"
        ),
        "torch._C._autograd": "_top_saved_tensors_default_hooks",
        "torch._functorch.eager_transforms": "_wrap_for_grad",
        "torch.distributed.tensor.DTensor._op_dispatcher": "_custom_op_handlers",
        "torch.ops.aten": "_local_scalar_dense",
        "torch._functorch.vmap": "_add_batch_dim",
        "torch._ops": "_HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS _higher_order_ops",
        "torch._ops.OpOverload": "_schema",
        "torch.Tensor": "_backward_hooks _make_wrapper_subclass _post_accumulate_grad_hooks _version",
        "torch.autograd.Variable": "_execution_engine",
        "torch.autograd": "_profiler_enabled",
        "torch.autograd.forward_ad": "_current_level",
        "torch.distributed": "_functional_collectives",
        "torch.distributed.device_mesh": "_mesh_resources",
        "torch.distributed.device_mesh.DeviceMesh": "_flatten",
        "torch.distributed.distributed_c10d": "_get_default_store",
        "torch.distributed.fsdp": "_fully_shard",
        "torch.distributed.fsdp._fully_shard": "_fsdp_param",
        "torch.distributed.pipelining": "_backward",
        "torch.distributed.tensor": "_utils",
        "torch.utils.data": "_utils",
        "torch.utils.data._utils.fetch": "_MapDatasetFetcher",
        "torch.utils.data.dataloader._MultiProcessingDataLoaderIter": "_shutdown_workers",
        "torch.utils.data.dataloader._SingleProcessDataLoaderIter": "_next_index",
        "torch.distributed.tensor.DTensor": "_local_tensor _op_dispatcher",
        "torch.nn.Module": (
            "_apply _backward_hooks _backward_pre_hooks _buffers _load_from_state_dict _modules _parameters"
        ),
        "torch.nn.modules.batchnorm": "_BatchNorm",
        "torch.nn.modules.loss": "_Loss",
        "torch.nn.modules.module": "_global_backward_hooks _global_backward_pre_hooks",
        "torch.nn.modules.rnn": "_VF",
        "torch.optim.Optimizer": "_optimizer_step_post_hooks _optimizer_step_pre_hooks",
        "torch.optim.lr_scheduler": "_schedulers _wrapped_by_lr_sched",
        "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
        "torch.testing": "_internal",
        "torch.utils": "_python_dispatch _pytree",
        "torch.utils._python_dispatch": "_disable_current_modes",
    },
)

if caution := check_torch(torch.__version__, USED):
    warnings.warn(caution, stacklevel=1)

# Gradients as lists. torch.nn.utils.clip_grads_with_norm_ would group them by device and type at each step, and
# sums the norms in float32.
foreach_add_ = torch._foreach_add_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm


def load_from_state_dict(kind: type) -> Callable[..., Any]:
    """Returns the method by which a class of modules loads its parameters and buffers."""
    return kind._load_from_state_dict


MESSAGES = torch.library.Library("c10d", "IMPL")
"""Kernels that are added to torch's messages, as long as this lives."""

run_backward: Callable[..., Any] | None = getattr(
    getattr(torch.autograd.Variable, "_execution_engine", None), "run_backward", None
)
"""The autograd engine's entry, which torch.autograd.backward ends in; None: this torch has none.

torch.autograd.backward takes 35 microseconds to check its arguments.
"""


def wrapper_of(kind: type[Any], shape: Sequence[int], inside: Tensor) -> Any:
    """Makes a tensor of the subclass `kind` without memory of its own, of the type and device of `inside`."""
    return Tensor._make_wrapper_subclass(kind, shape, dtype=inside.dtype, device=inside.device)


wrapper_maker: Callable[..., Any] = Tensor._make_wrapper_subclass
"""Makes a tensor of a subclass without memory of its own, as `wrapper_of`, from arguments in torch's order.

Called for each operator that meets rows, where names for the arguments take 0.5 microseconds.
"""
no_torch_function = torch._C._disabled_torch_function_impl
"""The `__torch_function__` of a subclass whose operators torch shall only dispatch."""
no_subclass_functions: Callable[[], Any] = torch._C.DisableTorchFunctionSubclass
"""Makes a context in which functions of a subclass are torch's."""
FUNCTION_OWNERS = (torch, Tensor, torch.nn.functional, torch._C._nn)
"""Modules in which torch has the functions of tensors."""
TRANSFORM_ENTRIES = (
    (torch._functorch.vmap, torch._functorch.vmap._add_batch_dim.__name__),
    (torch._functorch.eager_transforms, torch._functorch.eager_transforms._wrap_for_grad.__name__),
)
"""Functions of C++ by which torch.func wraps tensors: their first argument is one."""


_are_active: Callable[[], bool] = torch._C._are_functorch_transforms_active


def transforms_active() -> bool:
    """Tells whether a transform of torch.func, or a level of forward-mode derivatives, is active."""
    return torch.autograd.forward_ad._current_level >= 0 or _are_active()


no_transforms: Callable[[], Any] = torch._functorch.pyfunctorch.temporarily_clear_interpreter_stack
"""Makes a context in which no transform of torch.func is active."""


def is_observed() -> bool:
    """Tells whether a transform of torch.func, a mode, or hooks on what autograd saves or modules get are active."""
    modules = torch.nn.modules.module
    return (
        transforms_active()
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
        or bool(modules._global_backward_hooks or modules._global_backward_pre_hooks)
    )


throw_on_pointer: Callable[[Tensor], None] = torch._C._set_throw_on_mutable_data_ptr
"""Has C++ that asks for the memory of a wrapper raise an error, which would otherwise get a null pointer."""
without_torch_dispatch: Callable[[], Any] = torch._C._DisableTorchDispatch
"""Makes a context in which operators change a wrapper's own shape and strides."""


no_modes: Callable[[], Any] = torch.utils._python_dispatch._disable_current_modes
"""Makes a context in which no TorchDispatchMode sees operators."""
COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd
"""The key of operators that are made of others, whose derivatives they have."""
_set_excluded = torch._C._dispatch_tls_set_dispatch_key_excluded
_CONJUGATE, _NEGATIVE = torch._C.DispatchKey.Conjugate, torch._C.DispatchKey.Negative


def resolve_bits() -> None:
    """Has torch resolve conjugate and negative bits inside `__torch_dispatch__`, where it hands them to kernels.

    Those kernels would not look at them. torch sets the keys again when dispatch returns. Takes 0.2 microseconds.
    """
    _set_excluded(_CONJUGATE, False)
    _set_excluded(_NEGATIVE, False)


def in_backward() -> bool:
    """Returns whether autograd computes gradients in this thread."""
    return torch._C._current_graph_task_id() != -1


def operator_schema(operator: Any) -> Any:
    """Returns the schema of an operator: `name`, `overload_name`, `arguments`, `returns`, `is_mutable`."""
    return operator._schema


def gradient_hooks(parameter: Tensor) -> tuple[list[Callable[[Tensor], Any]], list[Callable[[Tensor], Any]]]:
    """Returns a parameter's hooks: those of what a backward adds to its gradient, and those after it was added."""
    added, after = parameter._backward_hooks, parameter._post_accumulate_grad_hooks  # pyrefly: ignore
    return list((added or {}).values()), list((after or {}).values())


def is_hooked(parameter: Tensor, own: Any) -> bool:
    """Tells whether a parameter's gradient has hooks other than `own`, a post-accumulate hook."""
    after = parameter._post_accumulate_grad_hooks  # pyrefly: ignore
    if parameter._backward_hooks:
        return True
    return bool(after) and (len(after) > 1 or next(iter(after.values())) is not own)


def has_backward_hooks(module: nn.Module) -> bool:
    """Tells whether a module's backward has hooks."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def accumulate_gradient(parameter: Tensor, grad: Tensor, *, create_graph: bool = False) -> None:
    """Adds to a parameter's gradient as a backward does, with its hooks; a backward may run already."""
    engine = torch.autograd.Variable._execution_engine
    engine.run_backward((parameter,), (grad,), False, create_graph, (), allow_unreachable=True, accumulate_grad=True)


def leaf_names(tree: Any, *, alone: str) -> tuple[str, ...]:
    """Names the leaves of a nesting, in the order of `tree_leaves`: keys and numbers with dots between, or `alone`."""
    paths = [path for path, _ in tree_flatten_with_path(tree)[0]]
    kinds = ("key", "idx", "name")
    names = ([str(next(getattr(key, kind) for kind in kinds if hasattr(key, kind))) for key in path] for path in paths)
    return tuple(".".join(each) or alone for each in names)


profiler_enabled: Callable[[], bool] = torch.autograd._profiler_enabled
"""Returns whether a profiler records now."""


def unwrapped_step(optimizer: Optimizer) -> tuple[Callable[[Any], Any] | None, bool]:
    """Returns the optimizer's `step` without torch's wrapper for profilers and hooks; None if there is no wrapper.

    And without the one that sets the gradient mode; the second value is whether there is one.
    """
    wrapped = type(optimizer).step
    inside = getattr(wrapped, "__wrapped__", None) if getattr(wrapped, "hooked", False) else None
    sets_mode = is_wrapped(inside)
    return (inside.__wrapped__ if sets_mode else inside), sets_mode  # type: ignore[union-attr]


def step_hooks(optimizer: Optimizer) -> tuple[Mapping[int, Any], ...]:
    """Returns the hooks of `step`, global ones and the optimizer's own: dictionaries that torch changes in place."""
    return (
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        optimizer_module._global_optimizer_pre_hooks,
        optimizer_module._global_optimizer_post_hooks,
    )


def schedulers_of(schedule: Any) -> Sequence[Any]:
    """Returns the schedules that a SequentialLR or ChainedScheduler is made of; none for other objects."""
    return getattr(schedule, "_schedulers", ())


def is_schedulers_step(step: Any) -> bool:
    """Returns whether a learning-rate schedule has replaced its optimizer's `step` by this one, to see its calls."""
    return hasattr(step, "_wrapped_by_lr_sched")


# Written to where assigning an attribute is not the same: that makes a buffer which is an nn.Parameter, of a tied
# weight, a parameter; and takes microseconds for each.


def module_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Returns the dictionary of the module's own parameters."""
    return module._parameters


def module_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Returns the dictionary of the module's own buffers."""
    return module._buffers


def tensor_version(tensor: Tensor) -> int:
    """Returns a number that grows whenever the tensor, or a view of it, is changed in place."""
    return 0 if tensor.is_inference() else tensor._version


def module_children(module: nn.Module) -> dict[str, nn.Module | None]:
    """Returns the dictionary of the module's own children; named_children() omits a child's second name."""
    return module._modules


def give_own_memory(module: nn.Module, device: torch.device) -> None:
    """Gives a module's own tensors memory, also if its `_apply` has no `recurse=` (a metric of Lightning)."""

    def empty(tensor: Tensor) -> Tensor:
        if type(tensor) not in (Tensor, nn.Parameter) or tensor.layout != torch.strided:
            return torch.empty_like(tensor, device=device)
        # empty_like() of a meta tensor imports sympy, which takes a third of a second.
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=device)

    parameters = inspect.signature(module._apply).parameters
    recurses = "recurse" in parameters or any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    module._apply(empty, **{"recurse": False} if recurses else {})


def is_dtensor(value: Any) -> TypeIs[DTensor]:
    """Returns whether a value is a DTensor. To import its module takes a second: before that there is none."""
    kind = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", None)
    return kind is not None and isinstance(value, kind)


def is_sharded(module: Any) -> TypeIs[FSDPModule]:
    """Returns whether `fully_shard` was called of a module; imports nothing."""
    kind = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return kind is not None and isinstance(module, kind)


def local_tensor(tensor: DTensor) -> Tensor:
    """Returns this process's part of a sharded tensor, without gradient.

    Called per parameter and step: `to_local()`, which the rest of grappe uses, takes 0.1 microseconds more.
    """
    return tensor._local_tensor


def read_numbers_of_all_parts() -> None:
    """Has `float(tensor)` and `item()` of a DTensor read the number of all parts: torch reads this process's term.

    An optimizer that scales by a norm would take other steps on each process. Reading is collective then.
    """

    def read(operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        return arguments[0].full_tensor().item()

    _sharded_operators()[torch.ops.aten._local_scalar_dense.default] = read


def _sharded_operators() -> dict[Any, Callable[..., Any]]:
    """Returns what runs instead of an operator of a DTensor, by operator."""
    from torch.distributed.tensor import DTensor

    dispatcher: Any = DTensor._op_dispatcher
    return dispatcher._custom_op_handlers


def local_shape_and_offset(tensor: DTensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns (shape, offset) of this process's part of a sharded tensor in the whole tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return tuple(shape), tuple(offset)


def flatten_mesh(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """Flattens all axes of the mesh into one axis `name`."""
    return mesh._flatten(name)


def forget_meshes() -> None:
    """Forgets the device meshes of a process group that was destroyed: torch 2.8 finds equal ones."""
    from torch.distributed import device_mesh

    for name in ("child_to_root_mapping", "root_to_flatten_mapping", "flatten_name_to_root_dims"):
        getattr(device_mesh._mesh_resources, name, {}).clear()


@contextlib.contextmanager
def gradients_handed_over(term: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Context in which FSDP2 sums over processes what `term` makes of each unsharded gradient."""
    from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

    before = {name: vars(FSDPParam)[name] for name in ("unsharded_grad_data", "unsharded_accumulated_grad_data")}
    for name, plain in before.items():
        setattr(FSDPParam, name, property(lambda self, plain=plain: term(plain.fget(self))))
    try:
        yield
    finally:
        for name, plain in before.items():
            setattr(FSDPParam, name, plain)


def fake_store() -> dist.Store:
    """Returns the store of a process group of backend "fake", which this makes known: it sends nothing.

    Fake tensors can be sent, too: torch has known that since a version between 2.8 and 2.13.
    """
    from torch._C._distributed_c10d import FakeWork
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.ops.c10d.send.default.has_kernel_for_dispatch_key(torch._C.DispatchKey.Meta):
        for name in ("send", "recv_"):
            MESSAGES.impl(name, lambda *_: FakeWork().boxed(), "Meta")
        MESSAGES.impl("allreduce_", lambda tensors, *_: (tensors, FakeWork().boxed()), "Meta")
    return FakeStore()


def default_store() -> dist.Store:
    """Returns the store that the default process group was made with."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def functional_collectives() -> ModuleType:
    """Returns the module of the collectives that FSDP2 and tensor parallelism call."""
    import torch.distributed._functional_collectives as functional

    return functional


def split_backward() -> ModuleType:
    """Returns the module of the two halves of a pipeline stage's backward: of its inputs, and of its weights."""
    from torch.distributed.pipelining import _backward

    return _backward


def operator_arguments(operator: Any) -> Sequence[Any]:
    """Returns the declared arguments of an operator in a TorchDispatchMode: `name`, `kwarg_only`, ..."""
    return operator._schema.arguments


def operator_mutates(operator: Any) -> bool:
    """Returns whether an operator changes one of its arguments."""
    return isinstance(operator, torch._ops.OpOverload) and operator._schema.is_mutable


def alias(tensor: Tensor) -> Tensor:
    """Returns a tensor of the same memory and count of changes, without autograd's record; in a TorchDispatchMode."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def end_data_workers(loaded: Any) -> None:
    """Ends the data workers of a DataLoader's iterator now; without workers, does nothing."""
    if (end := getattr(loaded, "_shutdown_workers", None)) is not None:
        end()


def skip_batch(loaded: Any) -> None:
    """Goes on by a batch in the iterator of a DataLoader without data workers; loads nothing."""
    loaded._next_index()


@functools.cache
def fake_tensor_type() -> type[Tensor]:
    """Returns the class of tensors without numbers."""
    return torch._subclasses.FakeTensor


def fake_tensors() -> Any:
    """Makes a context in which tensors have shapes, types and devices, and no memory (FakeTensorMode).

    Its method `from_tensor` makes such a tensor of another.
    """
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def is_traced(tensor: Tensor) -> bool:
    """Returns whether a tensor has no values, since torch only traces."""
    from torch._subclasses import FakeTensor
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FakeTensor | FunctionalTensor)


INTERCEPTING_KEY = "DeferredInit"
"""A key of torch's dispatcher that torch itself uses for nothing, before autograd and before autocast."""
_KEY = torch._C._dispatch_key_parse(INTERCEPTING_KEY)  # each parsing takes 2 microseconds


def intercept(functions: Mapping[str, Callable[[Any], Callable[..., Any]]]) -> Any:
    """Registers functions that run instead of operators of aten in a thread that is intercepting, and in its backward.

    Args:
        functions: by an operator's name and overload, what makes the function from the operator.

    Returns:
        what keeps the functions registered.
    """
    everything, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    everything.fallback(torch.library.fallthrough_kernel, INTERCEPTING_KEY)
    # torch.cond and other operators in Python, which do not ask C++ what falls through.
    torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS.append(_KEY)
    for operator in torch._ops._higher_order_ops.values():
        operator.fallthrough(_KEY)
    for name, make in functions.items():
        packet, _, overload = name.partition(".")
        aten.impl(name, make(getattr(getattr(torch.ops.aten, packet), overload or "default")), INTERCEPTING_KEY)
    return everything, aten


def replace_recurrent(made: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Has nn.LSTM, nn.GRU and nn.RNN call what `made` makes of torch's functions for them, in this process."""
    own = torch.nn.modules.rnn._VF
    layers = {name: made(getattr(own, name)) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")}
    cells = {f"{name}_cell": getattr(own, f"{name}_cell") for name in layers}
    torch.nn.modules.rnn._VF = SimpleNamespace(**layers, **cells)  # type: ignore[assignment]


def call_in_mode(operator: Callable[..., Any], arguments: Any, options: Any) -> Any:
    """Calls an operator in a TorchDispatchMode, where torch would intercept nothing that the operator calls."""
    before = torch._C._dispatch_tls_is_dispatch_key_excluded(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, False)
    try:
        return operator(*arguments, **options)
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded(_KEY, before)


def set_intercepting(on: bool) -> bool:
    """Sets whether this thread is intercepting; returns whether it was. Takes 0.2 microseconds."""
    before = torch._C._dispatch_tls_is_dispatch_key_included(_KEY)
    torch._C._dispatch_tls_set_dispatch_key_included(_KEY, on)
    return before


_DRAWS = (
    "bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "native_dropout",
    "normal", "normal_", "poisson", "rand_like", "randint_like", "randn_like", "random_", "uniform_",
)  # fmt: skip


@contextlib.contextmanager
def sharded_draws(draw: Callable[[Any, Any, Any], Any]) -> Iterator[None]:
    """Context in which `draw` is what operators that draw do with a DTensor, whose own draws are each shard's."""
    handlers = _sharded_operators()
    packets = [getattr(torch.ops.aten, name) for name in _DRAWS]
    operators = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    before = dict(handlers)
    handlers.update(dict.fromkeys(operators, draw))
    try:
        yield
    finally:
        handlers.clear()
        handlers.update(before)
