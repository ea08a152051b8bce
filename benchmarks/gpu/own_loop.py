"""A script with `grappe.Loop` learns under each plan that one GPU can carry what it learns on one process."""

from __future__ import annotations

import subprocess
import sys

from torch import Tensor

import grappe
from benchmarks.gpu import own_script
from benchmarks.gpu.part import Part
from benchmarks.gpu.training import distance, plan_on, sha256, sharing, total_distance

PLANS = {
    "replicate=2": 1e-5,
    "shard=2": 1e-5,
    "recompute": 1e-5,
    "channels_last": 1e-4,
    "compile": 1e-4,
    "precision=tf32": 1e-2,
    "precision=bf16": 2e-2,
}
"""The largest distance allowed: rounding in another order, or in fewer digits (over all tensors together)."""
DROPOUT = {"replicate=2": 1e-5, "shard=2": 1e-5}


def main(part: Part) -> None:
    """Starts the script by `grappe launch` under each plan and compares the weights with one process's."""
    plain, again = _trained(part, "", "plain"), _trained(part, "", "again")
    if plain is None or again is None:
        return
    part.check("a loop twice: the same bits", sha256(plain) == sha256(again))
    dropping = _trained(part, "", "dropping", "--dropout", "0.2")
    for plan, allowed in PLANS.items():
        if plan == "precision=tf32" and not part.on_gpu:
            part.not_tried(f"a loop under {plan}", "TF32 is a format of GPUs")
            continue
        _compare(part, plain, plan, plan, allowed, _trained(part, plan, plan))
    for plan, allowed in DROPOUT.items():
        name = f"{plan} with dropout"
        found = _trained(part, plan, f"{plan}-dropping", "--dropout", "0.2")
        _compare(part, dropping, plan, name, allowed, found)


def _compare(
    part: Part, plain: dict[str, Tensor] | None, plan: str, name: str, allowed: float, found: dict[str, Tensor] | None
) -> None:
    if plain is None or found is None:
        return
    gap = (total_distance if "precision" in plan else distance)(plain, found)
    text = f"{gap:.1e} from one process, {allowed:.0e} allowed{sharing(part, plan)}"
    part.check(f"a loop under {name}", gap <= allowed, text, distance=gap)


def _trained(part: Part, plan: str, name: str, *options: str) -> dict[str, Tensor] | None:
    """Returns the weights that the script learns; None, reported, if it fails."""
    run = part.scratch / name
    command = [sys.executable, "-m", "grappe", "launch", "--plan", plan_on(part, plan), own_script.__file__]
    done = subprocess.run([*command, "--run", str(run), *options], capture_output=True, text=True, check=False)
    if done.returncode:
        part.check(f"a loop under {name}", False, f"exit code {done.returncode}: {done.stderr.strip()[-600:]}")
        return None
    model = own_script.network()
    grappe.load_models(run, model)
    return model.state_dict()
