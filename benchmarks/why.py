"""Compares what `grappe measure --why` names with what removing it brings: `python -m benchmarks.why`.

Eight slownesses are planted, one at a time (`slownesses.py`). Named is the share of the part that the slowness must be
named as; brought is the time that a step saves without it, measured by trainings of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path

from benchmarks.figures import machine, table
from benchmarks.slownesses import Case, cases
from grappe.contrib.lab.breakdown import SMALL_BATCH, TimeBreakdown
from grappe.contrib.lab.explain import explain
from grappe.plan import Plan
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure.points import Measurement, MeasureOptions

WORDS = "device=cpu,threads=1"


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(case: Case, options: MeasureOptions) -> tuple[TimeBreakdown, float]:
    """Returns what is said of the slow training, and the share of its time that removing the slowness brings."""
    first, second = _plan(case.plan), _plan(case.plan_without)
    second = first if case.plan_without is None else second
    bare = dataclasses.replace(options, repeats=1)
    slow: list[Measurement] = []
    quick: list[Measurement] = []
    for _ in range(options.repeats):  # by turns
        slow += verb.measure(case.task, (first,), options=bare)
        quick += verb.measure(case.without, (second,), options=bare)
    points = [_joined(slow)]
    if case.part == SMALL_BATCH:
        points += verb.measure(case.task, (first,), options=_larger(options, points[0]))
    points[1:] = [dataclasses.replace(point, origin="advice") for point in points[1:]]
    (found,) = explain(case.task, points)
    return found, 1 - _joined(slow).rate / _joined(quick).rate


def _larger(options: MeasureOptions, point: Measurement) -> MeasureOptions:
    return dataclasses.replace(options, batch_size=(4 * point.batch,))


def _joined(points: list[Measurement]) -> Measurement:
    return dataclasses.replace(points[0], trials=[trial for point in points for trial in point.trials])


def _plan(text: str | None) -> Plan:
    return Plan.parse(",".join(filter(None, (WORDS, text))))


def row(case: Case, found: TimeBreakdown, brought: float) -> dict[str, object]:
    """Makes the row of a case."""
    if found.failure:
        return {"name": case.name, "failure": found.failure}
    named = next((remedy for remedy in found.remedies if remedy.saves), None)
    remedies = [remedy for remedy in found.remedies if remedy.part == case.part]
    share = found.parts[case.part] if case.part != SMALL_BATCH else remedies[0].saves if remedies else 0.0
    return {
        "name": case.name,
        "part": case.part,
        "first": named.part if named else "",
        "word": remedies[0].word if remedies else "",
        "share": share,
        "brought": brought,
        "parts": found.parts,
        "milliseconds": found.seconds * 1e3,
    }


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.why", description=__doc__)
    parser.add_argument("--only", nargs="*", type=int, help="numbers of cases, from 1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here; those of other cases stay")
    arguments = parser.parse_args()
    before, rows = machine(), []
    if arguments.json and arguments.json.exists():
        rows = json.loads(arguments.json.read_text())
    for number, case in enumerate(cases(), 1):
        if arguments.only and number not in arguments.only:
            continue
        options = MeasureOptions(steps=arguments.steps, repeats=arguments.repeats)
        new = {"number": number, **row(case, *measured(case, options))}
        rows = sorted([*(old for old in rows if old["number"] != number), new], key=lambda row: row["number"])
        _note(json.dumps(new))
        if arguments.json:
            arguments.json.write_text(json.dumps(rows, indent=1))
    print(f"\n## Why\n\nFrom {before}\nto {machine()}.\n")
    print(
        table(
            ("injected", "named first", "what moves it", "named", "brings", "points", "sum"),
            [_cells(row) for row in rows],
        )
    )


def _cells(row: dict) -> list[str]:
    if "failure" in row:
        return [row["name"], row["failure"], "", "", "", "", ""]
    return [
        row["name"], row["first"], row["word"], f"{row['share']:.1%}", f"{row['brought']:.1%}",
        f"{100 * (row['share'] - row['brought']):+.1f}", f"{sum(row['parts'].values()):.1%}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
