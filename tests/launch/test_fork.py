"""Tests of forked processes whose memory is limited."""

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from grappe.launch import fork

MEGABYTE = 1 << 20
LIMITS = fork.Limits(memory=64 * MEGABYTE, mapped=MEGABYTE, seconds=60)


def test_what_the_parent_frees_after_the_fork_is_not_what_the_child_took(monkeypatch: pytest.MonkeyPatch) -> None:
    """As its collection of garbage does, which begins again once the child is there."""
    garbage, parent = [bytes(range(256)) * (MEGABYTE // 256 * 200)], os.getpid()
    spared = fork.parents_garbage_spared

    @contextlib.contextmanager
    def freed() -> Iterator[None]:
        with spared():
            yield
        if os.getpid() == parent:
            garbage.clear()

    def work() -> str:
        time.sleep(0.2)  # so that it is looked at
        return f"{len(garbage[0]) // MEGABYTE} MB"

    monkeypatch.setattr(fork, "parents_garbage_spared", freed)
    assert fork.run_in_fork(work, LIMITS) == "200 MB"


def test_what_takes_too_much_is_ended() -> None:
    def work() -> None:
        taken = bytes(range(256)) * (MEGABYTE // 256 * 200)
        time.sleep(60)
        del taken

    limits = fork.Limits(memory=64 * MEGABYTE, mapped=1 << 40, seconds=60)
    with pytest.raises(fork.LimitReached, match="67 MB of memory"):
        fork.run_in_fork(work, limits)
