"""Cases from torch's databases of operators and modules: what a call gives on plain tensors, to compare rows with.

Knows nothing of grappe, so that `altered_rules` can make the cases once, and import grappe's rules altered afterwards.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import warnings
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.common_modules import module_db
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from tests.rows import script_calls

FIRST = (torch.float64, torch.float32, torch.int64, torch.bool, torch.complex128)
SECOND = (torch.int64, torch.bool, torch.complex128)
MOST_MADE = 10_000
"""Samples of an operator that are made at most."""
MOST_NUMBERS = 20_000
"""In the tensors of a sample: larger ones test the same code in a hundred times the time."""
NEVER_FLOATING = (torch.int64, torch.bool)


@dataclass(frozen=True, kw_only=True)
class Call:
    """A function of tensors and what it gives on plain ones; `form` is how it is called."""

    operator: str
    name: str
    """Unique: seeds of random numbers are made of it."""
    form: str
    function: Callable[..., Any]
    leaves: tuple[Tensor, ...]
    """Arguments that are tensors, in the order of `spec`."""
    spec: Any
    others: tuple[Any, ...]
    """All leaves of the arguments, with None for tensors."""
    reference: Outcome

    def run(
        self, leaves: list[Tensor], cotangent: Callable[[int, Tensor], Tensor], read: Callable[[Any], Any]
    ) -> Outcome:
        """Calls it with these tensors. `cotangent` makes an output's gradient, `read` a plain tensor."""
        return FORMS[self.form](self, leaves, cotangent, read)

    def call(self, leaves: list[Tensor]) -> Any:
        """Calls the function itself."""
        at = iter(leaves)
        filled = [next(at) if each is TENSOR else each for each in self.others]
        arguments, options = tree_unflatten(filled, self.spec)
        return self.function(*arguments, **options)


@dataclass(kw_only=True)
class Outcome:
    """Results of a call: each a list in the call's order, None where there is no tensor."""

    values: list[tuple[str, Any]] = field(default_factory=list)
    """Values that are compared, by name: outputs, gradients, arguments that were written."""
    shape: Any = None
    """Of the nested outputs, types of containers included."""

    def add(self, name: str, value: Any, read: Callable[[Any], Any]) -> None:
        self.values.append((name, read(value)))


TENSOR = object()
"""Stands for a tensor among a call's arguments."""


def seed(text: str) -> int:
    return zlib.crc32(text.encode())


def noise(like: Tensor, name: str) -> Tensor:
    """A gradient of the shape of `like`, the same for each process."""
    generator = torch.Generator().manual_seed(seed(name))
    return torch.randn(like.shape, dtype=like.dtype, generator=generator)


# ---- Forms of a call ---------------------------------------------------------------------------------------
def _outputs(result: Any, outcome: Outcome, read: Callable[[Any], Any]) -> list[Any]:
    flat, spec = tree_flatten(result)
    outcome.shape = str(spec)
    for index, each in enumerate(flat):
        outcome.add(f"output {index}", each, read)
    return flat


def _plainly(call: Call, leaves: list[Tensor], cotangent: Any, read: Any) -> Outcome:
    """Forward, gradient, and the gradient's gradient."""
    outcome = Outcome()
    _grads(call.call(leaves), call, leaves, cotangent, read, outcome)
    return outcome


def _grads(
    result: Any, call: Call, leaves: list[Tensor], cotangent: Any, read: Any, outcome: Outcome, parameters: Any = ()
) -> None:
    flat = _outputs(result, outcome, read)
    leaves = [*leaves, *parameters]
    wanting = [each for each in leaves if each.requires_grad]
    outputs = [each for each in flat if isinstance(each, Tensor) and each.requires_grad]
    if not outputs or not wanting:
        return
    cotangents = [cotangent(index, each) for index, each in enumerate(outputs)]
    twice = seed(call.name) % 3 == 0 and call.form == "call"
    gradients = torch.autograd.grad(outputs, wanting, cotangents, allow_unused=True, create_graph=twice)
    for index, each in enumerate(gradients):
        outcome.add(f"gradient {index}", each, read)
    again = [each for each in gradients if each is not None and each.requires_grad]
    if twice and again:
        cotangents = [cotangent(100 + index, each) for index, each in enumerate(again)]
        try:
            seconds = torch.autograd.grad(again, wanting, cotangents, allow_unused=True)
        except (RuntimeError, NotImplementedError) as error:
            if "derivative for" not in str(error) and "does not require grad" not in str(error):
                raise
            return
        for index, each in enumerate(seconds):
            outcome.add(f"second gradient {index}", each, read)


def _module(call: Call, leaves: list[Tensor], cotangent: Any, read: Any) -> Outcome:
    """Outputs, buffers, and gradients of arguments and parameters."""
    outcome = Outcome()
    module, result = call.call(leaves)
    _grads(result, call, leaves, cotangent, read, outcome, list(module.parameters()))
    for name, buffer in module.named_buffers():
        outcome.add(name, buffer, read)
    return outcome


