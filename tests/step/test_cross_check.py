"""check=: planted faults of one process are found within the stated steps, and the right process is named."""

from pathlib import Path

import pytest
import torch

from grappe.errors import PlanError
from grappe.plan import Plan
from grappe.step.clip import PIECE
from grappe.step.cross_check import _copied, _digest, _third, sum_of_bits
from tests.commands import GRAPPE, ran
from tests.processes import Pool
from tests.step.wrong_machine import EVERY, SOUND, drawn_faults, drawn_flips

TASK = """
import torch
import torch.distributed as dist
from torch import nn
from grappe.tasks.digits import Digits


class Faulty(Digits):
    fault: str = ""
    rank: int = 0
    after: int = 20

    def model(self):
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(64, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 10)
        )
        calls = []

        def spoil(module, inputs, output):
            calls.append(module.training and dist.is_initialized() and dist.get_rank() == self.rank)
            if not calls[-1] or sum(calls) <= self.after:
                return output
            values = output.detach().clone()
            if self.fault == "flip":
                values.view(torch.int32)[:, 3].bitwise_xor_(1 << 18)
            else:
                values[:, 3] = 0.5
            return output + (values - output.detach())

        if self.fault:
            model[1].register_forward_hook(spoil)
        return model
"""


def trained(folder: Path, plan: str, *words: str) -> tuple[int, str]:
    (folder / "faulty.py").write_text(TASK)
    done = ran(GRAPPE, "train", "faulty.py", "--plan", f"device=cpu,{plan}", "--run", "run", *words, cwd=folder)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(("fault", "rank"), [("flip", 2), ("stuck", 0)])
def test_the_process_that_computes_wrongly_is_named(tmp_path: Path, fault: str, rank: int) -> None:
    code, said = trained(tmp_path, "exact=4,replicate=4,check=10", f"fault={fault}", f"rank={rank}", "epochs=4")
    assert code == 75, said
    assert f"gave other gradients: process {rank} (node " in said and said.count("(node ") == 1
    step = int(said.partition(", step ")[2].partition(",")[0])
    assert 15 < step <= 30  # it begins in the 18th to 20th, as checks call the model too
    kept = max((tmp_path / "run" / "checkpoints").iterdir())
    assert int(kept.name.removeprefix("step-")) < 18  # none that the fault has touched
    code, said = trained(tmp_path, "exact=4,replicate=2,check=10", "after=100000", "epochs=1")
    assert code == 0, said


def test_a_small_batch_has_pieces_without_rows_which_are_not_the_ones_compared(tmp_path: Path) -> None:
    words = ("fault=stuck", "rank=1", "epochs=1", "batch_size=4")  # of 4 pieces 2 have rows
    code, said = trained(tmp_path, "exact=4,replicate=2,check=10", *words)
    assert code == 75 and "gave other gradients: process 0 (node" in said, said
    assert "process 1 (node" in said and "Two cannot tell which of them is wrong" in said


def test_sound_processes_have_the_weights_of_a_run_without_it(tmp_path: Path) -> None:
    for name, plan in (("without", "exact=4,replicate=2"), ("with", "exact=4,replicate=2,check=1")):
        folder = tmp_path / name
        folder.mkdir()
        code, said = trained(folder, plan, "epochs=1")
        assert code == 0, said
    assert "check: a piece was compared with another process's 23 times" in said
    one, other = ((max((tmp_path / name / "run" / "checkpoints").iterdir())) for name in ("without", "with"))
    for file in sorted(one.glob("*.safetensors")):
        assert file.read_bytes() == (other / file.name).read_bytes()


def test_a_digest_changes_with_each_bit() -> None:
    values = torch.randn(70_000)
    before = _digest([values, None])
    for place, bit in ((0, 0), (65_535, 22), (65_536, 31), (69_999, 5)):
        values.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
        assert _digest([values, None]) != before
        values.view(torch.int32)[place] ^= 1 << bit if bit < 31 else -(2**31)
    assert _digest([values, None]) == before
    values = torch.tensor([1.0, -1.0, -1.0, 1.0])
    assert _digest([values]) != _digest([-values]), "1 - 3 - 5 + 7 is 0: with factors in a row these sums are one"


