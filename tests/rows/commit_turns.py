"""Chooses the turns of the test of every operator that judge a commit: enough of them run each line of rows.

`python -m tests.rows.commit_turns` runs all turns, sees which lines of `src/grappe/rows` each runs (in a quarter of an
hour), and writes `commit_turns.txt`. A turn is left to the night if ENOUGH others run each line that it runs, and its
operator, with the kind of its verdict, is there already. What is new since the list was written judges a commit too.
"""

from __future__ import annotations

import functools
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:  # torch's databases, which lock torch's flags for all tests of the process
    from tests.rows.every_operator import Turn

ENOUGH = 10
"""Turns that run a line: planted alterations that all turns catch, these catch too, in 30 % of the time."""
LIST = Path(__file__).with_suffix(".txt")
OPENING = "# Turns that judge a commit, a bit each; how many are split. Written by `python -m tests.rows.commit_turns`"


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Outcome of a turn."""

    kind: str
    lines: frozenset[object]
    """Lines of rows that it ran."""
    rules: frozenset[str]
    """Rules of the tables that it was the first to ask for."""
    seconds: float


def chosen(todo: list[Turn], ran: list[Ran]) -> set[int]:
    """Numbers of the turns of a commit: cheap ones first, those that are split before others."""
    can_split = {turn.call.operator for turn, each in zip(todo, ran, strict=True) if each.kind == "split"}
    runs, kept, ways = Counter[object](), set[int](), set[object]()
    for number in sorted(range(len(todo)), key=lambda n: ran[n].seconds / (2 if ran[n].kind == "split" else 1)):
        operator, each = todo[number].call.operator, ran[number]
        new = set(each.rules)
        kind = each.kind if each.kind in ("split", "refused", "wrong") else "other"
        if todo[number].world != "exchanges" and (kind != "other" or operator not in can_split):
            new.add((operator, kind))
        if not new <= ways or any(runs[line] < ENOUGH for line in each.lines):
            kept.add(number)
            runs.update(each.lines)
            ways |= new
    return kept


def write(todo: list[Turn], ran: list[Ran], kept: set[int]) -> None:
    """Writes the list: by world, bits and number of split turns, the operators."""
    bits: dict[tuple[str, str], str] = defaultdict(str)
    split = Counter[tuple[str, str]]()
    for number, turn in enumerate(todo):
        key = (turn.world, turn.call.operator)
        bits[key] += "01"[number in kept]
        split[key] += number in kept and ran[number].kind == "split"
    alike: dict[tuple[str, str, int], list[str]] = defaultdict(list)
    for (world, operator), text in bits.items():
        alike[world, text, split[world, operator]].append(operator)
    lines = [OPENING, torch.__version__.rpartition(".")[0]]
    for (world, text, count), operators in sorted(alike.items()):
        lines.append(f"{world} {text} {count}: {'; '.join(sorted(operators))}")
    LIST.write_text("\n".join([*lines, ""]))


@functools.cache
def _listed() -> dict[tuple[str, str], tuple[str, int]]:
    """Bits and number of split turns by world and operator; nothing with another torch, which has other samples."""
    _, version, *lines = LIST.read_text().splitlines()
    listed = {}
    if torch.__version__.startswith(f"{version}."):
        for line in lines:
            key, _, operators = line.partition(": ")
            world, bits, count = key.split()
            listed |= {(world, operator): (bits, int(count)) for operator in operators.split("; ")}
    return listed


def of_commit(todo: list[Turn]) -> Iterator[Turn]:
    """The turns of a commit."""
    before = Counter[tuple[str, str]]()
    for turn in todo:
        key = (turn.world, turn.call.operator)
        bits, _ = _listed().get(key, ("", 0))
        if bits[before[key] :][:1] != "0":
            yield turn
        before[key] += 1


def split_turns() -> dict[str, int]:
    """Number of turns of a commit that are split, by operator."""
    return {operator: count for (world, operator), (_, count) in _listed().items() if world == "rows"}


def main() -> None:
    """Writes the list anew."""
    from tests.rows import samples
    from tests.rows.altered_rules import traced
    from tests.rows.every_operator import judged, turns, undefined

    torch.set_num_threads(1)
    todo = turns(list(samples.calls(4)), 1)
    ran, began = [], time.perf_counter()
    for verdict in judged(todo, undefined(), watch=traced):
        now = time.perf_counter()
        ran.append(Ran(kind=verdict.kind, lines=verdict.seen, rules=of_tables(verdict.rules), seconds=now - began))
        began = now
    kept = chosen(todo, ran)
    write(todo, ran, kept)
    share = sum(ran[number].seconds for number in kept) / sum(each.seconds for each in ran)
    print(f"{len(kept)} of {len(todo)} turns, {share:.0%} of the time")


def of_tables(operators: list[str]) -> frozenset[str]:
    """Names, with or without overload, that stand in the tables of rules."""
    from grappe.rows import along, attention, draws, norms, rules, space, views  # noqa: F401  # they fill the tables
    from grappe.rows.plans import PROCEDURES, TABLE

    return frozenset(operators).union(each.partition(".")[0] for each in operators) & {*TABLE, *PROCEDURES}


if __name__ == "__main__":
    main()
