"""Compares successive halving with the full search of the same trials: the best of each, and the samples they take.

python -m benchmarks.halving --task digits --trials 27 --seeds 0,1 FOLDER
"""

from __future__ import annotations

import argparse
from pathlib import Path

import grappe
from grappe.contrib.tune.study import Study
from grappe.training.run import Run

SPACE = {"lr": "0.001..3:log", "batch_size": "16|32|64|128"}


def samples(study: Study) -> int:
    """The samples that a study's trainings took, each as often as it was taken."""
    found = 0
    for trial in study.trials:
        if not Run.is_run(study.run_folder(trial.number)):
            continue  # the task refused its fields
        run = Run(study.run_folder(trial.number))
        last = max((record["samples"] for record in run.records("step")), default=0)
        found += round(run.read_description().get("used", {}).get("samples", last))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--task", default="digits")
    parser.add_argument("--epochs", default="9")
    parser.add_argument("--trials", type=int, default=27)
    parser.add_argument("--parallel", type=int, default=2)
    parser.add_argument("--seeds", default="0")
    asked = parser.parse_args()
    print("| seed | search | best accuracy | samples | of the full search |")
    print("|---|---|---|---|---|")
    for seed in map(int, asked.seeds.split(",")):
        whole = 0
        for name, halving in (("full", None), ("halving", 3)):
            study = grappe.tune(
                asked.task, SPACE, fields={"epochs": asked.epochs}, trials=asked.trials, parallel=asked.parallel,
                metric="accuracy", direction="maximize", sampler="random", halving=halving, seed=seed,
                study=asked.folder / f"{name}-{seed}",
            )  # fmt: skip
            best, took = study.best, samples(study)
            whole = whole or took
            value = "none" if best is None else f"{best.value:.4f} (trial {best.number})"
            print(f"| {seed} | {name} | {value} | {took:,} | {took / whole:.0%} |", flush=True)


if __name__ == "__main__":
    main()
