"""The plan that `grappe foresee` chooses beside the quickest one measured: `python -m benchmarks.foresee_choice`.

Twenty choices (a task and a batch size) among plans that train the same on two cores, and twenty more that were
listed when the rules of choosing had been made. Each is foreseen as the command does it, then every plan is trained a
second, by turns; those that are close, three times. Needs a machine without other programs, and `grappe doctor
--calibrate` before. With a number of seconds it stops after them, and goes on when it is called again; texts choose
tasks, `--again` measures them anew, and `--predict` foresees them anew and measures what is then lacking. Plans are
chosen by today's rule in any case.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from benchmarks.foresee_time import measured, reference
from grappe.verbs.foresee.foresee import foresee
from grappe.verbs.foresee.times import plainest

FILE = Path(__file__).parent / "results" / "foresee_choice.json"
SECONDS = 1.0  # of a training's steps
TURNS = 3
ASKED = 4  # times at most: operators that one command had no time to run are run by the next
CLOSE = 1.25  # times the best of the first turn, up to which a plan is measured in the other turns
FIRST = (
    "digits batch_size=32", "digits", "digits batch_size=256", "digits batch_size=512", "digits batch_size=700",
    "pysource batch_size=2 megabytes=0.3", "pysource batch_size=8 megabytes=0.3",
    "pysource batch_size=32 width=64 depth=2 heads=2 megabytes=0.3",
    "mlp batch_size=16", "mlp", "mlp batch_size=512", "mlp batch_size=2048", "mlp batch_size=64 width=128",
    "mlp batch_size=512 width=128", "mlp batch_size=32 width=2048",
    "cnn batch_size=8", "cnn", "cnn batch_size=64 width=16", "cnn batch_size=128 width=16",
    "coatnet batch_size=8",
)  # fmt: skip
SECOND = (
    "digits batch_size=16", "digits batch_size=128", "digits batch_size=384",
    "pysource batch_size=4 megabytes=0.3", "pysource batch_size=16 context=64 megabytes=0.3",
    "pysource batch_size=8 width=256 depth=2 heads=4 megabytes=0.3",
    "pysource batch_size=64 width=32 depth=1 heads=1 megabytes=0.3",
    "mlp batch_size=4", "mlp batch_size=128", "mlp batch_size=1024", "mlp batch_size=256 width=256",
    "mlp batch_size=2048 width=256", "mlp batch_size=16 width=1024", "mlp batch_size=256 width=1024",
    "cnn batch_size=16", "cnn batch_size=32 width=8", "cnn batch_size=256 width=8", "cnn batch_size=32 width=24",
    "coatnet batch_size=4", "coatnet batch_size=16",
)  # fmt: skip
CHOICES = (*FIRST, *SECOND)
PLANS = (
    "", "threads=1", "replicate=2", "shard=2", "shard=2,zero=1", "microbatches=2", "replicate=2,microbatches=2",
)  # fmt: skip
Found = dict[str, dict[str, Any]]


def foreseen(choice: str) -> dict[str, Any]:
    """Foresees each plan's step, in seconds."""
    task = reference(choice)
    given = task.value if task.value is not None else choice.split(maxsplit=1)[0]
    for _ in range(ASKED):
        times = foresee(given, PLANS, fields=task.texts or None)
        if all(one.time is not None for one in times.plans):
            break
    seconds = {one.foreseen.plan: round(one.time.total, 6) for one in times.plans if one.time is not None}
    assert seconds, times.notes
    return {"predicted": seconds, "measured": {}}


def wanted(cell: dict[str, Any], turn: int) -> list[str]:
    """Returns the plans that are still to be trained in a turn, each turn beginning with another one."""
    taken = cell["measured"]
    plans = list(cell["predicted"])
    plans = plans[turn % len(plans) :] + plans[: turn % len(plans)]
    if turn:
        quickest = min(one[0] for one in taken.values())
        plans = [one for one in plans if one == cell["chosen"] or taken[one][0] <= CLOSE * quickest]
    return [one for one in plans if len(taken.get(one, ())) <= turn]


def summed_up(cell: dict[str, Any]) -> None:
    """Adds the quickest plan and what the chosen one loses beside it, in per cent."""
    took = {plan: statistics.median(seconds) for plan, seconds in cell["measured"].items()}
    quickest = min(took, key=lambda plan: took[plan])
    cell["best"] = quickest
    cell["loss"] = round(100 * (took[cell["chosen"]] / took[quickest] - 1), 2)


def main() -> None:
    """Goes through the choices, and writes the file after each training."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.foresee_choice", description=__doc__)
    parser.add_argument("only", nargs="*", help="seconds, and texts of which a choice has one")
    parser.add_argument("--again", action="store_true", help="measure these choices anew")
    parser.add_argument("--predict", action="store_true", help="foresee these choices anew")
    parser.add_argument("--file", type=Path, default=FILE)
    given = parser.parse_args()
    limit = float(next((one for one in given.only if one.isdigit()), "1e9"))
    texts = [one for one in given.only if not one.isdigit()]
    begun, found = time.monotonic(), json.loads(given.file.read_text()) if given.file.exists() else {}
    for choice in CHOICES:
        if texts and not any(one in choice for one in texts):
            continue
        if time.monotonic() - begun > limit:
            break
        if given.again:
            found.pop(choice, None)
        _choice(choice, found, given.file, predict=given.predict)
    _say(found)


def _choice(choice: str, found: Found, file: Path, *, predict: bool) -> None:
    if predict or choice not in found:
        measured_before = found.get(choice, {}).get("measured", {})
        found[choice] = {**foreseen(choice), "measured": measured_before}
    cell = found[choice]
    cell["chosen"] = plainest(list(cell["predicted"]), lambda plan: cell["predicted"][plan], str)
    for turn in range(TURNS):
        for plan in wanted(cell, turn):
            took = measured(choice, plan, cell["predicted"][plan], seconds=SECONDS)["step"]
            cell["measured"].setdefault(plan, []).append(took)
            _write(found, file)
    summed_up(cell)
    _write(found, file)
    each = {plan: f"{1e3 * statistics.median(took):.1f}" for plan, took in cell["measured"].items()}
    print(f"{choice:55} {cell['chosen'] or 'one':16} {cell['best'] or 'one':16} {cell['loss']:5.1f} %", each)


def _write(found: Found, file: Path) -> None:
    inside = {choice: found[choice] for choice in CHOICES if choice in found}
    beside = file.with_suffix(".new")
    beside.write_text(json.dumps(inside, indent=1) + "\n")
    beside.replace(file)


def _say(found: Found) -> None:
    losses = sorted(cell["loss"] for cell in found.values() if "loss" in cell)
    if losses:
        near = sum(loss <= 2 for loss in losses)
        print(f"within 2 % of the best in {near} of {len(losses)} choices; worst {losses[-1]:.1f} %")


if __name__ == "__main__":
    main()
