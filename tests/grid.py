"""Chooses which cells run: of grids those in which each two values meet, and of slow tests an eighth per commit.

    python -m tests.grid [FILE …]    # lists the cells that grids leave out, each with those that cover it

A plan counts as its keys: `shard=2,zero=1` has the values `shard=2` and `zero=1`. In what is kept, every value of a
parameter occurs, and every pair of values of two parameters that occurs in any cell: each task under each key's value.
`@pytest.mark.grid(each=2)` asks for less: every value of a parameter in two cells. `make soak` runs all cells.
`soaked` is for cells of no product: each is left out by hand, for another that covers it.

GRAPPE_DRAW, which `make test` sets to the commit, draws: of each slow test with several cells an eighth runs, at least
one cell, and of what is marked `costly` every eighth test, or every eighth module where the whole module is marked. So
all cells run within some commits. `make test DRAW=` runs all of them; so does pytest, where the variable is not set.
"""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TypeVar

import pytest

Cell = TypeVar("Cell")
Pair = frozenset[tuple[str, str]]
ALL = "all"
SHARE = 8
"""Of so many cells of a slow test one runs."""


def soaked(covered: Mapping[Cell, object]) -> list[Cell]:
    """Returns the cells, for GRAPPE_GRID=all; else none of them, as each is covered by what it is mapped to."""
    return list(covered) if os.environ.get("GRAPPE_GRID") == ALL else []


def thin(items: list[pytest.Item]) -> tuple[list[pytest.Item], dict[pytest.Item, list[pytest.Item]]]:
    """Returns the items to run, and those left out, each with the items that cover its pairs."""
    functions: dict[tuple[str, str], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("grid") and hasattr(item, "callspec"):
            functions[str(item.path), item.originalname].append(item)
    left_out: dict[pytest.Item, list[pytest.Item]] = {}
    for cells in functions.values():
        marker = cells[0].get_closest_marker("grid")
        assert marker
        left_out |= _covered(cells, marker.kwargs.get("each"))
    return [item for item in items if item not in left_out], left_out


def draw(items: list[pytest.Item], seed: str) -> list[pytest.Item]:
    """Returns the items that run for a seed: all quick tests, and a share of the slow tests' cells."""
    cells: dict[str, list[pytest.Item]] = defaultdict(list)
    resting: set[pytest.Item] = set()
    for item in items:
        costly = next(item.iter_markers_with_node("costly"), None)
        if costly:
            if _lot(costly[0].nodeid.partition("[")[0], seed) % SHARE:
                resting.add(item)
        elif item.get_closest_marker("slow") and hasattr(item, "callspec"):
            cells[item.nodeid.partition("[")[0]].append(item)
    for several in cells.values():
        several.sort(key=lambda item: _lot(item.nodeid, seed))
        resting.update(several[math.ceil(len(several) / SHARE) :])
    return [item for item in items if item not in resting]


def _lot(name: str, seed: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def _covered(cells: list[pytest.Function], each: int | None) -> dict[pytest.Item, list[pytest.Item]]:
    pairs = {cell: _singles(cell) if each else _pairs(cell) for cell in cells}
    counts = Counter(itertools.chain.from_iterable(pairs.values()))
    missing = {pair: min(each or 1, count) for pair, count in counts.items()}
    chosen: list[pytest.Function] = []
    while missing:
        # A rare pair weighs more: the cell that meets it is free to bring others along. The same in every process.
        def worth(cell: pytest.Function) -> float:
            return math.fsum(1 / counts[pair] for pair in pairs[cell] if pair in missing)

        best = max((cell for cell in cells if cell not in chosen), key=worth)
        chosen.append(best)
        for pair in pairs[best] & set(missing):
            missing[pair] -= 1
            if not missing[pair]:
                del missing[pair]
    return {cell: _witnesses(pairs[cell], chosen, pairs) for cell in cells if cell not in chosen}


def _witnesses(
    pairs: set[Pair], chosen: list[pytest.Function], of_each: dict[pytest.Function, set[Pair]]
) -> list[pytest.Item]:
    """Returns few of the chosen cells that have all of a cell's pairs."""
    missing, witnesses = set(pairs), []
    while missing:
        witnesses.append(max(chosen, key=lambda cell: len(of_each[cell] & missing)))
        missing -= of_each[witnesses[-1]]
    return witnesses


def _values(name: str, value: object) -> set[tuple[str, str]]:
    """Returns a parameter's value, and the keys' values of a plan's text."""
    text = value if isinstance(value, str) else repr(value) if isinstance(value, (int, float, bool)) else str(id(value))
    keys = {(name, part) for part in text.split(",")} if isinstance(value, str) and "=" in text else set()
    return {(name, text), *keys}


def _singles(cell: pytest.Function) -> set[Pair]:
    return {frozenset([(name, str(value))]) for name, value in cell.callspec.params.items()}


def _pairs(cell: pytest.Function) -> set[Pair]:
    """Returns the pairs of values of two parameters, of a plan by its keys, and each value by itself."""
    parameters = [_values(name, value) for name, value in sorted(cell.callspec.params.items())]
    keys = [{pair for pair in values if "," not in pair[1]} or values for values in parameters]
    pairs = {
        frozenset(two) for left, right in itertools.combinations(keys, 2) for two in itertools.product(left, right)
    }
    return pairs | {frozenset([value]) for values in parameters for value in values}


def asks_for_all(config: pytest.Config) -> bool:
    """Whether no cell is to be left out: by the variable, or because tests are named."""
    return os.environ.get("GRAPPE_GRID") == ALL or any("::" in argument for argument in config.args)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "grid: cells of which `make test` runs those in which each two values meet")
    config.addinivalue_line("markers", "costly: takes over four seconds of CPU: `make test` draws one of eight")


def pytest_report_header(config: pytest.Config) -> str | None:
    seed = os.environ.get("GRAPPE_DRAW")
    return f"an eighth of the slow tests' cells, drawn by DRAW={seed} (DRAW= runs all)" if seed else None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if asks_for_all(config):
        return
    # What -k chooses is drawn from whole grids: without a draw, all that it names runs.
    kept, left_out = (items, {}) if config.option.keyword else thin(items)
    if seed := os.environ.get("GRAPPE_DRAW"):
        kept = draw(kept, seed)
    if len(kept) < len(items):
        kept_ones = set(kept)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept_ones])
        items[:] = kept
    if os.environ.get("GRAPPE_GRID") == "list":
        for item, covering in left_out.items():
            print(f"left out: {item.nodeid}\n    covered by {'; '.join(_cell(other) for other in covering)}")
        print(f"{len(left_out)} cells left out, {len(items)} tests kept")


def _cell(item: pytest.Item) -> str:
    return item.name.partition("[")[2].rstrip("]")


def main(files: Iterable[str]) -> int:
    """Lists the cells that are left out of the files, by default of all tests."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "not soak", *files]
    environment = {**os.environ, "GRAPPE_GRID": "list"}
    done = subprocess.run(command, env=environment, check=False, stdout=subprocess.PIPE, text=True)
    print("\n".join(line for line in done.stdout.splitlines() if not line.startswith("tests/") or "\n" in line))
    return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
