"""Every plan that one GPU can carry learns what the plain process learns."""

from __future__ import annotations

from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Small
from benchmarks.gpu.training import distance, sha256, total_distance, train, weights
from grappe.errors import GrappeError

STEPS = 8
# The largest distance allowed for each: rounding in another order, or in fewer digits.
PLANS = {
    "engine=textbook": 1e-5,
    "microbatches=4": 1e-5,
    "recompute": 1e-5,
    "channels_last": 1e-4,
    "replicate=2": 1e-5,
    "replicate=3": 1e-5,
    "shard=2": 1e-5,
    "shard=2,zero=1": 1e-5,
    "shard=2,zero=2": 1e-5,
    "offload=cpu,shard=2": 1e-5,
    "pipeline=2,microbatches=2": 1e-5,
    "engine=lightning": 1e-5,
    "compile": 1e-4,
    "engine=deepspeed,shard=2": 1e-5,
}
ROUNDED = {"precision=tf32": 1e-2, "precision=bf16": 2e-2, "precision=fp16": 5e-3}
"""Fewer digits: over all tensors together, since a bias that began at 0 is mostly rounding."""
EXACT = ("exact=2", "exact=2,replicate=2", "exact=2,shard=2")


def main(part: Part) -> None:
    """Trains a few steps under each plan and compares the weights with the plain process's."""
    task = Small()
    reference = weights(train(part, task, "", "plain", steps=STEPS).folder)
    again = weights(train(part, task, "", "again", steps=STEPS).folder)
    part.check("the plain process twice: the same bits", sha256(reference) == sha256(again))
    for plan, allowed in {**PLANS, **ROUNDED}.items():
        try:
            found = weights(train(part, task, plan, plan.replace(",", "-"), steps=STEPS).folder)
        except GrappeError as error:
            part.not_tried(plan, str(error))
            continue
        gap = total_distance(reference, found) if plan in ROUNDED else distance(reference, found)
        part.check(
            plan, gap <= allowed, f"{gap:.1e} from the plain process, {allowed:.0e} allowed", distance=gap
        )
    hashes = {
        plan: sha256(weights(train(part, task, plan, plan.replace(",", "-"), steps=STEPS).folder))
        for plan in EXACT
    }
    part.check(
        "exact on one and two processes: the same bits",
        len(set(hashes.values())) == 1,
        ", ".join(f"{plan}: {value[:12]}" for plan, value in hashes.items()),
    )
    _overflow(part)


def _overflow(part: Part) -> None:
    """fp16's loss scaling skips the step whose gradients overflow, and no other."""
    run = train(part, Small(loud=True), "precision=fp16", "loud")
    records = list(run.records("step"))
    skipped, steps = [record["step"] for record in records if record.get("skipped")], len(records)
    part.check(
        "fp16 with a sample that overflows", 0 < len(skipped) < steps, f"skipped steps {skipped} of {steps}"
    )
