"""The advice that curves with a known shape lead to."""

from __future__ import annotations

import numpy as np
import pytest

from grappe.verbs.lr_find.advice import DivergenceTest, LossCurve, advise, band_of, noise, smoothed

STEPS = 120
RATES = np.geomspace(1e-4, 10, STEPS)


def curve(seed: int = 0, falls_at: float = 0.01, rises_at: float = 0.5, scatter: float = 0.02) -> LossCurve:
    """A loss of 2 that falls to 1 around `falls_at` and rises beyond `rises_at`, until it has diverged."""
    random = np.random.default_rng(seed)
    losses = 2 - 1 / (1 + (falls_at / RATES) ** 2) + (RATES / rises_at) ** 3 * 0.2
    losses += random.normal(0, scatter, STEPS)
    end = next((step for step, loss in enumerate(losses) if loss > 7), STEPS)
    return LossCurve(seed=seed, lr=tuple(RATES[:end]), loss=tuple(losses[:end]), diverged=end < STEPS)


def test_the_band_is_where_the_loss_falls_fastest_and_where_it_turns() -> None:
    found = advise([curve(seed) for seed in range(3)], STEPS)
    assert found.reason == ""
    assert found.band is not None
    assert 0.005 < found.band.steepest < 0.02
    assert 0.08 < found.band.largest_stable < 0.5
    assert found.band.steepest < found.band.suggested < found.band.largest_stable
    assert not found.band.reaches_the_end


def test_smoothing_does_not_shift() -> None:
    step = np.where(np.arange(STEPS) < 60, 2.0, 1.0)
    assert int(np.argmin(np.gradient(smoothed(step, STEPS)))) in (59, 60)


def test_a_ramp_that_ends_before_the_loss_rises_is_told() -> None:
    found = advise([curve(rises_at=1e3)], STEPS)
    assert found.band is not None
    assert found.band.reaches_the_end


@pytest.mark.parametrize("seed", range(5))
def test_noise_alone_gives_no_suggestion(seed: int) -> None:
    found = advise([curve(seed, falls_at=1e9, rises_at=1e9, scatter=0.3)], STEPS)
    assert found.band is None
    assert "does not fall beyond its noise before the ramp ended" in found.reason
    assert "--highest" in found.reason


def test_what_only_rises_gives_no_suggestion() -> None:
    found = advise([curve(falls_at=1e9)], STEPS)
    assert "before it diverged" in found.reason
    assert "--lowest" in found.reason


def test_what_diverges_at_once_gives_no_suggestion() -> None:
    found = band_of(LossCurve(seed=0, lr=(1.0, 2.0), loss=(2.0, 5.0), diverged=True), STEPS)
    assert isinstance(found, str)
    assert "it diverged within 2 steps, from lr=1 on: give a smaller --lowest" in found
    assert "within 0 steps" in str(band_of(LossCurve(seed=0, lr=(), loss=(), diverged=True), STEPS))


def test_seeds_that_disagree_give_no_suggestion() -> None:
    found = advise([curve(0), curve(1, falls_at=3e-4, rises_at=0.01)], STEPS)
    assert found.band is None
    assert "the seeds disagree" in found.reason


def test_the_noise_is_the_smoothed_curves() -> None:
    values = np.random.default_rng(0).normal(0, 0.1, 1000)
    assert noise(values, 1000) == pytest.approx(float(smoothed(values, 1000).std()), rel=0.5)


def test_it_stops_at_what_is_not_finite_or_far_above_the_best() -> None:
    for last, stops in ((float("nan"), True), (float("inf"), True), (7.9, True), (3.0, False)):
        stop = DivergenceTest()
        assert not any([stop(2.0), stop(1.9), stop(1.8)])
        assert stop(last) is stops
