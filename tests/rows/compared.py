"""Runs a call of torch's databases on rows, placed by a seeded draw, and says how it differs from plain tensors."""

from __future__ import annotations

import random
import traceback
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from grappe.errors import GrappeError
from grappe.rows.context import RowsContext
from grappe.rows.messages import ProcessAstray
from grappe.rows.own import as_own, as_rows
from grappe.rows.tensor import RULES, Placement, Rows, from_local, full, own_local, split
from tests.rows.samples import Call, Outcome, copy, noise, seed
from tests.rows.world import OutOfStep

RELATIVE = {torch.float32: 1e-4, torch.complex64: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FP64 = 1e-9
"""Relative to a number, and a hundredth of it to the largest: sums of parts round otherwise than a sum of all."""
NEVER_SUMS = (torch.bool, torch.uint16, torch.uint32, torch.uint64)
NO_ROWS = 0.15
"""Chance that a process has no rows, where each could have some."""


@dataclass(frozen=True, kw_only=True)
class State:
    """Placement of a tensor: `kind` names a function of `PLACED`."""

    kind: str
    placement: Placement | None = None
    terms: int = 0
    """Seed of a sum's terms."""

    def __str__(self) -> str:
        return self.kind if self.placement is None else f"{self.kind} {tuple(self.placement)}"


@dataclass(kw_only=True)
class Verdict:
    """Outcome of a call on rows."""

    call: str
    operator: str
    size: int
    states: str
    kind: str
    """"split", "gathered", "refused" or "wrong"; "no rows" where only sums and views of them were placed."""
    why: str = ""
    gathered: list[str] = field(default_factory=list)
    rules: list[str] = field(default_factory=list)
    """Operators whose rules were asked for the first time."""
    world: str = "rows"
    """Kind of the world: see `Turn`."""
    seen: frozenset[tuple[str, int]] = frozenset()


# ---- Placing -----------------------------------------------------------------------------------------------
def _own(tensor: Tensor, placement: Placement, rank: int) -> Tensor:
    """This process's rows, found by index: not by the code that is tested."""
    first, total = sum(placement.sizes[:rank]), sum(placement.sizes)
    rows = [o * total + first + i for o in range(placement.outer) for i in range(placement.sizes[rank])]
    return tensor.index_select(placement.dim, torch.tensor(rows, dtype=torch.int64))


def _term(tensor: Tensor, rank: int, size: int, terms: int) -> Tensor:
    """A process's term of a sum that is exact: of each number two processes have 2 - 1, 0.5 + 0.5 or 1 + 0 times it."""
    floating = tensor.dtype.is_floating_point or tensor.dtype.is_complex
    generator = torch.Generator().manual_seed(terms)
    way = torch.randint(0, 3 if floating else 2, tensor.shape, generator=generator)
    if floating:  # infinities, NaN, and what twice is infinite
        way = torch.where(tensor.isfinite() & (tensor.abs() < 1e100), way, 1)
    shares = [(tensor + tensor, -tensor), (tensor, torch.zeros_like(tensor))]
    if floating:
        shares.append((tensor / 2, tensor / 2))
    order = torch.rand((size, *tensor.shape), generator=generator).argsort(0)  # which two, by number
    made = torch.zeros_like(tensor)
    for number, share in enumerate(shares):
        for place in (0, 1):
            made = torch.where((way == number) & (order[place] == rank), share[place], made)
    return made


def _split(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    """Known whole on every process, as a loader's batch is."""
    return split(tensor, state.placement.dim, sizes=state.placement.sizes)


def _shared(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    """The script has the plain tensor too, and writes to it."""
    numbers = tensor.clone()
    made = split(tensor.zero_(), state.placement.dim, sizes=state.placement.sizes, shared=True)
    tensor.copy_(numbers)
    return made


def _computed(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    """Rows of which no process knows the others'."""
    return split(tensor, state.placement.dim, sizes=state.placement.sizes).clone()


def _loaded(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    """Rows that this process alone has loaded."""
    return from_local(_own(tensor, state.placement, rank), state.placement)


def _partial(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    """The sum of a row of each process."""
    terms = torch.stack([_term(tensor, each, size, state.terms) for each in range(size)])
    return split(terms, 0, sizes=(1,) * size).clone().sum(0, dtype=tensor.dtype)


def _settled(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    """A sum that was read."""
    made = _partial(tensor, state, rank, size)
    full(made)
    return made


def _ghost(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    """A row of a larger tensor: a view that no process's memory shows."""
    base = torch.stack([torch.zeros_like(tensor), tensor, torch.ones_like(tensor)])
    sizes = (2, 1) if size == 2 else (1, 0, 2)
    return split(base, 0, sizes=sizes).clone()[1]


def _plain(tensor: Tensor, state: State, rank: int, size: int) -> Tensor:
    return tensor


PLACED: dict[str, Callable[[Tensor, State, int, int], Tensor]] = {
    "plain": _plain,
    "split": _split,
    "shared": _shared,
    "computed": _computed,
    "loaded": _loaded,
    "partial": _partial,
    "settled": _settled,
    "ghost": _ghost,
}
ALWAYS = State(kind="plain")


def placement_of(value: Tensor) -> Placement | None:
    """Placement of a result's rows; None if it has no rows."""
    value = as_rows(value)
    placement = value._cell.layout.placement if type(value) is Rows else None
    return placement if type(placement) is Placement else None


# ---- Drawing -----------------------------------------------------------------------------------------------
class Chance(random.Random):
    """Random numbers of which placements are drawn, outside of a module or within."""

    within = False


def _sizes(rows: int, size: int, chance: random.Random) -> tuple[int, ...]:
    """Uneven rows of each process; at times a process has none."""
    least = 0 if rows < size or chance.random() < NO_ROWS else 1
    if isinstance(chance, Chance) and chance.within and rows >= 2 * size:
        least = 2  # with fewer, a module has rows
    cuts = sorted(chance.randint(0, rows - least * size) for _ in range(size - 1))
    return tuple(b - a + least for a, b in zip([0, *cuts], [*cuts, rows - least * size], strict=True))


def _of_rows(tensor: Tensor, dim: int, size: int, chance: random.Random, sizes: tuple[int, ...] | None = None) -> State:
    rows = tensor.shape[dim]
    kind = chance.choice(("split", "computed", "computed", "loaded", "shared"))
    if kind == "loaded" and not tensor.is_contiguous():
        kind = "computed"
    outers = [outer for outer in (2, 3) if rows >= 2 * outer and rows % outer == 0]
    if sizes is not None:
        return State(kind=kind, placement=Placement(dim, sizes))
    if outers and chance.random() < 0.15 and tensor.is_contiguous():
        outer = chance.choice(outers)
        return State(kind="loaded", placement=Placement(dim, _sizes(rows // outer, size, chance), outer))
    return State(kind=kind, placement=Placement(dim, _sizes(rows, size, chance)))


def _any(tensor: Tensor, size: int, chance: random.Random) -> State:
    dims = [dim for dim, rows in enumerate(tensor.shape) if rows]
    kinds = ["plain"] + ["rows"] * 4 * bool(dims)
    if tensor.is_contiguous():
        kinds += ["ghost"] + ["partial", "settled"] * (tensor.dtype not in NEVER_SUMS)
    kind = chance.choice(kinds)
    if kind == "rows":
        return _of_rows(tensor, chance.choice(dims), size, chance)
    return State(kind=kind, terms=chance.randint(0, 10**6))


def drawn(leaves: tuple[Tensor, ...], size: int, chance: random.Random, draw: int = 0) -> list[State]:
    """A placement of each tensor: mostly rows of one dimension that fit, at times any; at least one is not plain.

    Odd draws go through the dimensions of all tensors in turn.
    """
    states = [ALWAYS] * len(leaves)
    way = chance.random()
    every = [(index, dim) for index, each in enumerate(leaves) for dim, rows in enumerate(each.shape) if rows]
    if way < 0.7 or (
        draw % 2 and every
    ):  # the rows of a batch: one tensor leads, those that have as many rows follow or are plain
        leads = [index for index, each in enumerate(leaves) if any(each.shape)]
        if leads:
            lead = leads[0] if chance.random() < 0.6 else chance.choice(leads)
            tensor = leaves[lead]
            dims = [dim for dim, rows in enumerate(tensor.shape) if rows]
            dim = dims[0] if chance.random() < 0.5 else chance.choice(dims)
            if draw % 2:
                lead, dim = every[draw // 2 % len(every)]
                tensor = leaves[lead]
            states[lead] = _of_rows(tensor, dim, size, chance)
            placement = states[lead].placement
            follow = chance.random() < 0.7
            for index, each in enumerate(leaves):
                from_end = dim - tensor.dim() + each.dim()
                fits = [d for d in (dim, from_end) if 0 <= d < each.dim() and each.shape[d] == tensor.shape[dim]]
                if index != lead and fits and follow and placement.outer == 1:
                    states[index] = _of_rows(each, chance.choice(fits), size, chance, placement.sizes)
            return states
    if way < 0.8:  # one alone
        index = chance.randrange(len(leaves))
        states[index] = _any(leaves[index], size, chance)
    else:
        states = [_any(each, size, chance) for each in leaves]
    if all(each.kind == "plain" for each in states):
        if any(leaves[0].shape) and leaves[0].dim():
            states[0] = _of_rows(leaves[0], 0, size, chance)
        else:
            states[0] = State(kind="partial" if leaves[0].dtype not in NEVER_SUMS else "ghost", terms=1)
    return states


# ---- Running and comparing ---------------------------------------------------------------------------------
@dataclass(frozen=True, kw_only=True)
class Answer:
    """One process's part of a verdict."""

    error: str = ""
    refused: bool = False
    """Whether the error is one that grappe raises on purpose."""
    difference: str = ""
    bits: tuple[tuple[str, int], ...] = ()
    """A hash of each value's numbers, which are the same on all processes."""
    gathered: tuple[str, ...] = ()
    """Operators without a rule for this placement, and "rows" where rows were sent for any reason."""
    rules: tuple[str, ...] = ()
    """Operators that met rows here for the first time in this process, for which a rule was found."""
    seen: frozenset[tuple[str, int]] = frozenset()
    """Files and lines that it ran, where they are recorded."""


def answer(call: Call, draw: int, context: RowsContext, *, undefined: bool = False, within: bool = False) -> Answer:
    """Runs a call on rows in this process, and compares it with the reference."""
    rank, size = context.rank, context.size
    states, chance = placements(call, draw, size, within)
    ways = [chance.random() for _ in range(8)]
    made = chance.randint(0, 10**6)
    context.trace = context.messages = 0  # a call before may have ended in an error on one process
    leaves = []

    def cotangent(index: int, output: Tensor) -> Tensor:
        value = noise(output, f"{call.name}/{index}")
        way = ways[index % 8]
        if way < 0.5 and (placement := placement_of(output)) is not None:
            return _loaded(value, State(kind="loaded", placement=placement), rank, size)
        if way < 0.75:
            return value
        state = _any(value, size, random.Random(f"{made} {index}"))
        return PLACED[state.kind](value, state, rank, size)

    torch.default_generator.manual_seed(seed(call.name))
    try:
        origins = [copy(each).detach() for each in call.leaves]
        for tensor, origin, state in zip(call.leaves, origins, states, strict=True):
            placed = PLACED[state.kind](origin, state, rank, size)
            placed = placed.requires_grad_() if tensor.requires_grad else placed
            leaves.append(as_own(placed) if within else placed)
        context.gathered.clear()
        sent = context.sent["gather"] = 0

        def read(value: Any) -> Any:
            nonlocal sent
            before = context.sent["gather"]
            made = _read(value)
            sent += context.sent["gather"] - before  # not the call's
            return made

        outcome = call.run(leaves, cotangent, read)
        gathered = {at.operator for at in context.gathered} | ({"rows"} if context.sent["gather"] > sent else set())
        outcome.values.append(("random state", torch.get_rng_state()))
        if call.form in ("call", "module"):
            outcome.values += [(f"argument {index} after", _read(each)) for index, each in enumerate(leaves)]
        apart = _apart(leaves, origins, states)
    except GrappeError as error:
        return Answer(error=f"{type(error).__name__}: {error}"[:300], refused=not isinstance(error, ProcessAstray))
    except OutOfStep as error:
        return Answer(error=f"out of step: {error}"[:300])
    except Exception as error:
        at = traceback.extract_tb(error.__traceback__)[-1]
        return Answer(error=f"{type(error).__name__}: {error}"[:300] + f" ({Path(at.filename).name}:{at.lineno})")
    return Answer(
        difference=difference(call.reference, outcome, undefined, strides=not context.exchanges and not within)
        or apart,
        bits=() if undefined else tuple(_bits(outcome)),
        gathered=tuple(sorted(gathered)),
        rules=_new_rules(),
    )


def _apart(leaves: list[Tensor], origins: list[Tensor], states: list[State]) -> str:
    """Whether rows and the plain tensor that shares their numbers have other numbers after a write to either."""
    for index, (leaf, origin, state) in enumerate(zip(map(as_rows, leaves), origins, states, strict=True)):
        if state.kind == "shared" and not leaf.requires_grad and leaf.shape == origin.shape:  # t_ changes that
            if not torch.equal(full(leaf).nan_to_num(), origin.nan_to_num()):
                return f"argument {index} and the plain tensor that shares it: {_text(leaf)} and {_text(origin)}"
            origin.zero_()
            if full(leaf).any() or full(leaf.clone()).any():
                return f"argument {index} after a write to the plain tensor that shares it: {_text(leaf)}"
    return ""


_asked: set[Any] = set()


def _new_rules() -> tuple[str, ...]:
    if len(RULES) == len(_asked):  # nearly always
        return ()
    new = [operator for operator in RULES if operator not in _asked]
    _asked.update(new)
    return tuple(str(operator).removeprefix("aten.") for operator in new)


def placements(call: Call, draw: int, size: int, within: bool) -> tuple[list[State], random.Random]:
    """The drawn placement of each argument, and the chance for what is drawn later."""
    chance = Chance(f"{call.name} {draw} {size}")
    chance.within = within
    return drawn(call.leaves, size, chance, draw), chance


def judge(call: Call, draw: int, answers: list[Answer], *, within: bool = False) -> Verdict:
    """Judges a call by what its processes answer."""
    states, _ = placements(call, draw, len(answers), within)
    kind, why = "split" if any(each.placement for each in states) else "no rows", ""
    if any(each.error for each in answers):
        kind = "refused" if all(each.refused for each in answers) else "wrong"
        why = " | ".join(each.error for each in answers)
        if len({each.error for each in answers}) == 1:
            why = answers[0].error
    elif any(each.difference for each in answers):
        rank = next(rank for rank, each in enumerate(answers) if each.difference)
        kind, why = "wrong", f"process {rank}: {answers[rank].difference}"
    elif any(each.gathered for each in answers):
        kind = "gathered"  # LAPACK's bits may differ by where in memory its arguments are
    elif len({each.bits for each in answers}) > 1:
        names = [a[0] for each in answers for a, b in zip(answers[0].bits, each.bits, strict=True) if a != b]
        kind, why = "wrong", f"processes have other bits: {names[:1]}"
    return Verdict(
        call=f"{call.name} draw {draw}", operator=call.operator, size=len(answers), kind=kind, why=why,
        states=", ".join(map(str, states)), gathered=sorted({at for each in answers for at in each.gathered}),
        rules=sorted({name for each in answers for name in each.rules}),
        seen=frozenset().union(*(each.seen for each in answers)),
    )  # fmt: skip


def _of_parts(value: Any) -> Tensor:
    """The same by the parts that the processes hold, whatever numbers of all rows they also keep."""
    placement = value._cell.layout.placement
    return from_local(own_local(value).clone(), placement) if type(placement) is Placement else value.clone()


def _keeps_all(cell: Any) -> bool:
    """Whether `full` reads something else than the parts that the processes hold."""
    views = cell.ghost is not None or (cell.family is not None and cell.family.origin is not None)
    return type(cell.layout.placement) is not Placement or views or cell.is_current()


class Read:
    """A value that was read: its numbers, also as its parts have them, and what a script sees of it."""

    def __init__(self, value: Tensor) -> None:
        value = as_rows(value)
        self.shape, self.dtype = tuple(value.shape), value.dtype
        self.stride = value.stride() if value.layout is torch.strided else ()
        self.requires_grad = value.requires_grad
        detached = value.detach()
        self.again = full(_of_parts(detached)).clone() if type(value) is Rows and _keeps_all(detached._cell) else None
        self.plain = full(detached).clone() if value.layout is torch.strided else value


def _read(value: Any) -> Any:
    return Read(value) if isinstance(value, Tensor) else value


def difference(reference: Outcome, outcome: Outcome, undefined: bool, *, strides: bool = True) -> str:
    """The first difference; empty if there is none."""
    if reference.shape != outcome.shape:
        return f"outputs {outcome.shape} instead of {reference.shape}"
    if [name for name, _ in outcome.values] != [name for name, _ in reference.values]:
        return f"{[name for name, _ in outcome.values]} instead of {[name for name, _ in reference.values]}"
    for (name, want), (_, got) in zip(reference.values, outcome.values, strict=True):
        # A gradient's strides are those of the formula that torch takes, which may be another for a subclass of Tensor.
        why = _differs(want, got, undefined, strides=strides and "gradient" not in name)
        if why:
            return f"{name}: {why}"
    return ""


def _differs(want: Any, got: Any, undefined: bool, *, strides: bool = True) -> str:
    if not isinstance(want, Tensor):
        if isinstance(got, Read) or type(got) is not type(want):
            return f"{_text(got)} instead of {want!r}"
        if isinstance(want, (float, complex)):
            return (
                "" if want == got or want != want or abs(want - got) <= 1e-9 * abs(want) else f"{got} instead of {want}"
            )
        if isinstance(want, (int, str, bool, type(None), torch.dtype, torch.Size)):
            return "" if want == got else f"{got} instead of {want}"
        return ""
    if isinstance(got, Tensor):
        return "" if torch.equal(want, got) else "another state"
    if not isinstance(got, Read):
        return f"{got!r} instead of a tensor"
    if got.shape != tuple(want.shape) or got.dtype != want.dtype:
        return f"{got.shape} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
    if want.layout is not torch.strided:
        want, plain = want.to_dense(), got.plain.to_dense()
        return _numbers(want, plain)
    if (
        strides
        and want.numel()
        and any(a != b for a, b, size in zip(got.stride, want.strides, want.shape, strict=True) if size > 1)
    ):
        return f"strides {got.stride} instead of {want.strides} of {got.shape}"
    if undefined:
        return ""
    why = _numbers(want, got.plain)
    if not why and got.again is not None:
        why = _numbers(want, got.again)
        why = f"its parts: {why}" if why else ""
    return why


def _numbers(want: Tensor, got: Tensor) -> str:
    if want.shape != got.shape or want.dtype != got.dtype:
        return f"plain {tuple(got.shape)} {got.dtype} instead of {tuple(want.shape)} {want.dtype}"
    if want.dtype is torch.complex32:
        want, got = want.to(torch.complex64), got.to(torch.complex64)
    if want.is_conj() or want.is_neg():
        want = want.resolve_conj().resolve_neg()
    if torch.equal(want, got):
        return ""
    if not (want.dtype.is_floating_point or want.dtype.is_complex):
        return f"{_text(got)} instead of {_text(want)}"
    relative = RELATIVE.get(want.dtype, FP64)
    finite = want[want.isfinite()].abs()
    absolute = relative / 100 * max(1.0, float(finite.max()) if finite.numel() else 0.0)
    if torch.allclose(got, want, relative, absolute, equal_nan=True):
        return ""
    return f"{_text(got)} instead of {_text(want)}"


def _bits(outcome: Outcome) -> Iterator[tuple[str, int]]:
    for name, value in outcome.values:
        if isinstance(value, Read) and value.plain.layout is torch.strided:
            numbers = value.plain.resolve_conj().resolve_neg()
            if numbers.dtype in (torch.bfloat16, torch.complex32):
                numbers = numbers.to(torch.complex64)
            yield name, zlib.crc32(numbers.numpy().tobytes())
        elif isinstance(value, float):
            yield name, hash(str(value))


def _text(value: Any) -> str:
    value = full(value.plain if isinstance(value, Read) else value)
    if isinstance(value, Tensor):
        return (
            f"{[float(f'{each:.4g}') if isinstance(each, float) else each for each in value.reshape(-1)[:6].tolist()]}"
        )
    return repr(value)[:80]
