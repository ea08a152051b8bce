"""The end of a training in rows: no row that says nothing, and the commands that go on."""

import dataclasses
import io
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from grappe.launch.terminal import UserStream
from grappe.profiling.chronometer import timing
from grappe.profiling.phases import PHASES
from grappe.step.scores import Scores
from grappe.training.headspace import Headspace
from grappe.training.watchers.base import Outcome
from grappe.training.watchers.console import Console, _spent
from tests.training.watchers.made_up import INFO


def closing(
    peaks: Sequence[Mapping[str, int]], bottleneck: str, status: str = "finished", *, terminal: bool = False
) -> dict[str, str]:
    """The rows of a small training's end, by their names."""
    stream = io.StringIO()
    stream.fileno = sys.stdout.fileno  # type: ignore[method-assign]
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    console = Console(UserStream(stream))
    console.started(dataclasses.replace(INFO, folder=Path("runs/my run")))
    console.ended(
        Outcome(
            status=status,
            step=1200,
            scores=Scores(samples=4, count=4.0, loss=3.21e-5, metrics={"accuracy": 0.75, "training_loss": 0.5}),
            timing=timing("host", [], list((dict.fromkeys(PHASES, 0.0) | {"forward": 2.0}).values())),
            headspace=Headspace(waited=0.0, share=0.0),
            bottleneck=bottleneck,
            peaks=peaks,
        )
    )
    rows = (line.partition("  ") for line in stream.getvalue().rpartition("\x1b[2K")[2].splitlines())
    return {name: value.strip() for name, _, value in rows}


SMALL = {"host": 488_000_000, "parameters": 18_000, "gradients": 18_000}


def test_a_peak_is_a_sum_where_it_has_several_parts_that_matter() -> None:
    assert _spent({"host": 488_000_000}) == _spent(SMALL) == "488 MB"
    assert _spent({"host": 488_000_000, "parameters": 102_000_000}) == "488 MB = parameters 102 MB, rest 386 MB"


def test_the_end_says_what_matters_and_what_comes_next() -> None:
    assert closing([SMALL, {**SMALL, "host": 495_000_000}], "") == {
        "training": "finished, 1,200 steps",
        "validation accuracy": "75.00% (3 of 4)",
        "training loss": "0.5000",
        "validation loss": "3.210e-05",
        "time": "2.0 s: forward 2.0 s",
        "peak memory": "488 MB to 495 MB in each process",
        "run": "runs/my run",
        "next": "grappe evaluate 'runs/my run'",
        "": "grappe report 'runs/my run'",
    }


def test_on_a_narrow_terminal_the_next_command_is_one_line_to_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    rows = closing([SMALL], "", terminal=True)
    assert rows["next"] == "grappe evaluate 'runs/my run'" and rows[""] == "grappe report 'runs/my run'"


def test_waits_and_large_parts_have_rows_of_their_own() -> None:
    large = {"host": 488_000_000, "parameters": 102_000_000}
    rows = closing([large, large], "input-bound: use workers=1", "interrupted")
    assert rows["bottleneck"] == "input-bound: use workers=1" and rows["peak memory, process 1"].startswith("488 MB = ")
    assert "next" not in rows
