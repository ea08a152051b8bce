"""A calibration of the machine that runs the tests: every kind of plan is measured, and what is kept can be read."""

from __future__ import annotations

from pathlib import Path

import pytest

from grappe.foresight.calibration import KINDS, read
from grappe.foresight.links import COLLECTIVES, MEETING
from grappe.launch.world import cores
from grappe.verbs.foresee import calibrate

SEVERAL = set(KINDS) - {"one", "recompute", "offload"}


def test_every_kind_of_plan_is_measured_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of fewer steps than a user's, since its figures do not count here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrate, "STEPS", 8)
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "SAMPLES", 1024)
    notes: list[str] = []
    made = calibrate.calibrate(notes.append)
    kinds = set(KINDS) if cores() > 1 else set(KINDS) - SEVERAL
    assert set(made.overheads) == kinds
    assert all(one.messages >= 1 for one in made.overheads.values())
    assert len(notes) >= len(kinds)
    if cores() > 1:
        assert set(made.links["2"]) == {*COLLECTIVES, MEETING}
    kept = read()
    assert kept is not None and set(kept.overheads) == kinds
    assert kept.operators == {}
