"""The Alliance page's CIFAR-10 script against `grappe train cifar10`: `python -m benchmarks.cifar_script`."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import cifar_files, commands
from benchmarks.commands import TORCHVISION
from benchmarks.figures import machine, spread, table

BATCH = 512
FASTER, SHARE = 2.4, 0.97  # aims: images/s over the script's, and of what compute alone allows
HEAD = ("grappe's plan", "images/s", "over the script", "compute alone, images/s", "share of compute alone")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contest:
    """A plan, and how compute alone is measured for it."""

    plan: str
    alone: tuple[str, ...]


CONTESTS = (
    Contest(plan="threads=2", alone=("--threads", "2")),
    Contest(plan="threads=2,channels_last", alone=("--threads", "2", "--channels-last")),
    Contest(
        plan="replicate=2,threads=1,channels_last", alone=("--processes", "2", "--threads", "1", "--channels-last")
    ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Round:
    """Images/s of one round; by plan, compute alone is the mean of before and behind grappe's epoch."""

    script: float
    grappe: dict[str, float]
    alone: dict[str, float]


def main() -> None:
    """Writes the files, plays the rounds, and prints a markdown table."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cifar_script", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--per-file", type=int, default=10_000, help="images in each of the five files")
    parser.add_argument("--json", type=Path, help="write every round's figures here")
    parser.add_argument("--torchvision", type=Path, default=TORCHVISION, help="the folder it is installed in")
    options = parser.parse_args()
    before = machine()
    with tempfile.TemporaryDirectory(prefix="grappe-bench-") as temporary:
        folder = Path(temporary)
        cifar_files.write(folder / "data", options.per_file)
        rounds = []
        for number in range(options.rounds):
            rounds.append(play(folder, number, options.per_file, options.torchvision))
            print(f"round {number + 1}: {rounds[-1]}; {machine()}", file=sys.stderr)
    images = options.per_file * len(cifar_files.TRAINING)
    print("\n## The CIFAR-10 script of the Alliance's page, on CPU\n")
    print(f"{options.rounds} rounds of one epoch each: {images:,} images, batches of {BATCH}, two cores.")
    print(f"From {before}\nto {machine()}.\n")
    print(f"The script: {spread([one.script for one in rounds]).text('{:,.0f}')} images/s.\n")
    print(table(HEAD, rows(rounds)))
    print(f"\nAims: {FASTER} times the script's images/s, {SHARE:.0%} of compute alone.")
    if options.json:
        options.json.write_text(json.dumps([dataclasses.asdict(one) for one in rounds], indent=1))


def play(folder: Path, number: int, per_file: int, torchvision: Path) -> Round:
    """One round: the script, then for each plan compute alone, grappe, compute alone."""
    steps = -(-per_file * len(cifar_files.TRAINING) // BATCH)
    script = the_script(folder, torchvision)
    ours, alone = {}, {}
    for place, contest in enumerate(CONTESTS):
        first = compute_alone(contest, steps)
        ours[contest.plan] = grappe(folder, contest.plan, folder / f"run-{number}-{place}", per_file)
        alone[contest.plan] = (first + compute_alone(contest, steps)) / 2
    return Round(script=script, grappe=ours, alone=alone)


def rows(rounds: Sequence[Round]) -> list[list[str]]:
    """A row for each plan; ratios are taken within a round, then their median."""
    found = []
    for contest in CONTESTS:
        plan = contest.plan
        faster = spread([one.grappe[plan] / one.script for one in rounds])
        share = spread([one.grappe[plan] / one.alone[plan] for one in rounds])
        found.append(
            [
                f"`{plan}`",
                spread([one.grappe[plan] for one in rounds]).text("{:,.0f}"),
                faster.text("{:.2f}"),
                spread([one.alone[plan] for one in rounds]).text("{:,.0f}"),
                share.text("{:.1%}"),
            ]
        )
    return found


def the_script(folder: Path, torchvision: Path) -> float:
    """Images/s of the page's script over its epoch, by its own clock: from before the first batch is read."""
    command, environment = commands.of_page("cifar10_cpu.py", torchvision)
    return _rate(commands.output(command, folder, **environment, SLURM_CPUS_PER_TASK="2"))


def compute_alone(contest: Contest, steps: int) -> float:
    """Images/s of the same network and batch with nothing around it."""
    command = [sys.executable, "-m", "benchmarks.compute_alone", "--batch", str(BATCH), "--steps", str(steps)]
    return _rate(commands.output([*command, *contest.alone]))


def grappe(folder: Path, plan: str, run: Path, per_file: int) -> float:
    """Images/s of `grappe train` over its epoch. All images are trained on (holdout=0), as the script does."""
    fields = ["network=small", f"batch_size={BATCH}", "epochs=1", "holdout=0"]
    places = ["--plan", f"{plan},device=cpu", "--data", str(folder / "data")]
    done = commands.grappe(folder, run, "cifar10", *fields, *places)
    return done.rate(per_file * len(cifar_files.TRAINING), BATCH)


def _rate(output: str) -> float:
    found = re.search(r"^images/s ([\d.]+)$", output, re.MULTILINE)
    assert found, f"no images/s in:\n{output}"
    return float(found[1])


if __name__ == "__main__":
    main()
