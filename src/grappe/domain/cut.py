"""Cut: a tensor with the shape of the whole, of which this process holds a part of one dimension.

A function of torch finds its rule in RULES, by `__torch_function__`; a function without one is refused by name. A rule
works on the parts, which are ordinary tensors with gradients. What every process holds whole stays an ordinary tensor.

Every process computes the same numbers of one process's graph, its own parts of them. With the loss's parts as the
roots of backward, the gradient of a parameter is the *sum* of the processes' gradients.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import os
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from grappe.errors import PlanError
from grappe.errors.user_line import place_in
from grappe.private_api.torch import tree_map, wrapper_of
from grappe.words import sent_in_step

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

ROUND = "let it work along another dimension, or tell in the task's domain() to cut another dimension or none"
OTHERS = (
    "write it with functions that have one, such as matmul, or tell in the task's domain() to leave this input whole"
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Domain:
    """The processes that hold the parts of the same samples."""

    group: ProcessGroup
    summed: ProcessGroup
    """The processes over which gradients are summed: those of `group`, for all data slices."""
    rank: int
    size: int
    sent: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    """Messages and bytes that this process has sent to others, by what for; forward and backward."""
    of_step: Counter[tuple[str, str]] = dataclasses.field(default_factory=Counter)
    """Messages and bytes of the second training step; of the gradients, which DDP or FSDP2 sums, bytes alone."""

    def note(self, purpose: str, sizes: Sequence[int]) -> None:
        """Counts messages of so many bytes each."""
        self.sent[purpose, "messages"] += len(sizes)
        self.sent[purpose, "bytes"] += sum(sizes)

    def remarks(self) -> list[str]:
        """Returns what a training step sends, for the run's summary."""
        sizes = sent_in_step(self.by_purpose())
        return [f"domain= sends in a step, from process 0: {sizes}"] if sizes else []

    def by_purpose(self) -> dict[str, dict[str, int]]:
        """Returns the messages and bytes of a training step; none before the second."""
        purposes: dict[str, dict[str, int]] = {}
        for (purpose, what), number in self.of_step.items():
            purposes.setdefault(purpose, {})[what] = number
        return purposes

    def even(self, length: int) -> tuple[int, ...]:
        """Returns the sizes of the parts of a dimension; the first ones are one larger where it does not divide.

        Raises:
            PlanError: a process would have nothing.
        """
        return self.checked(tuple(length // self.size + (rank < length % self.size) for rank in range(self.size)))

    def in_proportion(self, sizes: Sequence[int], length: int) -> tuple[int, ...]:
        """Returns the sizes of the parts of a dimension of another length, cut at the same places in proportion."""
        half, total = sum(sizes) // 2, sum(sizes)
        return self.checked(
            tuple((b * length + half) // total - (a * length + half) // total for a, b in intervals(sizes))
        )

    def checked(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """Returns `sizes`; raises PlanError where a process would have nothing."""
        if min(sizes) < 1:
            raise refused(
                f"a dimension of length {sum(sizes)}, which leaves a process without a part",
                f"use fewer than {self.size} processes, or larger samples",
            )
        return sizes


class Parting(NamedTuple):
    """The places of a tensor's parts: dimension `dim` has `outer` times the cut dimension, one after the other.

    `outer` is above 1 where dimensions before the cut one were merged with it, as in `logits.view(-1, classes)`.
    """

    domain: Domain
    dim: int
    sizes: tuple[int, ...]
    """Of the parts, by rank in the domain."""
    outer: int = 1

    @property
    def total(self) -> int:
        """Returns the length of the cut dimension."""
        return sum(self.sizes)

    @property
    def own(self) -> tuple[int, int]:
        """Returns the first place of this process's part, and the one after its last."""
        return intervals(self.sizes)[self.domain.rank]

    def part_of(self, full: Tensor, dim: int) -> Tensor:
        """Returns this process's part of a whole tensor's dimension `dim`, which has the length of the cut one."""
        first, end = self.own
        if self.outer == 1:
            return full.narrow(dim, first, end - first)
        dim %= full.dim()
        return full.unflatten(dim, (self.outer, self.total)).narrow(dim + 1, first, end - first).flatten(dim, dim + 1)


class Cut(Tensor):
    """A tensor of which this process holds a part; its shape is the whole tensor's."""

    local: Tensor
    at: Parting

    @staticmethod
    def __new__(cls: type[Cut], local: Tensor, at: Parting) -> Cut:
        at = at._replace(dim=at.dim % local.dim())
        shape = [*local.shape]
        assert shape[at.dim] == at.outer * at.sizes[at.domain.rank], (shape, at)
        shape[at.dim] = at.outer * at.total
        cut = wrapper_of(cls, shape, local)
        cut.local, cut.at = local, at
        return cut

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Cut({list(self.shape)}, dimension {self.at.dim} in parts of {list(self.at.sizes)})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            for argument in args:
                if isinstance(argument, Cut):
                    _refuse_own_functions(argument)
            return rule(*args, **kwargs)
        if name_of(func) in METADATA:
            return super().__torch_function__(func, types, args, kwargs)
        if inspect.isfunction(func) and func.__module__ == torch.nn.functional.__name__:
            return _written_out(func)(*args, **kwargs)
        raise refused(name_of(func), OTHERS)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise refused(str(func))


@functools.cache
def _written_out(func: Any) -> Any:
    """Returns torch's own Python code of a function, whose calls have rules, or are refused."""
    asks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    names = {**func.__globals__, **dict.fromkeys(asks, lambda *_: False)}
    written = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    written.__kwdefaults__ = func.__kwdefaults__
    return written


METADATA = frozenset({
    "dim", "size", "numel", "nelement", "element_size", "is_floating_point", "is_complex", "is_signed", "ndimension",
    "__len__", "get_device", "is_contiguous", "shape", "device", "dtype", "ndim", "layout", "is_cuda", "is_cpu",
    "is_meta", "is_sparse", "is_nested", "is_quantized", "is_mkldnn", "is_mps", "is_xpu", "itemsize", "names",
})  # fmt: skip
REQUIRES_GRAD: Any = Tensor.requires_grad.__get__  # type: ignore[missing-attribute]
RULES: dict[Any, Callable[..., Any]] = {}
"""By function of torch, what runs instead of it where an argument is cut."""


def rule(*functions: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that makes a function the rule of `functions`."""

    def register(run: Callable[..., Any]) -> Callable[..., Any]:
        for function in functions:
            RULES[function] = run
        return run

    return register


def named(*names: str) -> list[Any]:
    """Finds all functions of torch of these names, as methods and as functions."""
    places = (Tensor, torch, torch.nn.functional, torch.special)
    return [function for name in names for place in places if callable(function := getattr(place, name, None))]


def name_of(func: Any) -> str:
    """Returns a function's name as a user writes it, or that of an attribute."""
    name = getattr(func, "__name__", str(func))
    module, _, short = name.partition("_")
    if short and getattr(getattr(torch, module, None), short, None) is func:  # torch.fft.fft calls itself fft_fft
        return f"torch.{module}.{short}"
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


DIFFERENT = "tensors that are cut along different dimensions"
MERGED = "dimensions that are merged with the one that is cut"


def refused(what: str, instead: str = ROUND) -> PlanError:
    """Returns the error for what cannot be done with a cut tensor, with the user's line, or that of a library."""
    folder = os.path.dirname(__file__)  # noqa: PTH120 - of the rules, which are the innermost frames
    stack = [frame for frame in traceback.extract_stack() if not frame.filename.startswith(folder)]
    return PlanError(f"domain= has no rule for {what} ({place_in(stack)}): {instead}")


def along(function: str) -> PlanError:
    """Returns the error for a function that works along the dimension that is cut."""
    return refused(f"{function} along the dimension that is cut", ROUND)


def _refuse_own_functions(cut: Cut) -> None:
    """Raises PlanError inside a torch.autograd.Function, which would lose the gradients of the parts."""
    grown = Tensor.__torch_function__(REQUIRES_GRAD, (), (cut,))
    frame = inspect.currentframe() if grown or (cut.local.requires_grad and not torch.is_grad_enabled()) else None
    while frame is not None:
        of_torch = frame.f_code.co_filename.endswith(os.path.join("autograd", "function.py"))  # noqa: PTH118
        if grown or (of_torch and frame.f_code.co_name == "apply"):
            raise refused("a torch.autograd.Function", "write it with torch's own operators")
        frame = frame.f_back


# ---- Between whole and cut ----------------------------------------------------------------------------------


def intervals(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns the places of each part: the first one, and the one after the last."""
    return list(itertools.pairwise([0, *itertools.accumulate(sizes)]))


def cut(full: Tensor, dim: int, domain: Domain) -> Cut:
    """Returns a tensor that every process has, cut into even parts; keeps this process's part alone in memory."""
    at = Parting(domain, dim % full.dim(), domain.even(full.shape[dim]))
    return Cut(at.part_of(full, dim).clone(), at)


def like(cut: Cut, local: Tensor, **changes: Any) -> Cut:
    """Returns the Cut of another local part; `changes` of the layout."""
    return Cut(local, cut.at._replace(**changes))


def local(value: Any) -> Any:
    """Returns this process's part of what is cut, and anything else as it is."""
    return value.local if isinstance(value, Cut) else value


class Opened(NamedTuple):
    """A Cut as a tuple, in which others find the tensor with the gradient."""

    local: Tensor
    at: Any
    """Not a Parting: those who look for tensors would take that apart too."""


def opened(tree: Any) -> Any:
    """Returns a nesting with each Cut opened: FSDP2 and DDP look for tensors that require gradients."""
    return tree_map(lambda leaf: Opened(leaf.local, _Hidden(leaf.at)) if isinstance(leaf, Cut) else leaf, tree)


def closed(tree: Any) -> Any:
    """Returns what `opened` was given, with the tensors that are there now."""

    def is_opened(leaf: Any) -> bool:
        return isinstance(leaf, Opened)

    return tree_map(lambda leaf: Cut(leaf.local, leaf.at.at) if is_opened(leaf) else leaf, tree, is_leaf=is_opened)


class _Hidden:
    """A leaf that holds a layout."""

    def __init__(self, at: Parting) -> None:
        self.at = at
