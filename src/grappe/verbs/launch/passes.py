"""Records a run of a loop's body, and finds by which rules the records of parts make up the whole batch's.

Shapes: gradients by the number of the parameter; a batch of N rows, parts of k and N - k.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from grappe.private_api.torch import tree_leaves
from grappe.verbs.launch.request import Rule

TOLERATED = 1e-4
"""|whole - parts| / |whole| that rounding explains; a fault of one row among 64 is a hundred times as large."""
REDUCTIONS: dict[str, Rule] = {
    "sum": "sum", "count_nonzero": "sum", "mean": "mean", "max": "most", "amax": "most", "any": "most",
    "min": "least", "amin": "least", "all": "least",
}  # fmt: skip
CHOOSING = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive")
"""torch's functions whose result has as many rows as the numbers say."""
UNCHANGED = ("detach", "cpu", "to", "float", "double", "long", "int", "__get__")
"""torch's functions that return the same numbers; the last is `tensor.data`."""
NUMBER, INTEGER = re.compile(r"[-+]?\d[\d.]*(e[-+]?\d+)?"), re.compile(r"(?<![\d.])\d+(?![\d.])")


@dataclasses.dataclass(kw_only=True)
class Pass:
    """Record of one run of the loop's body."""

    gradients: dict[str, dict[int, Tensor]] = dataclasses.field(default_factory=lambda: defaultdict(dict))
    """By the place of the backward, and the number of the parameter: what it added."""
    values: dict[str, list[NDArray[Any]]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    """Numbers and arrays that each place reads."""
    integers: set[str] = dataclasses.field(default_factory=set)
    reductions: dict[str, Rule] = dataclasses.field(default_factory=dict)
    """By the place: how what it reads was made, where it is torch's own sum, mean, maximum or minimum."""
    of_rows: set[str] = dataclasses.field(default_factory=set)
    """Places that read what is computed from the batch's rows, or from as many others."""
    lengths: dict[str, list[int]] = dataclasses.field(default_factory=lambda: defaultdict(list))
    """Numbers of rows, or of numbers that fit a mask, that each place counts."""
    first: dict[int, Tensor] = dataclasses.field(default_factory=dict)
    """The gradients at the first optimizer step, after which a run's weights are others."""
    counts: list[float] = dataclasses.field(default_factory=list)
    """Numbers that the cross-entropies divide by."""
    numbers: list[list[float]] = dataclasses.field(default_factory=list)
    """Those that each of torch's functions is given."""
    reads_told: bool = False
    """Whether a value that is read is computed with what a place under trial is told: `right.sum() / len(labels)`."""
    printed: dict[str, str] = dataclasses.field(default_factory=lambda: defaultdict(str))
    """By the place that prints."""
    grown: dict[tuple[Any, ...], NDArray[Any]] = dataclasses.field(default_factory=dict)
    """By the script's variable: by how much its `_sizes` have grown, and the sum of its numbers afterwards."""
    drawn: str = ""
    stepped: bool = False
    draws_beside_torch: bool = False
    """Whether NumPy's or Python's generator has drawn."""


def shares_of(all_rows: Pass, left: Pass, of_rows: float) -> dict[Rule, float]:
    """Returns the left part's share of each kind of mean: first of what a cross-entropy counts, where it is known."""
    counted = {own / of for own, of in zip(left.counts, all_rows.counts, strict=False) if of}
    return {"counted": counted.pop(), "mean": of_rows} if len(counted) == 1 else {"mean": of_rows}


def loss_rule(
    line: str, all_rows: Pass, left: Pass, right: Pass, shares: Mapping[Rule, float]
) -> tuple[Rule | None, float]:
    """Returns how the parts' gradients make up the whole's; None: not at all, and how far they are from it."""
    distances: dict[Rule, float] = {}
    weights: dict[Rule, tuple[float, float]] = {rule: (share, 1 - share) for rule, share in shares.items()}
    weights["sum"] = 1.0, 1.0
    for rule, (first, second) in weights.items():
        together = {
            number: left.gradients[line].get(number, torch.zeros(())) * first
            + right.gradients[line].get(number, torch.zeros(())) * second
            for number in all_rows.gradients[line]
        }
        distances[rule] = distance_of(all_rows.gradients[line], together)
    fitting = [rule for rule, distance in distances.items() if distance < TOLERATED]
    return (fitting[0] if fitting else None), min(distances.values())


def distance_of(a: Mapping[int, Tensor], b: Mapping[int, Tensor]) -> float:
    """Computes |a - b| / |a| over all tensors together."""
    apart = sum(
        float((tensor - b.get(number, torch.zeros(()))).double().square().sum()) for number, tensor in a.items()
    )
    size = sum(float(tensor.double().square().sum()) for tensor in a.values())
    return (apart / size) ** 0.5 if size else float(apart > 0)


def _alike(values: Sequence[NDArray[Any]], others: Sequence[NDArray[Any]]) -> bool:
    return len(values) == len(others) and all(
        a.shape == b.shape and np.abs(a - b).max(initial=0) <= TOLERATED * np.abs(b).max(initial=0)
        for a, b in zip(values, others, strict=True)
    )


def _wide(line: str, *passes: Pass) -> list[list[NDArray[Any]]]:
    """Returns what a line has read in each pass, in a type whose differences do not overflow."""
    return [[np.asarray(value * 1.0) for value in each.values[line]] for each in passes]


def _mean(share: float, a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    return share * a + (1 - share) * b


def fitting_rules(line: str, all_rows: Pass, left: Pass, right: Pass, shares: Mapping[Rule, float]) -> list[Rule]:
    """Returns by which rules the parts' values make up the whole's, the likeliest for the value's type first."""
    if len({len(each.values[line]) for each in (all_rows, left, right)}) > 1:
        return []
    triples = list(zip(*_wide(line, all_rows, left, right), strict=True))
    if any(every_row.shape != a.shape or a.shape != b.shape for every_row, a, b in triples):
        rows = [np.concatenate([a, b]) if a.shape[1:] == b.shape[1:] else a for _, a, b in triples]
        return ["rows"] if _alike(rows, [every_row for every_row, *_ in triples]) else []
    rules: dict[Rule, Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]] = {
        **{rule: functools.partial(_mean, share) for rule, share in shares.items()},
        "sum": np.add,
        "most": np.maximum,
        "least": np.minimum,
        "same": lambda a, b: a if np.array_equal(a, b) else a * np.nan,
    }
    if line in all_rows.integers:
        rules = {name: rules[name] for name in ("same", "sum", "most", "least")}

    def holds(rule: Callable[[NDArray[Any], NDArray[Any]], NDArray[Any]]) -> bool:
        return _alike([rule(a, b) for _, a, b in triples], [every_row for every_row, *_ in triples])

    return [name for name, rule in rules.items() if holds(rule)]


def may_be_chance(line: str, fitting: Sequence[Rule], all_rows: Pass, left: Pass, right: Pass) -> bool:
    """Returns whether other rows may show another rule: the part with the minimum gives that of all, for instance."""
    if "same" in fitting or ((made_by := all_rows.reductions.get(line)) in ("most", "least") and made_by in fitting):
        return False  # where it is "same", a run ends where processes differ
    every_row, *parts = _wide(line, all_rows, left, right)
    return not fitting or not {"most", "least"}.isdisjoint(fitting) or any(_alike(part, every_row) for part in parts)


def clearest(fitting: Sequence[Rule], made_by: Rule | None) -> Rule | None:
    """Returns the rule that fitted each cut; "same", which a run checks, where there are several."""
    if made_by in fitting:
        return made_by
    clear = [rule for rule in fitting if rule != "mean" or "counted" not in fitting]
    return "same" if len(clear) > 1 else next(iter(clear), None)


def integers_of(text: str) -> NDArray[Any]:
    """Returns the whole numbers in a text."""
    return np.array([float(number) for number in INTEGER.findall(text)])


def as_rows_do(every_row: NDArray[Any], part: NDArray[Any], rows: int, of: int) -> bool:
    """Returns whether any number of every row's is to the part's what the rows are."""
    if every_row.shape != part.shape:
        return False
    return bool(np.any((every_row != 0) & (np.abs(part * of - every_row * rows) <= 1e-9 * np.abs(every_row * of))))


class Reductions(TorchFunctionMode):
    """Notes which tensors are torch's own reductions: a count of 0, or a maximum of 1.0, does not show its rule.

    And which have rows that numbers choose: where a mask takes each row, their count does not show it. And which are
    computed from a batch: of an evaluation's counts, 0 at first, each process has them all. And which are computed from
    other numbers than in an earlier pass: 0 / rows does not show it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.rules, self.chosen, self.told = WeakIdKeyDictionary(), WeakIdKeyDictionary(), WeakIdKeyDictionary()
        self.of_rows, self.rows = WeakIdKeyDictionary(), 0
        self.numbers, self.before = list[list[float]](), list[list[float]]()
        """Of the functions of this pass, and of the one to compare with; []: none."""

    def begin(self, batch: Iterable[object], rows: int) -> None:
        """Begins a pass with the tensors of a batch."""
        self.of_rows.clear()
        self.of_rows.update((each, True) for each in batch if isinstance(each, Tensor))
        self.rows = rows

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        value = func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        leaves = tree_leaves((args, kwargs))
        tensors = [each for each in leaves if isinstance(each, Tensor)]
        changed = args[0] if name == "__setitem__" else value
        made = dict.fromkeys((each for each in tree_leaves(changed) if isinstance(each, Tensor)), True)
        if any(each in self.of_rows for each in tensors) or any(each.shape[:1] == (self.rows,) for each in made):
            self.of_rows.update(made)
        if isinstance(value, Tensor | list | tuple):
            self.numbers.append([each for each in leaves if isinstance(each, int | float)])
            others = self.before[len(self.numbers) - 1 : len(self.numbers)]
            if (others and others != self.numbers[-1:]) or any(each in self.told for each in tensors):
                self.told.update(made)
            masked = name == "__getitem__" and any(each.dtype is torch.bool for each in tensors[1:])
            if masked or name in CHOOSING or any(each in self.chosen for each in tensors):
                self.chosen.update(made)
        if isinstance(value, Tensor):
            rule = REDUCTIONS.get(name)
            if name in UNCHANGED and args and isinstance(args[0], Tensor):
                rule = self.rules.get(args[0])
            if rule is not None:
                self.rules[value] = rule
        return value
