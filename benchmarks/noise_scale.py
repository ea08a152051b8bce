"""Compares the noise scale that a training measures with a reference of two batch sizes.

python -m benchmarks.noise_scale

The weights of a short training stand still (lr=0) while a second one measures by its slices. The reference draws
batches of two sizes, each for itself, computes their gradients by plain torch, and solves E|g_b|^2 = |G|^2 + S / b for
S / |G|^2.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch

import grappe
from grappe.fields import split
from grappe.finder import find, make
from grappe.training.options import Options

TASKS = "digits:10 digits:60 pysource:20:context=32:megabytes=0.4 pysource:120:context=32:megabytes=0.4"
SMALL, BIG = 4, 256
PLAN = "microbatches=4"


def reference(run: object, task: grappe.Task, draws: int, data: Path) -> float:
    """The noise scale at the weights of a run, in samples."""
    model, dataset = grappe.load(run, task).train(), task.data("train", data)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(1)

    def square(size: int) -> float:
        ids = torch.randint(len(dataset), (size,), generator=generator)
        rows = [dataset[int(one)] for one in ids]
        inputs, targets = (torch.stack([torch.as_tensor(row[part]) for row in rows]) for part in (0, 1))
        values, counts = task.loss(model(inputs), targets), task.counts(targets)
        model.zero_grad()
        (values.mean() if counts is None else values.sum() / counts.sum()).backward()
        return sum(float(one.grad.double().square().sum()) for one in model.parameters() if one.grad is not None)

    small = sum(square(SMALL) for _ in range(8 * draws)) / (8 * draws)
    big = sum(square(BIG) for _ in range(draws)) / draws
    variance = (small - big) / (1 / SMALL - 1 / BIG)
    return variance / (big - variance / BIG)


def measured(task: str, fields: dict[str, str], run: Path, folder: Path, asked: argparse.Namespace) -> float:
    """The noise scale that a training with its weights standing still writes into its curves."""
    still = {**fields, "lr": "0.0", "batch_size": "64", "seed": "5"}
    again = grappe.train(
        task, PLAN, folder, fields=still, from_=run, data=asked.data,
        options=Options(noise_scale=True, evaluate_every=asked.steps, steps=asked.steps),
    )  # fmt: skip
    return [record["noise_scale"] for record in again.records("noise")][-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default=TASKS, help="each with the steps after which it is measured, and fields")
    parser.add_argument("--steps", type=int, default=160)
    parser.add_argument("--draws", type=int, default=40)
    parser.add_argument("--data", type=Path, default=Path("data"))
    asked = parser.parse_args()
    print("| task | after steps | by the training's slices | by two batch sizes | ratio |\n|---|---|---|---|---|")
    for text in asked.tasks.split():
        task, steps, *fields = text.split(":")
        with tempfile.TemporaryDirectory() as place:
            folder = Path(place)
            run = grappe.train(
                task,
                "",
                folder / "first",
                fields=split(fields),
                data=asked.data,
                options=Options(steps=int(steps), evaluate_every=int(steps)),
            )
            ours = measured(task, split(fields), folder / "first", folder / "second", asked)
            theirs = reference(run, make(find(task), split(fields)), asked.draws, asked.data)
        print(
            f"| {' '.join([task, *fields])} | {steps} | {ours:.0f} | {theirs:.0f} | {ours / theirs:.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
