"""DeepSpeed's own kernels, which are compiled on the machine: where nvcc is there, they learn what torch's learn."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path

import torch

import grappe
from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Small
from benchmarks.gpu.training import distance, train, tried, weights

STEPS = 8
ALLOWED = 1e-4
PLANS = {"engine=deepspeed": "fused Adam", "engine=deepspeed,offload=cpu": "CPU Adam"}
"""By plan: the kernel of DeepSpeed's that it takes for the task's Adam."""


class WithAdam(Small):
    """Adam, which DeepSpeed has kernels of."""

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=1e-3)


class Remarks(grappe.Watcher):
    """Writes down what the engine says of itself."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def ended(self, outcome):
        self._file.write_text("\n".join(outcome.remarks) if outcome is not None else "")


def main(part: Part) -> None:
    """Compiles and tries each kernel; without a compiler for it, says that torch's took its place."""
    if importlib.util.find_spec("deepspeed") is None:
        part.not_tried("DeepSpeed's kernels", "the package deepspeed is not here")
        return
    if part.on_gpu and shutil.which("nvcc") is None:
        part.not_tried("DeepSpeed's kernels", "there is no nvcc here")
        return
    plain = weights(train(part, WithAdam(), "", "plain", steps=STEPS).folder)
    for plan, kernel in PLANS.items():
        _try(part, plan, kernel, plain)


def _try(part: Part, plan: str, kernel: str, plain: dict[str, torch.Tensor]) -> None:
    told = part.scratch / f"{kernel}.txt"
    run = tried(part, WithAdam(), plan, kernel, watchers=[Remarks(told)], steps=STEPS)
    if run is None:
        return
    gap = distance(plain, weights(run.folder))
    part.check(
        f"Adam under {plan}", gap <= ALLOWED, f"{gap:.1e} from the plain process, {ALLOWED:.0e} allowed", distance=gap
    )
    remarks = told.read_text().replace("\n", "; ")
    if f"DeepSpeed's {kernel} for" in remarks:
        part.check(f"DeepSpeed's {kernel} is taken", True, remarks)
    else:
        part.not_tried(f"DeepSpeed's {kernel}", f"it was not taken: {remarks}")
