"""Activation checkpointing: runs a unit's forward again in backward, or keeps its activations in the host's memory."""

from __future__ import annotations

import contextlib
import functools
import time
import timeit
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from grappe.data.batch import InModel, inside
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.errors import TaskError
from grappe.parallel.attributes import Attributes, Place, attributes, copied, is_state, put_attributes
from grappe.plan import Plan, recompute_of
from grappe.private_api.torch import (
    TorchDispatchMode,
    alias,
    module_buffers,
    tensor_version,
    tree_flatten,
    tree_leaves,
    tree_unflatten,
)

CHAIN = 100  # operators by which the time of each is measured
ATTENTION = "_scaled_dot_product"
SAVED = ("mm", "addmm", "bmm", "baddbmm", "convolution")
"""Operators of aten whose outputs a selective unit keeps, with those of attention: they take most of its time."""


class Host:
    """The host's memory, in which a unit's activations wait for their backward.

    Copies are page-locked, and are made on the stream that computes: in the order of its kernels, without a wait of the
    host. On a CPU they take what they free.
    """

    moved = 0
    """Bytes of all copies, there and back."""

    def to_host(self, flat: Tensor) -> Any:
        """Copies a tensor of one dimension; returns what `to_device` makes it of."""
        copy = torch.empty(flat.shape, dtype=flat.dtype, pin_memory=flat.is_cuda)
        return copy.copy_(flat, non_blocking=True)

    def to_device(self, copy: Any, device: torch.device) -> Tensor:
        """Returns the tensor, on its device."""
        return copy.to(device, non_blocking=True)


class _Copy:
    """A storage's copy in the host's memory. It is on the device again from its first use in backward to its last."""

    def __init__(self, host: Host, flat: Tensor) -> None:
        self._host, self._device, self._size, self._copy = host, flat.device, flat.nbytes, host.to_host(flat)
        self._back: Tensor | None = None
        self.users = 0
        """Saved tensors that are views of it, and were not used yet."""
        host.moved += self._size

    def __call__(self) -> Tensor:
        back = self._back
        if back is None:
            back = self._host.to_device(self._copy, self._device)
            self._host.moved += self._size
        self.users -= 1
        self._back = back if self.users > 0 else None
        return back