def _in_place(call: Call, leaves: list[Tensor], cotangent: Any, read: Any) -> Outcome:
    """A write; half of the times to what another tensor views, and that was read before."""
    outcome = Outcome()
    with torch.no_grad():
        first = leaves[0]
        if seed(call.name) % 2:
            outcome.values.append(("returns its argument", call.call(leaves) is first))
            outcome.add("argument", first, read)
            return outcome
        view = first.unsqueeze(0) if first.dim() == 0 else first.transpose(0, -1)
        before = first + 0 if first.dtype is not torch.bool else first ^ False
        read(first), read(view)
        result = call.call(leaves)
        outcome.values.append(("returns its argument", result is first))
        outcome.add("argument", first, read)
        outcome.add("its view", view, read)
        outcome.add("what was computed before", before, read)
        outcome.add("again", first.clone(), read)
    return outcome


def _in_place_gradient(call: Call, leaves: list[Tensor], cotangent: Any, read: Any) -> Outcome:
    outcome = Outcome()
    copy = leaves[0].clone()
    result = call.call([copy, *leaves[1:]])
    _grads(result, call, leaves, cotangent, read, outcome)
    return outcome


def _out(call: Call, leaves: list[Tensor], cotangent: Any, read: Any) -> Outcome:
    outcome = Outcome()
    with torch.no_grad():
        _outputs(call.call(leaves), outcome, read)
        outcome.add("out", leaves[-1], read)
    return outcome


def _view(call: Call, leaves: list[Tensor], cotangent: Any, read: Any) -> Outcome:
    """Writes through a view, and to what it views."""
    outcome = Outcome()
    with torch.no_grad():
        views = [each for each in tree_leaves(call.call(leaves)) if isinstance(each, Tensor)]
        first = leaves[0]
        read(first)
        for each in views[:2]:
            read(each)
        for name, target in (("view", views[0]), ("argument", first), ("last view", views[-1])):
            if target.dtype is torch.bool:
                target.logical_not_()
            else:
                target.mul_(2)
            outcome.add(f"argument, {name} written", first, read)
            for index, each in enumerate(views[:3]):
                outcome.add(f"view {index}, {name} written", each, read)
        outcome.add("sum of the view", views[0].sum(), read)
    return outcome


FORMS: dict[str, Callable[..., Outcome]] = {
    "call": _plainly,
    "module": _module,
    "in place": _in_place,
    "in place, gradient": _in_place_gradient,
    "out": _out,
    "view": _view,
}


# ---- Cases of the databases --------------------------------------------------------------------------------
def copy(tensor: Tensor) -> Tensor:
    """A tensor of its own memory, with the same strides where they are those of a whole memory."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def plain(value: Any) -> Any:
    """Results of a call, kept while the call goes on to write; `strides` are those that it had."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return value
    kept = value.detach().clone()
    kept.strides = value.stride()
    return kept


def _made(operator: str, name: str, form: str, function: Any, arguments: Any, options: Any) -> Call | None:
    """A call with its reference, or None where torch itself does not do it, or no argument can be rows."""
    flat, spec = tree_flatten((tuple(arguments), dict(options)))
    leaves = tuple(copy(each) for each in flat if _placeable(each))
    if not leaves:
        return None
    others = tuple(TENSOR if _placeable(each) else each for each in flat)
    call = Call(
        operator=operator, name=name, form=form, function=function, leaves=leaves, spec=spec, others=others,
        reference=Outcome(),
    )  # fmt: skip
    torch.default_generator.manual_seed(seed(name))
    try:
        copies = [copy(each) for each in leaves]
        got = call.run(copies, lambda i, out: noise(out, f"{name}/{i}"), plain)
    except (RuntimeError, NotImplementedError, TypeError, ValueError, IndexError, AssertionError):
        return None
    call.reference.values, call.reference.shape = got.values, got.shape
    call.reference.values.append(("random state", torch.get_rng_state()))
    if form in ("call", "module"):
        call.reference.values += [(f"argument {index} after", plain(each)) for index, each in enumerate(copies)]
    return call


def _placeable(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.layout is torch.strided
        and not value.is_quantized
        and value.device.type == "cpu"
    )


def _drawn(samples: list[Any], most: int, chance: random.Random) -> list[tuple[int, Any]]:
    numbered = [(index, each) for index, each in enumerate(samples) if _numbers(each) <= MOST_NUMBERS]
    return numbered if len(numbered) <= most else sorted(chance.sample(numbered, most), key=lambda pair: pair[0])


def _numbers(sample: Any) -> int:
    leaves = tree_leaves((sample.input, sample.args, sample.kwargs)) if hasattr(sample, "input") else ()
    return sum(each.numel() for each in leaves if isinstance(each, Tensor))


