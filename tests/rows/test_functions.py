"""Every function with a rule within a module gives each process the own rows of what it gives for all rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from grappe.rows import functions, own  # noqa: F401  # they fill the table
from grappe.rows.context import RowsContext
from grappe.rows.messages import own_part
from grappe.rows.own import FUNCTIONS, OwnRows, as_own
from grappe.rows.plans import activate
from grappe.rows.tensor import split

SIZES = (2, 3)
SHAPE = (5, 4, 6)
Arguments = tuple[Any, ...]


def tensors(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64) + 0.1


def arguments_of(function: Any) -> list[Arguments]:
    """Calls of any function: those that torch refuses are passed over."""
    x, y, z = tensors(*SHAPE), tensors(*SHAPE), tensors(*SHAPE)
    mask, whole = x > 0.6, (x * 9).long()
    images, volumes, lines = tensors(5, 4, 6, 6), tensors(5, 4, 6, 6, 6), tensors(6)
    by = [(x,), (mask,), (whole,), (tensors(5, 6),), (images,), (x.to(torch.complex128),)]
    by += [
        (x, each) for each in (y, 0.5, 1, -1, 2, (1, 2), (0,), lines, tensors(4, 1), tensors(5, 1, 1), (5, 24), (20, 6))
    ]
    by += [
        (x, 5, 4, 2, 3),
        (x, 5, -1),
        (x, (5, 4, 6)),
        (tensors(5, 1, 6), (5, 4, 6)),
        (tensors(5, 1, 6), 1),
        (x, 2, 0, 1),
    ]
    by += [(x, 2, 1), (x, 1, 2), (x, 0, 1), (x, (2, 0, 1)), (x, 2, -1), (x, 1, 1), (x, torch.float32), (x, y, z)]
    by += [
        (mask, x, y),
        (x, mask, 0.5),
        (whole, whole),
        (mask, mask),
        (x, y, 0.5),
        (x, x.transpose(1, 2)),
        (x, tensors(6, 3)),
    ]
    by += [
        (tensors(5, 6), tensors(6, 3)),
        (0.5, x),
        (x, 0.1, 0.9),
        (x, 0.5, 0.0),
        (x, lambda grad: grad),
        (x, tensors(4)),
    ]
    by += [
        (x, (slice(None), 1)),
        (x, (Ellipsis, None)),
        (x, (slice(None), slice(1, 3))),
        (x, (None, Ellipsis, 0)),
        (x, 0),
    ]
    by += [
        (whole, tensors(12, 3)),
        (x, (6,)),
        (x, (6,), lines, lines),
        (x, (1, 1)),
        (images, 2),
        (images, 3),
        (images, (3, 3)),
    ]
    by += [(images, None, 2.0), (tensors(5, 8, 3, 3), 2), (volumes, 2), (volumes, (2, 2, 2)), (x, None, 2)]
    by += [
        (x, x.new_zeros(4), x.new_ones(4), None, None, False),
        (x, 2, tensors(4), tensors(4)),
        (images, 2, tensors(4)),
    ]
    by += [(x, tensors(3, 4, 3)), (images, tensors(3, 4, 3, 3)), (volumes, tensors(3, 4, 3, 3, 3))]
    by += [(x, tensors(4, 3, 3)), (images, tensors(4, 3, 3, 3)), (volumes, tensors(4, 3, 3, 3, 3))]
    by += [([x, y], 1), ([x, tensors(5, 2, 6)], 1), ([x, y],), ([x, y], 2), (x, y, z, None), (images, images, images)]
    gates = {"lstm": 4, "gru": 3}.get(getattr(function, "__name__", ""), 1)
    weights = [tensors(7 * gates, 6), tensors(7 * gates, 7), tensors(7 * gates), tensors(7 * gates)]
    state = [tensors(1, 5, 7)] * 2 if gates == 4 else tensors(1, 5, 7)
    by.append((x, state, weights, True, 1, 0.0, False, False, True))
    return by


def with_rows(value: Any, dim: int) -> Any:
    """The same with own rows in place of tensors that have as many in this dimension."""
    if isinstance(value, Tensor) and value.dim() > dim and value.shape[dim] == 5 and value.dim() > 1:
        return as_own(split(value, dim, sizes=SIZES).clone())
    return [with_rows(each, dim) for each in value] if type(value) is list else value


def copied(value: Any) -> Any:
    if isinstance(value, list):
        return [copied(each) for each in value]
    return value.clone() if isinstance(value, Tensor) else value


def turned(value: Any, dim: int) -> Any:
    """The same with the rows in another dimension."""
    return value.movedim(0, dim).contiguous() if isinstance(value, Tensor) and value.dim() == 3 else value


REFUSED = (RuntimeError, TypeError, ValueError, IndexError, AttributeError, ArithmeticError)


class ThroughRows(Exception):
    """A rule leaves a call to rows."""


def judged(function: Any, arguments: Arguments, dim: int) -> bool:
    """Compares the own part of a result; returns whether the rule has one."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats a stack for CUDA: 1 ms
    try:
        plain = function(*copied(list(arguments)))
    except (*REFUSED, AssertionError):
        return False
    taken = [with_rows(copied(each), dim) for each in arguments]
    if not any(type(each) is OwnRows for each in itertools.chain(taken, *(e for e in taken if type(e) is list))):
        return False
    torch.default_generator.manual_seed(0)
    try:
        made = function(*taken)
    except ThroughRows:
        return False
    pairs = list(zip(_list(made), _list(plain), strict=True))
    for result, whole in pairs:
        if type(result) is OwnRows:
            assert isinstance(whole, Tensor)
            want = own_part(whole, result._place)
            assert result._local.shape == want.shape and result._local.dtype == want.dtype
            close = 1e-12 if want.dtype in (torch.float64, torch.complex128) else 1e-6  # integers make float32
            torch.testing.assert_close(result._local, want, rtol=close, atol=close, equal_nan=True)
            with torch._C.DisableTorchFunctionSubclass():
                assert result.shape == whole.shape
                assert not whole.is_contiguous() or result.is_contiguous()
        else:
            assert not isinstance(result, Tensor)
            assert result == whole or not isinstance(whole, (int, float, tuple, torch.dtype, torch.device))
    return True


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) and any(isinstance(e, Tensor) for e in value) else [value]


@pytest.fixture
def by_rule(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def through(*_: Any) -> None:
        raise ThroughRows

    monkeypatch.setattr(own, "_through_rows", through)
    yield


NAMES = {f"{getattr(each, '__module__', '')} {each!r}".partition(" at 0x")[0]: each for each in FUNCTIONS}
BY_THE_GATE = {"dropout", "retain_grad", "grad", "register_hook"}
"""Proven by the test of every operator, or of modules: they draw for all rows, or take part in a backward."""


@pytest.mark.usefixtures("by_rule")
@pytest.mark.parametrize("name", NAMES)
def test_a_function_gives_the_own_rows_of_its_result(name: str) -> None:
    function: Callable[..., Any] = NAMES[name]
    short = getattr(getattr(function, "__self__", None), "__name__", None) if name.endswith("objects>") else None
    short = short or getattr(function, "__name__", "")
    if short in BY_THE_GATE or any(each in name for each in ("'grad' of",)):
        return
    calls = 0
    for arguments, dim in itertools.product(arguments_of(function), (0, 1, 2)):
        with activate(RowsContext(rank=1, size=2)):
            calls += judged(function, tuple(turned(each, dim) for each in arguments), dim)
    assert calls, "no call shows it"