def _with_activations_in(
    host: Host, unit: nn.Module, forward: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    """Runs a unit's forward; what it saves for backward goes to the host, except parameters and buffers."""
    own = {id(tensor.untyped_storage()) for tensor in (*unit.parameters(), *unit.buffers())}
    copies: Any = WeakIdKeyDictionary(ref_type=weakref.ref)

    def pack(tensor: Tensor) -> Any:
        if tensor.layout != torch.strided or tensor.is_conj() or tensor.is_neg():
            return tensor
        storage = tensor.untyped_storage()
        if id(storage) in own:
            return tensor
        several = copies.setdefault(storage, {})
        key = tensor.dtype, tensor_version(tensor)  # what is changed in place is another copy
        if key not in several:
            several[key] = _Copy(host, tensor.as_strided((storage.nbytes() // tensor.itemsize,), (1,), 0))
        several[key].users += 1
        return several[key], tensor.size(), tensor.stride(), tensor.storage_offset()

    def unpack(packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        copy, *form = packed
        return copy().as_strided(*form)

    with saved_tensors_hooks(pack, unpack):
        return forward(*arguments, **options)


def checkpoint_activations(units: Sequence[nn.Module], plan: Plan, host: Callable[[], Host] = Host) -> tuple[Host, ...]:
    """Wraps the forward of each unit that recomputes, or keeps its activations in the host's memory.

    Names and hooks stay the same.

    Args:
        host: makes each unit's.

    Returns:
        Each unit's.

    Raises:
        PlanError: `recompute` names a unit that there is not.
    """
    hosts = tuple(host() for _ in units)
    for unit, level, memory in zip(units, plan.recomputed(len(units)), hosts, strict=True):
        if level == "host":
            unit.forward = functools.partial(_with_activations_in, memory, unit, unit.forward)
        elif level:
            contexts = _State(unit, selective=level == "selective").contexts
            unit.forward = functools.partial(checkpoint, unit.forward, use_reentrant=False, context_fn=contexts)
    return hosts


class SelectiveMode(TorchDispatchMode):
    """Keeps what takes long to compute in a unit's first forward, and gives it to its second one, in the same order.

    torch.utils.checkpoint's selective contexts do this, too, in more time for each operator.
    """

    def __init__(self) -> None:
        super().__init__()
        self._kept: list[tuple[Any, list[tuple[Any, int]], Any] | None] = []
        self._next: int | None = None
        """Place of the output that a second forward takes next; None: this is the first."""

    def repeat(self) -> SelectiveMode:
        """Returns the mode, for a second forward that begins now."""
        self._next = 0
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # Attention that draws is repeated, so that the generator advances as before: dropout is its only number.
        if not _takes_long(func) or (
            ATTENTION in func.name() and any(isinstance(each, float) and each for each in args)
        ):
            return func(*args, **kwargs) if kwargs else func(*args)
        if self._next is not None:
            place, self._next = self._next, self._next + 1
            if place < len(self._kept) and (entry := self._kept[place]) is not None and entry[0] is func:
                self._kept[place] = None
                # What was changed in place since is computed again.
                if all(version == _version(leaf) for leaf, version in entry[1]):
                    return tree_unflatten([leaf for leaf, _ in entry[1]], entry[2])
        output = func(*args, **(kwargs or {}))
        if self._next is None:
            leaves, form = tree_flatten(output)
            leaves = [alias(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
            self._kept.append((func, [(leaf, _version(leaf)) for leaf in leaves], form))
        return output


@functools.cache
def _takes_long(operator: Any) -> bool:
    name = operator.name().removeprefix("aten::").partition(".")[0]
    return name in SAVED or name.startswith(ATTENTION)


def _version(leaf: Any) -> int:
    return tensor_version(leaf) if isinstance(leaf, Tensor) else 0


@functools.cache
def seconds_an_operator(level: str) -> float:
    """Measures how long a step takes for each operator of a unit at a level of recomputation, its kernels apart.

    Python runs it, and repeats it, and hooks keep what it saves.
    """
    unit, leaf = nn.Sequential(*(nn.Tanh() for _ in range(CHAIN))), torch.ones((), requires_grad=True)
    checkpoint_activations([unit], Plan(recompute=recompute_of([level])))
    timed = functools.partial(timeit.repeat, timer=time.process_time, repeat=20)
    step = min(timed(lambda: unit(leaf).backward(), number=1))
    kernels = (3 if level else 2) * min(timed(leaf.detach().tanh, number=CHAIN))
    return max(0.0, step - kernels) / CHAIN


def switch_off_caches(model: nn.Module) -> None:
    """Switches off a transformers model's cache of keys and values: a repeated forward would find its own entries."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "use_cache", None) is True:
            config.use_cache = False  # pyrefly: ignore


class _EnteredAgain(contextlib.AbstractContextManager):
    """Context that is made at each entry: with derivatives in a forward, backward repeats a unit several times."""

    def __init__(self, make: Callable[[], contextlib.AbstractContextManager]) -> None:
        self._make = make
        self._entered: list[contextlib.AbstractContextManager] = []

    def __enter__(self) -> None:
        self._entered.append(self._make())
        self._entered[-1].__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._entered.pop().__exit__(*error)


class _State:
    """The buffers and attributes of a unit: its second forward has them as the first one had, and leaves them alone."""

    def __init__(self, unit: nn.Module, *, selective: bool = False) -> None:
        self._unit, self._modules, self._selective = unit, list(unit.named_modules()), selective
        self._changing: set[Place] | None = None
        """Tensors that forwards change, of which each first forward keeps a copy; None if no forward has run."""

    def contexts(self) -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
        """Returns the contexts of a first forward, which begins now, and of its repetition."""
        before = self._values()
        stamps = {place: _stamp(value) for place, value in before.items()}
        kept = copied({place: value for place, value in before.items() if self._is_kept(place, value)})
        samples, rows = InModel.samples, InModel.place
        keeping = SelectiveMode() if self._selective else None

        @contextlib.contextmanager
        def first() -> Iterator[None]:
            with keeping or contextlib.nullcontext():
                yield
            if self._changing is None:
                after = self._values()
                self._changing = {place for place in before if stamps[place] != _stamp(after.get(place))}
                # torch does not count what batch and instance normalisation write into their running statistics.
                self._changing |= {
                    (path, name)
                    for path, module in self._modules
                    for name in module_buffers(module)
                    if hasattr(module, "track_running_stats")
                }
                for place in [place for place, value in before.items() if not self._is_kept(place, value)]:
                    del kept[place]

        @contextlib.contextmanager
        def again() -> Iterator[None]:
            now, values = self._values(), before | copied(kept)
            for place, stamp in stamps.items():
                if place not in kept and _stamp(now.get(place)) != stamp:
                    name = ".".join(filter(None, place))
                    raise TaskError(
                        f"{type(self._unit).__name__} changes '{name}' now, and did not in its first forward: its "
                        "second forward would find another value. Train it without recompute, or write it in "
                        "after_step(self, model) of the task"
                    )
            # A pipeline may have another microbatch in the model.
            with inside(samples), whole_batch_draws(rows):
                self._put(values)
                try:
                    with keeping.repeat() if keeping else contextlib.nullcontext():
                        yield
                finally:
                    self._put(now)

        return first(), _EnteredAgain(again)

    def _is_kept(self, place: Place, value: Any) -> bool:
        """Returns whether a first forward copies a value: one that changes, or that has no tensor and costs nothing."""
        return self._changing is None or place in self._changing or not any(map(is_state, tree_leaves(value)))

    def _values(self) -> Attributes:
        buffers = {
            (path, name): buffer for path, module in self._modules for name, buffer in module_buffers(module).items()
        }
        return attributes(self._unit) | buffers

    def _put(self, values: Attributes) -> None:
        """Sets buffers as other tensors, not in place: backward may still read those that are there."""
        others = dict(values)
        for path, module in self._modules:
            own = module_buffers(module)
            for name in own:
                own[name] = others.pop((path, name), None)
        put_attributes(self._unit, others)


def _stamp(value: Any) -> tuple[Any, ...]:
    """Returns what differs once a value is another, or a tensor in it has been changed in place."""
    leaves, form = tree_flatten(value)
    return form, *map(_stamp_of, leaves)


def _stamp_of(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return id(leaf), tensor_version(leaf)
    if isinstance(leaf, torch.Generator):
        return leaf.get_state().numpy().tobytes()
    return leaf if isinstance(leaf, bool | int | float | str) else id(leaf)
