"""A loop of one's own: the same numbers under every plan, nothing lost when it is stopped, six changed lines."""

from __future__ import annotations

import difflib
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import grappe
from grappe.errors import PlanError, RunError, TaskError, UsageError
from grappe.plan import Plan
from tests.commands import TORCHRUN, Command

SCRIPT = str(Path(__file__).with_name("gan.py"))
EXAMPLES = Path(__file__).parents[2] / "examples"
TOLERANCE = 1e-5


def train(folder: Path, plan: str, name: str, *more: str) -> int:
    processes = Plan.parse(plan).processes
    starter = (TORCHRUN, "--nproc-per-node", str(processes)) if processes > 1 else (sys.executable,)
    command = Command(
        *starter, SCRIPT, f"{plan},threads=1,device=cpu".lstrip(","), f"{name}.safetensors", *more, cwd=folder
    )
    try:
        code, _, err = command.end()
    finally:
        command.close()
    assert code in (0, 1, 75), err
    return code


Tensors = dict[str, torch.Tensor]
Trained = Callable[[str], tuple[Path, Tensors]]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """By plan: the folder of a loop that nobody has stopped, and what it has learned."""

    @functools.cache
    def of(plan: str) -> tuple[Path, Tensors]:
        folder = tmp_path_factory.mktemp("trained")
        assert train(folder, plan, "found", "run") == 0
        return folder / "run", load_file(folder / "found.safetensors")

    return of


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "replicate=3"])
def test_learns_the_same(trained: Trained, plan: str) -> None:
    alone, found = trained("")[1], trained(plan)[1]
    assert set(found) == set(alone)
    for name, wanted in alone.items():
        gap = (found[name].double() - wanted.double()).norm() / wanted.double().norm()
        assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_its_folder_gives_the_trained_models(tmp_path: Path, trained: Trained, plan: str) -> None:
    run, found = trained(plan)
    made = (
        nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 2)),
        nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1)),
    )
    generator, critic = grappe.load_models(run, *made)
    assert not generator.training
    for which, model in (("g", generator), ("c", critic)):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), found[f"{which}.{name}"]), name
    with pytest.raises(TaskError, match="another model's"):
        grappe.load_models(run, nn.Sequential(*made[0], nn.Linear(2, 2)))
    with pytest.raises(RunError, match=r"grappe\.Loop"):
        grappe.load_models(tmp_path, *made)


@pytest.mark.parametrize("plan", ["", "replicate=2"])
def test_a_signal_saves_and_it_goes_on_to_the_same_bits(tmp_path: Path, trained: Trained, plan: str) -> None:
    code = train(tmp_path, plan, "parts", "parts", "6")
    assert code == (75 if not plan else 1), "torchrun has one exit code of its own for all failures"
    assert not (tmp_path / "parts.safetensors").exists()
    assert train(tmp_path, plan, "parts", "parts") == 0
    whole, parts = trained(plan)[1], load_file(tmp_path / "parts.safetensors")
    assert 0 < len(parts["losses"]) < len(whole["losses"])
    for name, wanted in whole.items():
        assert torch.equal(parts[name], wanted[-len(parts["losses"]) :] if name == "losses" else wanted), name


def test_it_goes_on_under_other_numbers_of_processes(tmp_path: Path, trained: Trained) -> None:
    """Two replicas, then one process, then two shards: in the end what one process alone has learned."""
    for plan, stop in (("replicate=2", "4"), ("", "8")):
        assert train(tmp_path, plan, "found", "run", stop) in (1, 75)
    assert train(tmp_path, "shard=2", "found", "run") == 0
    alone, found = trained("")[1], load_file(tmp_path / "found.safetensors")
    losses = found.pop("losses")
    assert 0 < len(losses) < len(alone["losses"]) - 6, "it went on behind the second stop"
    assert torch.allclose(losses, alone["losses"][-len(losses) :], rtol=TOLERANCE)
    for name, wanted in found.items():
        gap = (alone[name].double() - wanted.double()).norm() / wanted.double().norm()
        assert gap <= TOLERANCE, f"{name} is {gap:.1e} away"


def test_six_lines_change_an_existing_loop() -> None:
    texts = [(EXAMPLES / name).read_text().split('"""', 2)[2] for name in ("gan_by_hand.py", "gan.py")]
    before, after = (text.splitlines() for text in texts)
    added = [line[2:] for line in difflib.ndiff(before, after) if line.startswith("+ ") and line[2:].strip()]
    changed = [line for line in added if "grappe" in line or "loop" in line]
    assert len(changed) == 6
    beside = {"import sys", "from torch.utils.data import TensorDataset"}  # to read the plan; one import less
    assert set(added) - set(changed) == beside


@pytest.mark.parametrize(
    ("plan", "error", "words"),
    [
        ("tensor=2", PlanError, "not tensor: that takes an engine"),
        ("engine=textbook", PlanError, "another engine"),
        ("replicate=2", UsageError, "torchrun --nproc-per-node 2"),
    ],
)
def test_what_a_loop_of_ones_own_cannot_have(plan: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        grappe.Loop(plan)
