"""A few kills at random instants of the whole life of a training; `make soak` makes 500, under every engine."""

import random
import shutil
from pathlib import Path

import pytest

from tests import needs, warm
from tests.faults import whole_life
from tests.faults.whole_life import Kill, Life

whole_life.COLD = False
KILL = Kill(plan="replicate=2", role="one rank", phase="before the end", code=1, quiet=0.1)


@pytest.mark.parametrize(
    ("plan", "kills"),
    [("shard=2", 1), ("replicate=2", 1), ("pipeline=2,microbatches=2", 1), ("engine=deepspeed,shard=2", 1)],
)
def test_killed_at_some_instant_it_ends_as_one_that_is_not(plan: str, kills: int) -> None:
    needs.need(plan)
    warm._address()  # of this process, which is forked
    done, findings = whole_life.attack(kills, 1, 1, (plan,))
    assert len(done) >= kills
    assert findings == []


@pytest.mark.slow
def test_what_is_lost_is_found(tmp_path: Path) -> None:
    whole = whole_life.whole("", tmp_path / "whole")
    life = Life("", whole, tmp_path / "life", random.Random(0))
    shutil.copytree(whole.folder, tmp_path / "life", dirs_exist_ok=True)
    life.compare()
    assert life.findings == []
    log = tmp_path / "life/run/samples/rank-0.jsonl"
    log.write_text("".join(log.read_text().splitlines(keepends=True)[:-2]))
    (tmp_path / "life/run/.metrics.jsonl.part").touch()
    life.compare()
    assert "other ['files', 'samples']" in life.findings[0]


@pytest.mark.parametrize(
    ("said", "found"),
    [
        ("grappe: process 1 of 2 was killed by SIGKILL", ""),
        ("grappe: process 1 of 2 failed with RuntimeError: closed by peer", "no signal is named"),
        ("grappe: SIGKILL: EOFError (a bug in grappe: --debug shows more)", "'a bug in grappe'"),
        ("SIGKILL\nTraceback (most recent call last)", "'Traceback' after Kill("),
    ],
)
def test_what_a_user_must_never_read_is_found(tmp_path: Path, said: str, found: str) -> None:
    life = Life("replicate=2", whole_life.Whole(folder=tmp_path, seconds=1.0, end={}), tmp_path / "x", random.Random(0))
    life.kills.append(KILL)
    life.search(said, own=None)
    assert (life.findings == []) == (not found)
    assert all(found in one for one in life.findings)
