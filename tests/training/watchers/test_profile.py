"""The profile: its summary of made-up events, and a real one of a few steps."""

import gzip
import json
from pathlib import Path

import pytest

from grappe.errors import UsageError
from grappe.training.options import Options
from grappe.training.watchers.profile import Event, summary, union
from grappe.verbs.train import run_training
from tests.parity.tasks import Images
from tests.training.test_training import request_of, train


def test_spans_of_time() -> None:
    events = [Event("a", begin, end, 0, "main") for begin, end in ((5, 7), (0, 2), (1, 3), (6, 6.5))]
    assert union(events) == [(0, 3), (5, 7)]


def test_a_summary_names_operators_gaps_and_what_overlaps() -> None:
    events = [
        Event("aten::conv", 0, 4000, 3000, "main"),
        Event("aten::mm", 1000, 2000, 1000, "main"),
        Event("aten::add", 6000, 10000, 4000, "main"),
        Event("gloo:all_reduce", 3000, 7000, 4000, "thread 5"),
    ]
    told = summary(events, 2, "process 0")
    assert "2 steps of 5 ms" in told
    first = told.splitlines()[2].split()
    assert first == ["2", "ms", "40%", "0", "x", "aten::add"] or "aten::add" in first
    assert "no operator ran on the main thread: 1 ms a step (20%); the longest: 2 ms after aten::conv" in told
    assert "communication 2 ms a step, 50% of it while something was computed" in told


def test_a_gpu_is_looked_at_where_there_is_one() -> None:
    events = [
        Event("aten::mm", 0, 100, 100, "main"),
        Event("sm90_gemm", 50, 1050, 1000, "device"),
        Event("ncclDevKernel_AllReduce", 1000, 2000, 1000, "device"),
        Event("sm90_gemm", 3000, 4000, 1000, "device"),
    ]
    told = summary(events, 1, "process 3")
    assert "kernels on the GPU" in told
    assert "the GPU had nothing to do: 1 ms a step (25%); the longest: 1 ms after ncclDevKernel_AllReduce" in told
    assert "communication 1 ms a step, 5% of it" in told
    assert "no operation was recorded" in summary([], 3, "x")


def test_a_real_profile(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tmp_path / "run", Images(epochs=4), profile=(0,), profile_steps=3, profile_after=2)
    told = capsys.readouterr().out
    for words in ("process 0: 3 steps of", "operators on the host", "aten::", "no operator ran", "ui.perfetto.dev"):
        assert words in told
    folder = tmp_path / "run" / "profile"
    assert (folder / "rank-0.txt").read_text() in told
    with gzip.open(folder / "rank-0.json.gz") as stream:
        names = {event.get("name") for event in json.load(stream)["traceEvents"]}
    assert any(str(name).startswith("aten::") for name in names)


def test_what_cannot_be_profiled_is_said(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tmp_path / "run", steps=3, profile=(0,))
    assert "too few steps to profile: 3 of 10" in capsys.readouterr().out
    request = request_of(tmp_path / "run", Images(), "", run=None, options=Options(profile=(1,)))
    with pytest.raises(UsageError, match="--profile=1: there are process 0 to 0"):
        run_training(request)