def of_operator(info: Any, most: int) -> Iterator[Call]:
    """Calls of an operator: of `most` samples, and of another kind of numbers one fourth as many."""
    chance = random.Random(info.full_name)
    first = next((each for each in FIRST if each in info.dtypes), None)
    seconds = [each for each in SECOND if each in info.dtypes and each is not first]
    if first is None:
        return
    kinds = [(first, most if not seconds else max(1, most - most // 4))]
    if seconds:
        kinds.append((chance.choice(seconds), max(1, most // 4)))
    for dtype, count in kinds:
        torch.default_generator.manual_seed(seed(info.full_name))
        grad = info.supports_autograd and dtype not in NEVER_FLOATING
        try:
            # torch looks on the stack for the test that asks, which takes longer than all that is made.
            with mock.patch("inspect.stack", list):
                inputs = info.sample_inputs("cpu", dtype, requires_grad=grad, set_seed=False)
                made = list(itertools.islice(inputs, MOST_MADE))
        except (RuntimeError, NotImplementedError, TypeError, ValueError):
            continue
        for index, sample in _drawn(made, count, chance):
            name = f"{info.full_name} {str(dtype).removeprefix('torch.')} {index}"
            yield from _forms(info, name, sample)


def _forms(info: Any, name: str, sample: Any) -> Iterator[Call]:
    arguments, options = (sample.input, *sample.args), sample.kwargs

    def form(kind: str, function: Any, arguments: Any = arguments, options: Any = options) -> Iterator[Call]:
        made = _made(info.full_name, f"{name} {kind}", kind, function, arguments, options)
        if made is not None:
            yield made

    plain_call = list(form("call", info.op))
    yield from plain_call
    if not plain_call:
        return
    in_place, detached = info.get_inplace(), tree_map(_detached, (arguments, options))
    if in_place is not None and _placeable(sample.input):
        yield from form("in place", in_place, *detached)
        if sample.input.requires_grad:
            yield from form("in place, gradient", in_place)
    result = [value for key, value in plain_call[0].reference.values if key == "output 0"]
    if info.supports_out and len(plain_call[0].reference.values) and result and isinstance(result[0], Tensor):
        outputs = sum(key.startswith("output") for key, _ in plain_call[0].reference.values)
        if outputs == 1:
            yield from form("out", info.op, detached[0], {**detached[1], "out": torch.zeros_like(result[0])})
    if _placeable(sample.input) and _views(info.op, *detached):
        yield from form("view", info.op, *detached)


def _detached(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def _views(function: Any, arguments: Any, options: Any) -> bool:
    """Whether what it gives has the memory of its first argument."""
    with contextlib.suppress(Exception), torch.no_grad():
        outputs = [each for each in tree_leaves(function(*arguments, **options)) if _placeable(each)]
        storage = arguments[0].untyped_storage().data_ptr()
        same = bool(outputs) and storage and all(each.untyped_storage().data_ptr() == storage for each in outputs)
        return bool(same) and not any(map(_overlaps, outputs))
    return False


def _overlaps(tensor: Tensor) -> bool:
    """Whether two numbers of a tensor are one place in memory, where a write has no defined result."""
    places = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        places = places.unsqueeze(-1) + torch.arange(size) * stride
    return len(places.unique()) < tensor.numel()


def of_module(info: Any, most: int) -> Iterator[Call]:
    """Calls of a module, in training and in evaluation: its parameters and buffers are arguments that stay plain."""
    chance = random.Random(info.name)
    for training in (True, False):
        torch.default_generator.manual_seed(seed(info.name))
        with contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError):
            made = info.module_inputs_func(
                info, device="cpu", dtype=torch.float64, requires_grad=True, training=training
            )
            for index, sample in _drawn(list(made), max(1, most // 2), chance):
                name = f"{info.name} {'training' if training else 'evaluation'} {index}"
                forward, function = sample.forward_input, _of_module(sample, info, name, training)
                call = _made(info.name, name, "module", function, forward.args, forward.kwargs)
                if call is not None:
                    yield call


def _of_module(sample: Any, info: Any, name: str, training: bool) -> Callable[..., Any]:
    """Makes the module with its own seed, calls it, and returns it with what it gives."""

    def function(*arguments: Any, **options: Any) -> Any:
        state = torch.get_rng_state()
        torch.default_generator.manual_seed(seed(name))
        construct = sample.constructor_input
        of_construction, by_name = tree_map(_detached, (construct.args, construct.kwargs))
        module = info.module_cls(*of_construction, **by_name).to(torch.float64).train(training)
        torch.set_rng_state(state)
        return module, module(*arguments, **options)

    return function


def of_scripts(only: str) -> Iterator[Call]:
    """Calls as scripts write them; an operator's name is the case's."""
    for name, function, tensors in script_calls.cases():
        if any(each in f"script: {name}" for each in only.split(",")):
            made = _made("script: " + name.partition(" (")[0], f"script: {name}", "call", function, tensors, {})
            if made is None:
                raise AssertionError(f"torch itself does not do {name!r}")
            yield made


def calls(most: int, *, part: int = 0, parts: int = 1, only: str = "") -> Iterator[Call]:
    """All calls of torch's databases, or the operators of one part of `parts`."""
    warnings.simplefilter("ignore")
    for index, info in enumerate([*op_db, *module_db]):
        name = info.full_name if hasattr(info, "full_name") else info.name
        if index % parts == part and any(each in name for each in only.split(",")):
            yield from of_operator(info, most) if hasattr(info, "full_name") else of_module(info, most)
    if not part:
        yield from of_scripts(only)
