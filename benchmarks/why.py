"""Compares what `grappe measure --why` names with what removing it brings: `python -m benchmarks.why`.

Ten slownesses are planted, one at a time (`slownesses.py`). Named is the share of the part that the slowness must be
named as; brought is the time that a step saves without it, measured by trainings of its own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
from pathlib import Path

from benchmarks.figures import machine, table
from benchmarks.slownesses import Case, cases
from grappe.plan import Plan
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure.options import MeasureOptions
from grappe.verbs.measure.points import Point
from grappe.verbs.measure.remedies import SMALL_BATCH
from grappe.verbs.measure.waterfall import PARTS
from grappe.verbs.measure.why import Why, why

WORDS = "device=cpu,threads=1"
EPOCHS = 8  # of a training with evaluations: 512 steps


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(case: Case, options: MeasureOptions) -> tuple[Why, float]:
    """Returns what is said of the slow training, and the share of its time that removing the slowness brings."""
    first, second = _plan(case.plan), _plan(case.plan_without)
    second = first if case.plan_without is None else second
    bare = dataclasses.replace(options, repeats=1)
    slow: list[Point] = []
    quick: list[Point] = []
    for _ in range(options.repeats):  # by turns
        slow += verb.measure(case.task, (first,), options=bare, advise=False)
        quick += verb.measure(case.without, (second,), options=bare, advise=False)
    points = [_joined(slow)]
    if case.part == SMALL_BATCH:
        points += verb.measure(case.task, (first,), options=_larger(options, points[0]), advise=False)
    (found,) = (
        why(case.task, points[:1], options=options) if len(points) == 1 else _with(case, points, options)
    )
    if case.evaluate_every is not None:
        assert found.waterfall is not None
        return found, _evaluating(case, first)
    return found, 1 - _joined(slow).rate / _joined(quick).rate


def _with(case: Case, points: list[Point], options: MeasureOptions) -> list[Why]:
    advised = [points[0], *(dataclasses.replace(one, origin="advice") for one in points[1:])]
    return why(case.task, advised, options=options)


def _larger(options: MeasureOptions, point: Point) -> MeasureOptions:
    return dataclasses.replace(options, batch_size=(4 * point.batch,))


def _joined(points: list[Point]) -> Point:
    return dataclasses.replace(points[0], trials=[trial for point in points for trial in point.trials])


def _plan(text: str | None) -> Plan:
    return Plan.parse(",".join(filter(None, (WORDS, text))))


def _evaluating(case: Case, plan: Plan) -> float:
    """Measures what evaluations take of a training: its seconds, and those of one that evaluates at the end only.

    Of the latter the last evaluation is left out; both train so long that their first steps are few.
    """
    import tempfile

    import grappe

    task, seconds = dataclasses.replace(case.task, epochs=EPOCHS), []
    with tempfile.TemporaryDirectory() as folder:
        for number, every in enumerate((case.evaluate_every, None)):
            run = grappe.train(
                task, plan, Path(folder) / str(number),
                options=grappe.Options(evaluate_every=every or 10**6, save_every=10**6),
            )  # fmt: skip
            totals = run.read_description()["costs"][0]["timing"]["totals"]
            left_out = ["start", "checkpoint", *(["evaluation"] if every is None else [])]
            seconds.append(sum(totals.values()) - sum(totals[name] for name in left_out))
    return 1 - seconds[1] / seconds[0]


def row(case: Case, found: Why, brought: float) -> dict[str, object]:
    """Makes the row of a case."""
    fall = found.waterfall
    if fall is None:
        return {"name": case.name, "failure": found.failure}
    named = next((one for one in found.remedies if one.saves), None)
    mine = [one for one in found.remedies if one.part == case.part]
    share = (mine[0].saves if mine else 0.0) if case.part == SMALL_BATCH else fall.share(case.part)
    return {
        "name": case.name,
        "part": case.part,
        "first": named.part if named else "",
        "word": mine[0].word if mine else "",
        "share": share,
        "brought": brought,
        "sum": sum(fall.share(part) for part in PARTS),
        "parts": {part: fall.share(part) for part in PARTS},
        "milliseconds": fall.seconds * 1e3,
        "other_part": statistics.fmean(
            [one.traced.other_part or 0 for one in fall.traces.processes if one.traced] or [0]
        ),
    }


def main() -> None:
    """Prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.why", description=__doc__)
    parser.add_argument("--only", nargs="*", type=int, help="numbers of cases, from 1")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write the figures here; those of other cases stay")
    given = parser.parse_args()
    before, found = machine(), []
    if given.json and given.json.exists():
        found = json.loads(given.json.read_text())
    for number, case in enumerate(cases(), 1):
        if given.only and number not in given.only:
            continue
        options = MeasureOptions(
            steps=given.steps,
            repeats=given.repeats,
            evaluate_every=case.evaluate_every or 1000,
            save_every=1000,
        )
        one = {"number": number, **row(case, *measured(case, options))}
        found = sorted(
            [*(old for old in found if old["number"] != number), one], key=lambda each: each["number"]
        )
        _note(json.dumps(one))
        if given.json:
            given.json.write_text(json.dumps(found, indent=1))
    print(f"\n## Why\n\nFrom {before}\nto {machine()}.\n")
    print(
        table(
            ("planted", "named first", "what moves it", "named", "brings", "points", "sum"),
            [_cells(one) for one in found],
        )
    )


def _cells(one: dict) -> list[str]:
    if "failure" in one:
        return [one["name"], one["failure"], "", "", "", "", ""]
    return [
        one["name"], one["first"], one["word"], f"{one['share']:.1%}", f"{one['brought']:.1%}",
        f"{100 * (one['share'] - one['brought']):+.1f}", f"{one['sum']:.1%}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
