"""Compares what `grappe measure --why` names with what removing it brings: `python -m benchmarks.why`.

Ten slownesses are planted, one at a time (`slownesses.py`). Named is the share of the part that the slowness must be
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
from grappe.contrib.lab.breakdown import PARTS, SMALL_BATCH
from grappe.contrib.lab.explain import Explanation, explain
from grappe.plan import Plan
from grappe.verbs.measure import measure as verb
from grappe.verbs.measure.points import Measurement, MeasureOptions

WORDS = "device=cpu,threads=1"
EPOCHS = 8  # of a training with evaluations: 512 steps


def _note(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def measured(case: Case, options: MeasureOptions) -> tuple[Explanation, float]:
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
    (explanation,) = explain(case.task, points, options=options)
    if case.evaluate_every is not None:
        assert explanation.breakdown is not None
        return explanation, _evaluating(case, first)
    return explanation, 1 - _joined(slow).rate / _joined(quick).rate


def _larger(options: MeasureOptions, point: Measurement) -> MeasureOptions:
    return dataclasses.replace(options, batch_size=(4 * point.batch,))


def _joined(points: list[Measurement]) -> Measurement:
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


def row(case: Case, explanation: Explanation, brought: float) -> dict[str, object]:
    """Makes the row of a case."""
    breakdown = explanation.breakdown
    if breakdown is None:
        return {"name": case.name, "failure": explanation.failure}
    named = next((remedy for remedy in explanation.remedies if remedy.saves), None)
    remedies = [remedy for remedy in explanation.remedies if remedy.part == case.part]
    share = breakdown.share(case.part) if case.part != SMALL_BATCH else remedies[0].saves if remedies else 0.0
    return {
        "name": case.name,
        "part": case.part,
        "first": named.part if named else "",
        "word": remedies[0].word if remedies else "",
        "share": share,
        "brought": brought,
        "sum": sum(breakdown.share(part) for part in PARTS),
        "parts": {part: breakdown.share(part) for part in PARTS},
        "milliseconds": breakdown.seconds * 1e3,
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
        options = MeasureOptions(
            steps=arguments.steps,
            repeats=arguments.repeats,
            evaluate_every=case.evaluate_every or 1000,
            save_every=1000,
        )
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
        f"{100 * (row['share'] - row['brought']):+.1f}", f"{row['sum']:.1%}",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
