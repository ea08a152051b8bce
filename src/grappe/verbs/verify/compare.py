"""Compare: compares a trial's steps with the reference's; each difference against that of rounding alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence

from grappe.verbs.verify.trained_by_hand import Reference, ReferenceStep, relative
from grappe.verbs.verify.trained_by_plan import TrialStep

FLOOR = 1e-5  # contract 7: per tensor, in norm
BOUND = 0.02
"""Where more of the loss or the gradient's norm would be tolerated, agreement says nothing."""
FACTOR = 10.0
"""What is tolerated is ten times what the same sums in another order differ by, or FLOOR."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of a trial from the reference."""

    first: int | None
    """The first step (from 0) that differs by more than the tolerance; None: no step does."""
    what: tuple[str, ...]
    """The quantities that differ at that step."""
    loss: float
    norm: float | None
    weights: float
    tensor: str
    """The tensor with the largest difference, relative to its tolerance."""
    tolerance: float
    """The tolerance of that tensor, at the step where it differs most."""
    excess: float
    """The largest difference of all, as a multiple of its tolerance: above 1 is too much."""
    drifting: tuple[str, ...]
    """The tensors of which more than BOUND would be tolerated: their agreement says nothing."""
    steps: tuple[dict[str, float], ...]
    """By step: loss, reference loss, and the differences of loss, norm and weights with their tolerances."""

    @property
    def tolerated(self) -> float:
        """The largest difference of the loss, or of the gradient's norm, that is tolerated."""
        return max(step[f"{name} tolerated"] for step in self.steps for name in ("loss", "norm"))

    @property
    def in_weights_only(self) -> bool:
        """Returns whether weights differ by more than is tolerated, but no loss and no gradient's norm does."""
        excesses = [step[f"{name} excess"] for step in self.steps for name in ("loss", "norm")]
        return self.what == ("weights",) and not any(excess > 1 for excess in excesses)

    @property
    def agrees(self) -> bool:
        """Returns whether nothing differs by more than its tolerance."""
        return self.first is None


def compare(
    reference: Reference,
    steps: Sequence[TrialStep],
    tolerance: Reference | None = None,
    without: Collection[str] = (),
) -> Difference:
    """Computes the differences of `steps` from `reference`.

    Args:
        tolerance: the reference whose noise is used if `reference` has measured none.
        without: tensors that are not compared.
    """
    noise = _so_far((tolerance or reference).steps)
    rows = [_row(*trio, without) for trio in zip(reference.steps, steps, noise, strict=False)]
    first = next((number for number, row in enumerate(rows) if row["excess"] > 1), None)
    what: tuple[str, ...] = ()
    if first is not None:
        names = {"loss": "loss", "norm": "gradient norm", "weights": "weights"}
        what = tuple(word for name, word in names.items() if rows[first][f"{name} excess"] > 1)
    if first is None and len(steps) != len(reference.steps):
        first, what = min(len(steps), len(reference.steps)), ("number of steps",)
    drifting = (
        tuple(
            name for name, noise_of_tensor in noise[-1].noise.items() if _tolerated(noise_of_tensor) > BOUND
        )
        if noise
        else ()
    )
    worst = max(range(len(rows)), key=lambda number: rows[number]["weights excess"])
    gaps, allowed = _gaps(steps[worst], noise[worst], without)
    shown = [name for name in gaps if name not in drifting or gaps[name] > allowed[name]] or list(gaps)
    tensor = max(shown, key=lambda name: gaps[name] / allowed[name], default="")
    norms = [row["norm"] for row in rows if not math.isnan(row["norm"])]
    return Difference(
        first=first,
        what=what,
        loss=max(row["loss"] for row in rows),
        norm=max(norms, default=None),
        weights=gaps.get(tensor, 0.0),
        tensor=tensor,
        tolerance=allowed.get(tensor, FLOOR),
        excess=max(row["excess"] for row in rows),
        drifting=drifting,
        steps=tuple(rows),
    )


def _so_far(steps: Sequence[ReferenceStep]) -> list[ReferenceStep]:
    """Returns the steps with the largest noise up to each: diverged values may be close again by chance."""
    running: list[ReferenceStep] = []
    for step in steps:
        before = running[-1] if running else step
        noise = {name: max(noise, before.noise.get(name, 0.0)) for name, noise in step.noise.items()}
        loss, norm = max(step.loss_noise, before.loss_noise), max(step.norm_noise, before.norm_noise)
        running.append(dataclasses.replace(step, loss_noise=loss, norm_noise=norm, noise=noise))
    return running


def _tolerated(noise: float) -> float:
    return max(FLOOR, FACTOR * noise)


def _gaps(
    step: TrialStep, noise: ReferenceStep, without: Collection[str]
) -> tuple[dict[str, float], dict[str, float]]:
    gaps = {name: _number(gap) for name, gap in step.gaps.items() if name not in without}
    return gaps, {name: _tolerated(noise.noise.get(name, 0.0)) for name in gaps}


def _row(
    plain: ReferenceStep, step: TrialStep, noise: ReferenceStep, without: Collection[str]
) -> dict[str, float]:
    gaps, allowed = _gaps(step, noise, without)
    worst = max(gaps, key=lambda name: gaps[name] / allowed[name], default="")
    loss = _number(relative(plain.loss, step.loss))
    norm = math.nan if step.norm is None else _number(relative(plain.norm, step.norm))
    row = {
        "loss": loss,
        "loss tolerated": _tolerated(noise.loss_noise),
        "norm": norm,
        "norm tolerated": _tolerated(noise.norm_noise),
        "weights": gaps.get(worst, 0.0),
        "weights tolerated": allowed.get(worst, FLOOR),
    }
    excess = {f"{name} excess": row[name] / row[f"{name} tolerated"] for name in ("loss", "norm", "weights")}
    excesses = [excess for excess in excess.values() if not math.isnan(excess)]
    return {
        **row,
        **excess,
        "excess": max(excesses),
        "plan's loss": step.loss,
        "reference's loss": plain.loss,
    }


def _number(gap: float) -> float:
    """Replaces NaN by infinity, so that NaN counts as too different."""
    return math.inf if math.isnan(gap) else gap
