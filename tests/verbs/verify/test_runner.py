"""Trials of verify: when rounding is measured more closely."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grappe.plan import Plan
from grappe.verbs.verify import runner as module
from grappe.verbs.verify.instrument import Instrumentation
from grappe.verbs.verify.runner import Difference, TrialRunner


@pytest.mark.parametrize(
    ("plan", "what", "loss_excess", "closer"),
    [
        ("replicate=2", ("weights",), 0.5, True),
        ("replicate=2", ("weights",), 2.0, False),
        ("domain=2", ("weights",), 2.0, True),
        ("domain=2", ("loss", "weights"), 2.0, False),
    ],
)
def test_under_domain_weights_that_differ_first_may_be_rounding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: str, what: tuple[str, ...], loss_excess: float, closer: bool
) -> None:
    """A shipped task's default verify was called different: Adam had carried rounding on to the losses."""
    excesses = {"loss excess": loss_excess, "norm excess": 0.1}
    found = Difference(
        first=0, what=what, loss=1e-4, norm=1e-4, weights=1e-4, tensor="a", tolerance=1e-5, excess=2.0, drifting=(),
        steps=(excesses,),
    )  # fmt: skip
    monkeypatch.setattr(module, "compare", lambda *_, **__: found)

    def run(_worker: str, request: Any, _plan: Plan) -> Any:
        return SimpleNamespace(folder=request.args[0].args[0].folder)

    notes: list[str] = []
    trials = TrialRunner(task=None, data=tmp_path, steps=1, folder=tmp_path, run=run, note=notes.append)  # type: ignore[bad-argument-type]
    parsed = Plan.parse(plan)
    trials.compare(trials.reference(parsed, Instrumentation()), (), parsed)
    assert ("one plain process, with parameters moved by their last bit" in notes) == closer
