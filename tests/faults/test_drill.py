"""grappe drill on tasks that recover, and on one that cannot."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from grappe import cli
from grappe.plan import Plan
from grappe.verbs import drill
from tests.commands import GRAPPE, Command
from tests.faults.stuck import Quick

STUCK = str(Path(__file__).with_name("stuck.py"))
PLAN = "replicate=2,threads=1,workers=0,device=cpu"
MINUTES = 10 * 60


class Dicey(Quick):
    """Learns something else every time."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss(output, target) * (1 + os.urandom(1)[0])


def test_everything_that_a_drill_does_is_recovered_from(tmp_path: Path) -> None:
    command = Command(GRAPPE, "drill", f"{STUCK}:Quick", "--plan", PLAN, cwd=tmp_path)
    try:
        out, err = command.process.communicate(timeout=MINUTES)
    finally:
        command.close()
    rows = [line.split("  ") for line in out.splitlines()[1:]]
    table = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows if row[0]}
    assert list(table) == [fault.name for fault in drill.all_faults(Plan.parse(PLAN))], err
    for name, (recovered, lost, seconds, weights) in table.items():
        assert recovered == "yes", name
        assert 0 <= int(lost) <= 2 * drill.SAVE_EVERY, name
        assert float(seconds) > 0, name
        assert weights == "the same bits" or ("processes" in name and weights.startswith("within 1e-05")), (
            name
        )
    assert (command.process.returncode, err) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_recovered_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    killed = next(one for one in drill.all_faults(Plan()) if one.name == "all processes killed")
    monkeypatch.setattr(drill, "all_faults", lambda plan: [killed])
    code = cli.app(["drill", f"{__file__}:Dicey", "--plan", "threads=1,workers=0,device=cpu"])
    assert code == 1
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.split()[:4] == ["all", "processes", "killed", "NO"]
    assert last.rstrip().endswith("away")


@pytest.mark.parametrize(
    ("plan", "fewer", "more"),
    [
        ("", None, "replicate=2"),
        ("replicate=2", "", "replicate=3"),
        ("shard=2,zero=1", "", "shard=3,zero=1"),
        ("replicate=2,shard=2", "shard=2", "replicate=3,shard=2"),
        (
            "pipeline=3,schedule=interleaved,stages=2,microbatches=4",
            "microbatches=4",
            "replicate=2,pipeline=3,schedule=interleaved,stages=2,microbatches=4",
        ),
        ("engine=textbook,replicate=2", "engine=textbook", "engine=textbook,replicate=3"),
    ],
)
def test_fewer_and_more_processes(plan: str, fewer: str | None, more: str) -> None:
    others = {one.name: str(one.plan) for one in drill.all_faults(Plan.parse(plan)) if one.plan is not None}
    assert others.pop("killed, resumed with more processes") == more
    assert others.pop("killed, resumed with fewer processes", None) == fewer
    assert not others
