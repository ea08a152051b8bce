"""A race: runs by their costs at the first evaluation that reached a score."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from grappe.errors import RunError, UsageError
from grappe.verbs.runs import Target, board, facts, last_run, listing, race, target_of, utilisation
from tests.typed import ended

ACCURACY = Target(name="accuracy", value=0.9, falls=False)


def make(
    base: Path, name: str, scores: dict[int, float], seconds: float = 0.5, samples: int = 100, **more: Any
) -> None:
    """Writes a run of 40 steps of 10 samples, evaluated at some of them."""
    folder = base / name
    folder.mkdir(parents=True)
    about = {"task": "digits", "plan": "replicate=2", "processes": 2, "processor": "a core", **more}
    (folder / "run.json").write_text(json.dumps(about))
    lines: list[dict[str, Any]] = []
    for step in range(1, 41):
        lines.append({"kind": "step", "step": step, "samples": 10 * step, "loss": 1.0, "seconds": seconds})
        if step in scores:
            scored = {"loss": 1 - scores[step], "accuracy": scores[step]}
            lines.append({"kind": "evaluation", "step": step, "samples": samples, **scored})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_costs_are_those_until_the_first_evaluation_that_reached_it(tmp_path: Path) -> None:
    used = {"gpu_hours": 4.0, "core_hours": 8.0, "joules": {"processors": 100.0, "gpu": "not measurable"}}
    make(tmp_path, "one", {10: 0.8, 20: 1.0, 40: 0.5}, used=used)
    [entry] = race(tmp_path, ACCURACY)
    assert entry["costs"] == {"time": 10.0, "samples": 200, "gpu-hours": 2.0, "core-hours": 4.0, "energy": 50.0}
    assert entry["best"] == 1.0 and entry["hardware"] == "2 x a core"
    [entry] = race(tmp_path, target_of("loss=0.1"))
    assert entry["costs"]["time"] == 10.0 and entry["best"] == 0.0


def test_those_who_reach_it_come_first_and_by_what_is_asked(tmp_path: Path) -> None:
    make(tmp_path, "slow", {20: 0.95}, seconds=2.0)
    make(tmp_path, "quick", {40: 0.95}, seconds=0.1)
    make(tmp_path, "never", {40: 0.7})
    make(tmp_path, "nearly", {40: 0.85})
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "run.json").write_text("{")
    entries = race(tmp_path, ACCURACY)
    by_time, by_samples = (list(board(entries, ACCURACY, by).columns[0].cells) for by in ("time", "samples"))
    assert by_time == ["quick", "slow", "nearly", "never"]
    assert by_samples == ["slow", "quick", "nearly", "never"]
    assert list(board(entries, ACCURACY, "time").columns[1].cells) == ["1", "2", "-", "-"]


def test_the_samples_of_a_score_are_shown_and_unknown_costs_come_last(tmp_path: Path) -> None:
    make(tmp_path, "all", {20: 0.95, 40: 0.93}, samples=180)
    make(tmp_path, "few", {20: 0.99}, samples=128, used={"gpu_hours": 1.0})
    table = board(race(tmp_path, ACCURACY), ACCURACY, "gpu-hours")
    columns = {column.header: list(column.cells) for column in table.columns}
    assert columns["run"] == ["few", "all"]
    assert columns["validation samples"] == ["128", "180"] and columns["GPU-hours"] == ["0.5", "-"]


def test_each_task_has_its_own_places_and_its_racers_names(tmp_path: Path) -> None:
    for name, task, seconds in (("a", "digits", 2.0), ("b", "mine.py", 3.0), ("c", "digits", 1.0)):
        make(tmp_path, name, {20: 0.95}, seconds=seconds, task=task)
    columns = [list(column.cells) for column in board(race(tmp_path, ACCURACY), ACCURACY, "time").columns]
    runs, places, who, names = columns[:4]
    assert list(zip(places, runs, names, strict=True)) == [
        ("1", "c", "digits"),
        ("2", "a", "digits"),
        ("1", "b", "mine"),
    ]
    assert set(who) == {tmp_path.owner()}


def test_damaged_records_are_passed_over(tmp_path: Path) -> None:
    make(tmp_path, "one", {10: 0.8, 20: 1.0})
    make(tmp_path, "damaged", {10: 0.8, 20: 1.0}, used=["no", "dictionary"])
    with (tmp_path / "one" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "evaluation", "step": "x", "accuracy": NaN}\n{"kind": "evaluation", "accuracy": []}\n{')
        file.write(f'\n{{"kind": "evaluation", "step": 30, "accuracy": {"9" * 400}}}\n')
    [entry] = race(tmp_path, ACCURACY)
    assert entry["costs"]["gpu-hours"] == 0.0 and entry["best"] == 1.0


def test_a_direction_may_be_said(tmp_path: Path) -> None:
    assert target_of("perplexity<=20") == Target(name="perplexity", value=20.0, falls=True)
    assert target_of("loss >= 2").falls is False and target_of("training_loss_box=1").falls
    make(tmp_path, "one", {10: 0.2, 20: 0.1})
    [entry] = race(tmp_path, target_of("accuracy<=0.1"))
    assert entry["costs"]["time"] == 10.0 and entry["best"] == 0.1


@pytest.mark.parametrize("text", ["accuracy", "accuracy=", "=0.9", "accuracy=much", "accuracy=nan"])
def test_what_is_no_target_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"accuracy=0\.97"):
        target_of(text)


def test_a_score_that_no_run_has_is_answered_with_those_there_are(tmp_path: Path) -> None:
    make(tmp_path, "one", {10: 0.8})
    with pytest.raises(RunError, match="called 'acuracy': there are accuracy, loss"):
        race(tmp_path, target_of("acuracy=0.9"))


@pytest.mark.parametrize(
    ("words", "code"),
    [(("--race", "accuracy=0.9", "--by", "samples"), 0), (("--race", "accuracy"), 2), (("one", "--race", "a=1"), 2)],
)
def test_from_the_command_line(tmp_path: Path, capsys, monkeypatch, words: tuple[str, ...], code: int) -> None:
    make(tmp_path, "one", {10: 0.8, 20: 1.0})
    monkeypatch.setenv("COLUMNS", "200")
    assert ended("runs", *words, "--runs", str(tmp_path)) == code
    assert code or "200" in capsys.readouterr().out


def test_runs_stand_in_the_order_of_their_starts_with_one_line_for_a_failure(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no run in"):
        last_run(tmp_path)
    make(tmp_path, "later", {40: 0.5}, started="2026-11-30T10:00:00+0000", used={"seconds": 200.0})
    make(tmp_path, "failed", {}, started="2026-11-30T09:00:00+0000", used={"seconds": 2.0})
    (tmp_path / "failed" / "failed").write_text("the metric 'mae' does not take an output [32, 1] and a target [32]")
    make(tmp_path, "undated", {})
    table = listing(tmp_path)
    columns = {str(column.header): list(column.cells) for column in table.columns}  # type: ignore[union-attr]
    assert columns["run"] == ["undated", "failed", "later"] and columns["time"] == ["", "2 s", "3 min"]
    assert columns["status"][1] == "failed: the metric 'mae' does …" and columns["started"][0] == ""
    os.utime(tmp_path / "later" / "run.json", (1e10, 1e10))
    assert last_run(tmp_path) == tmp_path / "later"


def test_the_newest_runs_are_listed_and_the_number_of_older_ones(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr("grappe.verbs.runs.MOST_LISTED", 2)
    for number, name in enumerate(("c", "a", "b", "d")):
        make(tmp_path, name, {}, tags=["t"])
        os.utime(tmp_path / name / "run.json", (number, number))

    def listed(**options: Any) -> list[Any]:
        table = listing(tmp_path, **options)
        return list(table.columns[0].cells)  # type: ignore[union-attr]

    assert listed() == ["b", "d"] and "2 older runs are left out: --all shows them" in capsys.readouterr().err
    assert sorted(listed(everything=True)) == sorted(listed(tag="t")) == ["a", "b", "c", "d"]
    assert "older" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("used", "shown"),
    [
        ({"seconds": 7200, "cpu_hours": 3.6, "core_hours": 4.0, "gpu_hours": 0.0}, "1.8/2 cores"),
        ({"seconds": 7200, "cpu_hours": 3.6, "core_hours": 4.0, "gpu_hours": 2.0, "gpu": 0.871}, "87%"),
        ({"seconds": 7200, "cpu_hours": 3.6, "core_hours": 4.0, "gpu_hours": 2.0}, ""),
        ({"seconds": "x", "gpu": 1}, ""),
        ({}, ""),
    ],
)
def test_the_use_of_gpus_or_cores_is_a_column(tmp_path: Path, used: object, shown: str) -> None:
    assert utilisation({"used": used}) == shown
    make(tmp_path, "one", {}, used=used)
    table = listing(tmp_path)
    assert not isinstance(table, str)
    columns = {str(column.header): list(column.cells) for column in table.columns}
    assert columns.get("use", [""]) == [shown]
    assert facts(tmp_path)[0]["utilisation"] == shown
