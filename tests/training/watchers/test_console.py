"""The end of a training in rows: no row that says nothing, and the commands that go on."""

import dataclasses
import io
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from grappe.launch.terminal import UserStream
from grappe.profiling.chronometer import timing
from grappe.profiling.phases import PHASES
from grappe.step.scores import Scores
from grappe.training.headspace import Headspace
from grappe.training.watchers.base import Outcome, Record
from grappe.training.watchers.console import Console, _spent
from tests.training.watchers.made_up import INFO, record

OUTCOME = Outcome(
    status="finished",
    step=1200,
    scores=Scores(samples=4, count=4.0, loss=3.21e-5, metrics={"accuracy": 0.75, "training_loss": 0.5}),
    timing=timing("host", [], list((dict.fromkeys(PHASES, 0.0) | {"forward": 2.0}).values())),
    headspace=Headspace(waited=0.0, share=0.0),
    peaks=[{"host": 488_000_000}],
)


def closing(
    peaks: Sequence[Mapping[str, int]], bottleneck: str, status: str = "finished", *, terminal: bool = False
) -> dict[str, str]:
    """The rows of a small training's end, by their names."""
    stream = io.StringIO()
    stream.fileno = sys.stdout.fileno  # type: ignore[method-assign]
    stream.isatty = lambda: terminal  # type: ignore[method-assign]
    console = Console(UserStream(stream))
    console.started(dataclasses.replace(INFO, folder=Path("runs/my run")))
    console.ended(dataclasses.replace(OUTCOME, status=status, bottleneck=bottleneck, peaks=peaks))
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


def lines(*steps: Record | Scores, prints: Callable[[int], bool] | None = None) -> list[str]:
    """The lines of steps and evaluations, up to their losses, of 29 samples an epoch in batches of 12."""
    stream = io.StringIO()
    stream.fileno = sys.stdout.fileno  # type: ignore[method-assign]
    console, last = Console(UserStream(stream), prints=prints), 0
    console.started(INFO)
    for step in steps:
        if isinstance(step, Record):
            console.stepped(step)
            last = step.step
        else:
            console.evaluated(last, step)
    return [line.partition("  validation")[0].partition("  lr")[0] for line in stream.getvalue().splitlines()]


SCORES = Scores(samples=4, count=4.0, loss=1.0, metrics={})


def test_an_evaluations_line_has_the_mean_loss_over_the_samples_since_the_one_before() -> None:
    first = [record(1)._replace(loss=8.0), record(2)._replace(loss=4.0), record(3)._replace(loss=2.0, samples=29)]
    second = [record(4)._replace(loss=3.0, samples=41), record(5)._replace(loss=math.inf, samples=53, skipped=True)]
    mean = f"{(12 * 8 + 12 * 4 + 5 * 2) / 29:.3f}"
    assert lines(*first, SCORES, *second, SCORES) == [
        f"epoch  1  step    3  loss {mean}",
        "epoch  2  step    5  loss 3.000",
    ]
    assert lines(SCORES) == ["epoch  0  step    0"], "no step since this start: an evaluation that was due"


def test_lines_between_evaluations_have_the_mean_since_the_line_before() -> None:
    steps = [record(step)._replace(loss=float(step)) for step in (1, 2)]
    assert lines(*steps, SCORES, prints=lambda step: True) == [
        "epoch  1  step    1  loss 1.000",
        "epoch  1  step    2  loss 2.000",
        "epoch  1  step    2  loss 1.500",
    ]


@pytest.mark.parametrize("best", [7, 9])
def test_the_end_names_the_best_checkpoint_and_evaluates_it_if_it_is_not_the_last(tmp_path: Path, best: int) -> None:
    for step in (7, 9):
        folder = tmp_path / "checkpoints" / f"step-{step:06}"
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"validation_loss": 0.25 if step == best else 0.5}))
    for low in (0.25, 0.125):
        stream = io.StringIO()
        stream.fileno = sys.stdout.fileno  # type: ignore[method-assign]
        console = Console(UserStream(stream))
        console.started(dataclasses.replace(INFO, folder=tmp_path))
        console.evaluated(6, dataclasses.replace(SCORES, loss=low))
        console.ended(dataclasses.replace(OUTCOME, status="stopped", step=9))
        shown = stream.getvalue()
        named = f"best checkpoint      step-00000{best}, epoch 3: validation loss 0.2500\n"
        assert named in shown and f"grappe evaluate {tmp_path}{' --checkpoint best' * (best < 9)}\n" in shown
        assert ("lower in step 6, 0.1250, where no checkpoint was due" in shown) is (low < 0.25)
