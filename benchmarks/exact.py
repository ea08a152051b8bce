"""Costs of exact sums over the plain plan, on two processes: `python -m benchmarks.exact`."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from statistics import median

from benchmarks import commands
from benchmarks.figures import machine, spread, table

AIM = 1.15
WARMUP = 10  # steps
PLANS = ("replicate=2", "exact=2,replicate=2", "exact=4,replicate=2", "exact=8,replicate=2")


def main() -> None:
    """Trains in turns, and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.exact", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    options = parser.parse_args()
    before = machine()
    rounds = []
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as folder:
        for number in range(options.rounds):
            rounds.append(
                {
                    plan: seconds(Path(folder) / f"{number}-{place}", plan, options.steps, options.batch_size)
                    for place, plan in enumerate(PLANS)
                }
            )
    rows = []
    for plan in PLANS:
        step = spread([1e3 * one[plan] for one in rounds])
        ratio = spread([one[plan] / one[PLANS[0]] for one in rounds])
        rows.append([f"`{plan}`", step.text("{:.2f}"), ratio.text("{:.2f}")])
    print(f"\n## Exact sums on two processes, LeNet on digits, batches of {options.batch_size}\n")
    print(f"{options.rounds} rounds of {options.steps} steps, one thread each.\nFrom {before}\nto {machine()}.\n")
    print(table(("plan", "ms a step", f"ratio (aim {AIM})"), rows))
    if options.json:
        options.json.write_text(json.dumps(rounds, indent=1))


def seconds(run: Path, plan: str, steps: int, batch_size: int) -> float:
    """The median step of a training."""
    words = (
        f"batch_size={batch_size}", "epochs=1000", "--plan", f"{plan},device=cpu,threads=1",
        "--steps", str(steps), "--evaluate-every", str(10**6), "--save-every", str(10**6),
    )  # fmt: skip
    return median(commands.grappe(commands.ROOT, run, "digits", *words).seconds[WARMUP:])


if __name__ == "__main__":
    main()
