"""A skip counts as a failure where all tests must run, unless the list names it with a reason."""

import tomllib

import pytest

from tests import skips

NAMED = "tests/data/test_draw.py::test_a_gpu_draws_the_same_bits"


def skipped(nodeid: str) -> pytest.TestReport:
    return pytest.TestReport(
        nodeid, (nodeid, 0, nodeid), {}, "skipped", ("file.py", 1, "Skipped: no such thing"), "setup"
    )


@pytest.mark.parametrize(
    ("nodeid", "everything", "outcome"),
    [
        ("tests/test_any.py::test_one", "1", "failed"),
        ("tests/test_any.py::test_one", "", "skipped"),
        (NAMED, "1", "skipped"),
        ("tests/test_benchmarks.py::test_rivals_take_turns[accelerate]", "1", "skipped"),
        ("tests/test_benchmarks.py::test_rivals_take_turns[fabric,trainer]", "1", "failed"),
    ],
)
def test_an_unlisted_skip_fails_where_all_must_run(monkeypatch, nodeid: str, everything: str, outcome: str) -> None:
    monkeypatch.setenv(skips.VARIABLE, everything)
    report = skips._judged(skipped(nodeid))
    assert report.outcome == outcome
    if outcome == "failed":
        assert "Skipped: no such thing; all tests must run here" in str(report.longrepr)


def test_every_entry_has_a_reason() -> None:
    for kind in ("skip", "oldest"):
        for entry in tomllib.loads(skips.LIST.read_text())[kind]:
            assert entry["why"]


def test_what_the_oldest_torch_cannot_do_is_skipped_there_only(monkeypatch: pytest.MonkeyPatch) -> None:
    for version, any_skipped in (("2.8.0+cu128", True), ("2.9.1", False), ("2.13.0+cpu", False)):
        monkeypatch.setattr("torch.__version__", version)
        assert bool(skips.beyond_oldest.__wrapped__()) == any_skipped
