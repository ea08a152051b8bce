"""grappe drill on tasks that recover, and on one that cannot."""

import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from grappe.checkpoint import tensor_file
from grappe.checkpoint.commit import Origin, commit, write_new
from grappe.checkpoint.format import STATE, step_folder
from grappe.cli import commands
from grappe.plan import Plan
from grappe.training.run import Run
from grappe.verbs import drill
from tests.commands import GRAPPE
from tests.faults.stuck import Quick

STUCK = str(Path(__file__).with_name("stuck.py"))
PLAN = "replicate=2,threads=1,workers=0,device=cpu"


class Dicey(Quick):
    """Learns something else every time."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss(output, target) * (1 + int.from_bytes(os.urandom(4), "big") / 2**32)


@pytest.mark.slow
def test_everything_that_a_drill_does_is_recovered_from(start, tmp_path: Path) -> None:
    code, out, err = start(GRAPPE, "drill", f"{STUCK}:Quick", "--plan", PLAN).end()
    rows = [line.split("  ") for line in out.splitlines()[1:]]
    table = {row[0]: [cell.strip() for cell in row[1:] if cell.strip()] for row in rows if row[0]}
    assert list(table) == [fault.name for fault in drill.all_faults(Plan.parse(PLAN))], err
    for name, (recovered, lost, seconds, weights) in table.items():
        assert recovered == "yes", name
        assert 0 <= int(lost) <= 2 * drill.SAVE_EVERY, name
        assert float(seconds) > 0, name
        assert weights == "the same bits" or ("processes" in name and weights.startswith("within 1e-05")), name
    assert (code, err) == (0, "")
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_recovered_is_said(tmp_path, monkeypatch, capfd):
    killed = next(one for one in drill.all_faults(Plan()) if one.name == "all processes killed")
    monkeypatch.setattr(drill, "all_faults", lambda plan: [killed])
    code = commands.app(["drill", f"{__file__}:Dicey", "--plan", "threads=1,workers=0,device=cpu"])
    assert code == 1
    last = capfd.readouterr().out.splitlines()[-1]
    assert last.split()[:4] == ["all", "processes", "killed", "NO"]
    assert last.rstrip().endswith("away")


def test_a_process_that_computes_wrongly_is_found_and_nothing_of_it_is_kept(tmp_path, monkeypatch, capfd):
    plan = f"exact=4,check=100,{PLAN}"
    wrong = next(one for one in drill.all_faults(Plan.parse(plan)) if one.name == "one process computes wrongly")
    monkeypatch.setattr(drill, "all_faults", lambda plan: [wrong])
    code = commands.app(["drill", f"{STUCK}:Quick", "--plan", plan])
    last = capfd.readouterr().out.splitlines()[-1].split()
    assert (code, last[4:6], last[7:]) == (0, ["yes", "1"], ["the", "same", "bits"]), last


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
        ("replicate=2,exact=4", "exact=4", "replicate=4,exact=4"),
        ("shard=4,exact=4", "shard=2,exact=4", None),
    ],
)
def test_fewer_and_more_processes(plan: str, fewer: str | None, more: str | None) -> None:
    others = {one.name: str(one.plan) for one in drill.all_faults(Plan.parse(plan)) if one.plan is not None}
    assert others.pop("killed, resumed with more processes", None) == more
    assert others.pop("killed, resumed with fewer processes", None) == fewer
    assert not others


def saved(run: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """A run with one checkpoint of two files, each tensor in one of them."""
    Run.begin(run, {})
    beside, names = run / "checkpoints" / ".beside", sorted(tensors)
    beside.mkdir()
    files = {STATE: write_new(beside / STATE, b'{"step": 1}')}
    for rank in (0, 1):
        pieces = [
            tensor_file.Piece(name, tensors[name], tuple(tensors[name].shape), (0,) * tensors[name].dim())
            for name in names[rank::2]
        ]
        file = beside / f"rank-{rank}.safetensors"
        files[file.name] = tensor_file.write(file, pieces)
    commit(beside, step_folder(run / "checkpoints", 1), files, Origin(step=1))
    return run


def test_each_file_is_opened_once_however_many_tensors_it_holds(tmp_path, monkeypatch):
    tensors = {f"model.{index}": torch.full((3,), float(index)) for index in range(8)}
    a, b = (saved(tmp_path / name, tensors) for name in "ab")
    opened = []

    def counting(file: Path, **options: str) -> object:
        opened.append(file)
        return safe_open(file, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(tensor_file, "safe_open", counting)
    assert drill.difference(a, b, every_tensor=True) == 0
    assert len(opened) == len(set(opened)) == 4
