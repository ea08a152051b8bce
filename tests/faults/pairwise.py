"""A selection of a grid's cells in which every two values of different axes meet, wherever they may."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

Cell = dict[str, str]
Pair = frozenset[tuple[str, str]]


def grid(axes: Mapping[str, Sequence[str]], allowed: Callable[[Cell], bool]) -> list[Cell]:
    """Every cell that makes sense."""
    cells = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [cell for cell in cells if allowed(cell)]


def pairs(cell: Cell) -> set[Pair]:
    """Returns the pairs of values in a cell."""
    return {frozenset(two) for two in itertools.combinations(cell.items(), 2)}


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Few of `cells` in which all the pairs occur that occur in any: greedily, the richest next."""
    each = [(cell, pairs(cell)) for cell in cells]
    missing = set().union(*(found for _, found in each))
    # A pair that few cells have must be met first: its cell is then free to bring others along.
    seldom = Counter(pair for _, found in each for pair in found)
    chosen = []
    while missing:
        # fsum: the same for every order of a set, so that all test processes choose the same cells.
        worth = lambda one: math.fsum(1 / seldom[pair] for pair in one[1] & missing)  # noqa: E731
        cell, found = max(each, key=worth)
        chosen.append(cell)
        missing -= found
    return chosen
