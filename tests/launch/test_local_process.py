"""Choice of the process that is named when several failed: the first by cause, not by report."""

from __future__ import annotations

import resource
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from grappe.launch.child import Report
from grappe.launch.local import explanation, hint
from grappe.profiling import limits
from grappe.profiling.limits import ControlGroup

PEER = "Connection closed by peer [127.0.0.1]:5000"


def failed(rank: int, exit_code: int = 1, why: str = "", **report: Any) -> Any:
    return SimpleNamespace(
        name=f"process {rank} of 2",
        exit_code=exit_code,
        why=why,
        report=Report(**report),
        log=Path("none"),
    )


def test_the_first_to_report_is_named() -> None:
    one = failed(0, kind="error", error="RunError", message="later", when=2.0)
    other = failed(1, kind="error", error="RunError", message="first", when=1.0)
    assert str(explanation([one, other])) == "first"


def test_one_that_lost_another_is_not_the_first() -> None:
    lost = failed(1, kind="error", error="ProcessDied", message=f"no proof: {PEER}", when=1.0)
    refused = failed(0, kind="error", error="UsageError", message="no thread", when=2.0)
    assert str(explanation([lost, refused])) == "no thread"
    lost = failed(1, kind="crashed", error="RuntimeError", message=PEER, when=1.0)
    crashed = failed(0, kind="crashed", error="ZeroDivisionError", message="division by zero", when=2.0)
    assert str(explanation([lost, crashed])).startswith("process 0 of 2 failed with ZeroDivisionError")
    assert str(explanation([lost])).startswith("process 1 of 2 failed with RuntimeError")


def test_one_that_was_killed_comes_before_all() -> None:
    lost = failed(1, kind="crashed", error="RuntimeError", message=PEER, when=1.0)
    killed = failed(0, exit_code=-signal.SIGKILL, kind="silent", when=2.0)
    assert str(explanation([lost, killed])).startswith("process 0 of 2 was killed by SIGKILL")


@pytest.mark.parametrize("code", [1, -signal.SIGSEGV, -signal.SIGABRT])
def test_a_silent_end_where_memory_is_limited_names_the_limit(
    monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    assert hint(code) == ""
    monkeypatch.setattr(
        resource, "getrlimit", lambda kind: (10**9 if kind == resource.RLIMIT_DATA else -1, -1)
    )
    assert "no more memory, which is limited here: see `ulimit -d`" in hint(code)
    silent = failed(0, exit_code=code, kind="silent", why=hint(code))
    assert "`ulimit -d`" in str(explanation([silent]))
    crashed = failed(0, kind="crashed", exit_code=1, error="ZeroDivisionError", why=hint(1))
    assert "ulimit" not in str(explanation([crashed]))


def test_a_kill_at_the_limit_of_a_job_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = ControlGroup(size=4_000_000_000, free=0)
    monkeypatch.setattr(limits, "control_group", lambda: group)
    monkeypatch.setattr(limits, "killed", lambda: 2)
    assert "this job or container may have 4.0 GB of memory together" in hint(-signal.SIGKILL, 1)
    for before in (2, None):  # somebody else killed it
        assert "see `dmesg`" in hint(-signal.SIGKILL, before)
    assert hint(-signal.SIGTERM, 1) == ""