@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16, torch.uint8, torch.complex128])
def test_a_digest_is_that_of_the_bits_wherever_they_lie(kind: torch.dtype) -> None:
    for size in (1, 3, 8, 8 * PIECE // kind.itemsize, 70_001):
        values = (torch.randn(size + 1) * 9).to(kind)
        assert _digest([values[1:], None, values[1:5]]) == _digest([values[1:].clone(), None, values[1:5].clone()])
        square = values[:-1].expand(2, size).contiguous().t()
        assert sum_of_bits(square) == sum_of_bits(square.contiguous())


def test_each_small_gradient_has_a_digest_of_its_own() -> None:
    gradients: list[torch.Tensor | None] = [torch.randn(size) for size in (5, 70_000, 30_000, 1, 40_000, 9)]
    gradients[3:3] = [None, torch.randn(0), torch.randn(7).double(), torch.randn(3, 2).bfloat16()]
    before = _digest(gradients)
    assert len(before) == len(gradients) and before[3] == before[4] == 0
    for number, gradient in enumerate(gradients):
        if gradient is not None and gradient.numel():
            changed = [*gradients[:number], gradient + 1, *gradients[number + 1 :]]
            assert [old == new for old, new in zip(before, _digest(changed), strict=True)].index(False) == number
            assert sum(old != new for old, new in zip(before, _digest(changed), strict=True)) == 1


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.uint8, torch.bool, torch.complex64])
def test_a_piece_arrives_as_it_was_sent(kind: torch.dtype) -> None:
    values = (torch.randn(6, 4, 3) * 9).to(kind)
    for sent in (values[2:4], values.transpose(0, 2), values[0, 0, 0], values[:0]):
        received = _copied(sent).to(torch.device("cpu"))
        assert (received.dtype, received.shape) == (sent.dtype, sent.shape) and torch.equal(received, sent)
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(_copied(sparse).to_dense(), torch.eye(3)) and _copied("text") == "text"


def test_plans_that_it_does_not_fit() -> None:
    with pytest.raises(PlanError, match="check=100 compares the pieces of exact to the bit: add for example exact=8"):
        Plan(check=100, replicate=2)


def test_a_difference_is_settled_on_a_third_node() -> None:
    assert _third(1, 2, ["a", "a", "b", "b"]) is None, "both of b may compute wrongly alike"
    assert _third(1, 2, ["a", "a", "b", "b", "c", "c"]) == 4
    assert _third(1, 2, ["a"] * 4) == 0
    assert _third(0, 1, ["a", "b"]) is None


@pytest.mark.parametrize("size", [2, 4])
def test_a_copy_that_memory_alters_is_not_saved_and_its_process_is_named(pool: Pool, tmp_path: Path, size: int) -> None:
    altered(pool, tmp_path, size, 6, seed=1)


def altered(pool: Pool, folder: Path, size: int, count: int, seed: int) -> None:
    flips = drawn_flips(count, size, seed)
    seen = pool.run("tests.step.wrong_machine:copied", size, folder, flips)
    for number, flip in enumerate(flips):
        for said, saved in (of_process[number] for of_process in seen):
            assert f"in the memory of process {flip.rank} (node " in said and said.count("(node ") == 1, (flip, said)
            assert saved == ["step-000001"]


STEPS = 32


def found(pool: Pool, size: int, count: int, seed: int) -> int:
    """Plants faults, of which each that alters a compared gradient must be found; returns how many alter one."""
    faults, altering, said = drawn_faults(count, size, seed), 0, dict[str, int]()
    everyone = pool.run("tests.step.wrong_machine:planted", size, faults, STEPS)
    for number, fault in enumerate(faults):
        seen = [of_process[number] for of_process in everyone]
        altered, pieces = seen[fault.rank].altered, int(fault.plan.partition("exact=")[2].partition(",")[0]) // size
        compared = [step for step, piece in altered if (step + 1) % EVERY == 0 and piece == step // EVERY % pieces]
        assert len({each.found for each in seen}) == 1, fault
        step = seen[0].found
        if step is None:
            assert not compared or seen[0].diverged, fault
        else:
            assert not compared or step == compared[0], fault
            named = [rank for rank in range(size) if f"process {rank} (node " in seen[0].said]
            assert named == ([fault.rank] if size > 2 else [0, 1]), (fault, seen[0].said)
        first = altered[0][0] if altered else step
        how = (
            "no gradient" if first is None
            else "not a number" if seen[0].diverged
            else "not compared" if step is None
            else "within" if step - first < EVERY * pieces
            else "later"
        )  # fmt: skip
        said[how] = said.get(how, 0) + 1
        altering += how in ("within", "later")
    print(f"{size} processes, {count} faults: {said}")
    return altering


@pytest.mark.parametrize("size", [2, 4])
def test_planted_faults_of_many_forms_are_found(pool: Pool, size: int) -> None:
    assert found(pool, size, 8, seed=1) >= 5


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("size", [2, 4])
def test_two_hundred_planted_faults_are_found(pool: Pool, tmp_path: Path, size: int) -> None:
    altering = sum(found(pool, size, 20, seed=100 + number) for number in range(6))
    assert altering >= 100
    altered(pool, tmp_path, size, 25, seed=2)


def no_false_alarm(pool: Pool, name: str, size: int, steps: int) -> None:
    plan = f"device=cpu,replicate={size},exact=4,check=2"
    compared = pool.run("tests.step.wrong_machine:sound", size, SOUND[name], plan, steps)
    assert compared == [steps // 2] * size


@pytest.mark.parametrize("name", ["images", "attending", "shared"])
def test_sound_processes_are_not_suspected(pool: Pool, name: str) -> None:
    no_false_alarm(pool, name, 2, 20)


@pytest.mark.soak
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("name", SOUND)
def test_a_thousand_sound_steps(pool: Pool, name: str) -> None:
    no_false_alarm(pool, name, 2, 500)
    no_false_alarm(pool, name, 4, 500)
