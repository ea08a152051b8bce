"""Every plan that one GPU can carry learns what the plain process learns."""

from __future__ import annotations

from benchmarks.gpu.part import Part
from benchmarks.gpu.tasks import Small
from benchmarks.gpu.training import distance, sha256, sharing, total_distance, train, tried, weights

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
    "compile,cuda_graphs": 1e-4,
    "engine=deepspeed": 1e-5,
    "engine=deepspeed,shard=2": 1e-5,
    "precision=fp64": 1e-5,
    "precision=fp64,replicate=2": 1e-5,
    "replicate=2,batchnorm=sync": 1e-5,
}
DROPPING = ("engine=textbook", "microbatches=4", "recompute", "replicate=2", "shard=2", "pipeline=2,microbatches=2")
"""With dropout on: one process's draws under any plan."""
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
        if plan == "precision=tf32" and not part.on_gpu:
            part.not_tried(plan, "TF32 is a format of GPUs")
            continue
        run = tried(part, task, plan, plan.replace(",", "-"), steps=STEPS)
        if run is None:
            continue
        found = weights(run.folder)
        gap = total_distance(reference, found) if plan in ROUNDED else distance(reference, found)
        part.check(
            plan,
            gap <= allowed,
            f"{gap:.1e} from the plain process, {allowed:.0e} allowed{sharing(part, plan)}",
            distance=gap,
        )
    _exact(part, task)
    _overflow(part)
    _dropout(part)


def _dropout(part: Part) -> None:
    """Trains with dropout: each plan draws what one process draws."""
    task = Small(dropout=0.2)
    reference = weights(train(part, task, "", "dropping", steps=STEPS).folder)
    for plan in DROPPING:
        run = tried(part, task, plan, f"dropping-{plan.replace(',', '-')}", steps=STEPS)
        if run is not None:
            gap = distance(reference, weights(run.folder))
            text = f"{gap:.1e} from the plain process, 1e-05 allowed{sharing(part, plan)}"
            part.check(f"{plan} with dropout", gap <= 1e-5, text, distance=gap)


def _exact(part: Part, task: Small) -> None:
    """Exact plans leave the same bits on one process and on two."""
    hashes = {}
    for plan in EXACT:
        run = tried(part, task, plan, plan.replace(",", "-"), steps=STEPS)
        if run is not None:
            hashes[plan] = sha256(weights(run.folder))
    part.check(
        "exact on one and two processes: the same bits",
        len(hashes) == len(EXACT) and len(set(hashes.values())) == 1,
        ", ".join(f"{plan}: {value[:12]}{sharing(part, plan)}" for plan, value in hashes.items()),
    )


def _overflow(part: Part) -> None:
    """fp16's loss scaling skips the step whose gradients overflow, and no other."""
    run = train(part, Small(loud=True), "precision=fp16", "loud")
    records = list(run.records("step"))
    skipped, steps = [record["step"] for record in records if record.get("skipped")], len(records)
    part.check("fp16 with a sample that overflows", 0 < len(skipped) < steps, f"skipped steps {skipped} of {steps}")
