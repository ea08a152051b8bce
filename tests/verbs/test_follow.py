"""grappe follow and grappe curves: a run while it is written, cut back, and after it has ended."""

import csv
import io
import json
from pathlib import Path

import pytest

from grappe.errors import RunError
from grappe.training.run import Run
from grappe.verbs import follow as verb
from grappe.verbs.follow import write_csv


def step(number: int, loss: float | None = 1.0) -> str:
    return json.dumps({"kind": "step", "step": number, "epoch": 0, "loss": loss, "lr": 0.1}) + "\n"


def evaluation(number: int) -> str:
    return json.dumps({"kind": "evaluation", "step": number, "samples": 9, "loss": 0.5, "accuracy": 0.75}) + "\n"


@pytest.fixture
def run(tmp_path: Path) -> Run:
    made = Run.begin(tmp_path / "run", {"task": "x", "status": "running"})[0]
    (made.folder / "metrics.jsonl").write_text(step(1) + step(2) + evaluation(2))
    return made


def test_a_run_is_followed_to_its_end(run: Run) -> None:
    waits = []

    def meanwhile(seconds: float) -> None:
        """Writes to the run in the meantime: two halves of a line, a restart that cuts back, the end."""
        waits.append(seconds)
        file = run.folder / "metrics.jsonl"
        with file.open("a") as stream:
            if len(waits) == 1:
                stream.write(evaluation(4)[:20])
            if len(waits) == 2:
                stream.write(evaluation(4)[20:])
        if len(waits) == 3:
            run.cut_back(2)
            with file.open("a") as stream:
                stream.write(evaluation(6))
        if len(waits) == 4:
            run.finish()

    out = io.StringIO()
    assert verb.follow(run.folder, out, sleep=meanwhile) == "finished"
    told = [line.split("  ")[0] for line in out.getvalue().splitlines()]
    # After it was cut back it is read from its beginning.
    assert told == ["step 2", "step 4", "step 2", "step 6", "finished"]


@pytest.mark.parametrize("status", ["paused", "interrupted", "stopped"])
def test_a_run_that_has_ended_otherwise(run: Run, status: str) -> None:
    run.describe(status=status)
    assert verb.follow(run.folder, io.StringIO()) == status


def test_a_run_that_fell_silent_is_left(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verb, "SILENT_SECONDS", -1.0)
    assert "may have ended unexpectedly" in verb.follow(run.folder, io.StringIO())


def test_the_view_on_a_terminal(run: Run) -> None:
    usage = {"steps": 10, "seconds": 2.0, "phases": {"data": 1.5, "forward": 0.5}, "memory": {"host": 5e6}, "time": 1}
    (run.folder / "usage.jsonl").write_text(json.dumps({**usage, "watts": {"gpu": 100.0}}) + "\n")
    run.finish()

    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Terminal()
    verb.follow(run.folder, out)
    for words in ("5.0 steps/s", "100 W", "data 75%, forward 25%", "accuracy 0.7500", "finished"):
        assert words in out.getvalue()


def test_a_spark_is_the_curve() -> None:
    assert verb.spark([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]) == "▁▂▃▄▅▆▇█"
    assert verb.spark([1.0] * 100, width=10) == "▁" * 10
    assert verb.spark([float("nan")]) == ""


def test_curves_as_csv(run: Run) -> None:
    with (run.folder / "metrics.jsonl").open("a") as stream:
        stream.write(step(3, None) + '{"kind": "evaluation", "step": 3, "each": [0.5, 1.0]}\n{"kind": "st')
    out = io.StringIO()
    assert write_csv([run.folder, run.folder], out) == 10
    rows = list(csv.DictReader(io.StringIO(out.getvalue())))
    assert [row["step"] for row in rows[:5]] == ["1", "2", "2", "3", "3"]
    assert rows[2]["accuracy"] == "0.75"
    assert rows[3]["loss"] == ""
    assert rows[4]["each"] == "0.5 1.0"
    assert {row["run"] for row in rows} == {"run"}


def test_no_such_run(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="is not a run"):
        verb.follow(tmp_path / "none", io.StringIO())
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "run.json").write_text('{"plan": {"a": 1}}')
    with pytest.raises(RunError, match=r"run\.json is damaged"):
        verb.follow(tmp_path / "damaged", io.StringIO())
    with pytest.raises(RunError, match="is not a run"):
        write_csv([tmp_path / "none"], io.StringIO())
