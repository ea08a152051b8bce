"""Resuming: each process reads every tensor of a checkpoint once, and no more of it than its part."""

import dataclasses
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import Tensor

from grappe.checkpoint.format import list_checkpoints
from grappe.checkpoint.tensor_file import TensorFiles
from grappe.errors import RunError
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import SAVE, StopSignal
from grappe.plan import Plan
from grappe.training.options import Options
from grappe.training.run import Run
from tests.faults.resume_cell import part
from tests.faults.resuming import run
from tests.parity.tasks import Images
from tests.processes import Pool
from tests.training.test_training import train

TASK = Images(rule="adam", batchnorm=True, batch_size=16, samples=48)


def reads(process: ProcessRank, meet: Path, text: str, run: Path) -> tuple[int, Counter[str], Counter[str]]:
    """Resumes a training for one step: how often its files were opened, and calls and numbers read by tensor."""
    opened, calls, numbers = 0, Counter[str](), Counter[str]()
    original, make = TensorFiles.read_part, TensorFiles.__init__

    def counting(self: TensorFiles, name: str, shape: Sequence[int], offset: Sequence[int]) -> Tensor:
        calls[name] += 1
        numbers[name] += math.prod(shape)
        return original(self, name, shape, offset)

    def opening(self: TensorFiles, files: Sequence[Path]) -> None:
        nonlocal opened
        opened += 1
        make(self, files)

    patched = mock.patch.multiple(TensorFiles, read_part=counting, __init__=opening)
    with patched:
        part(process, meet, TASK, text, run, Options(steps=5, save_every=100), None)
    return opened, calls, numbers


@pytest.mark.parametrize(
    "plan", ["", "engine=textbook", "replicate=2", "shard=2", "shard=2,zero=1", "pipeline=2,microbatches=2"]
)
def test_a_resumed_training_reads_its_weights_once(pool: Pool, tmp_path: Path, plan: str) -> None:
    processes = Plan.parse(plan).processes
    run(pool, TASK, plan, tmp_path / "run", steps=4, save_every=4, evaluate_every=100)
    found = pool.run(f"{__name__}:reads", processes, plan, tmp_path / "run")
    checkpoint = Run(tmp_path / "run").checkpoints / "step-000004"
    tensors = TensorFiles(sorted(checkpoint.glob("*.safetensors")))
    sizes = {name: math.prod(tensors.shape(name)) for name in tensors if not name.startswith("local.")}
    assert {name.partition(".")[0] for name in sizes} == {"model", "optimizer"}
    for opened, calls, _ in found:
        assert opened == 1
        own = {name: count for name, count in calls.items() if name.startswith("local.")}
        # Which of the processes' buffers a model is made with is known when all are read; its own come back then.
        assert set(own.values()) <= ({1, 2} if Plan.parse(plan).data_parallel > 1 else {1})
        assert all(calls[name] <= 1 for name in sizes), calls
    total = sum((numbers for _, _, numbers in found), Counter[str]())
    copies = processes if plan.startswith("replicate") else 1
    for name, size in sizes.items():
        if tensors.shape(name):  # a step counter is read by every process
            assert total[name] == copies * size, name


def timed(process: ProcessRank, meet: Path, text: str, run: Path) -> None:
    """Trains an epoch that is saved by the clock after each step, as far as the flag's way takes no step."""
    with mock.patch("grappe.training.loop.SAVE_SECONDS", 0.0), mock.patch("grappe.training.loop.SAVING", (1e9, 1.0)):
        part(process, meet, dataclasses.replace(TASK, samples=160), text, run, Options(steps=10, keep=9), None)


@pytest.mark.parametrize("plan", ["", "replicate=2", "engine=textbook,replicate=2", "pipeline=2,microbatches=2"])
def test_a_checkpoint_is_made_by_the_clock_too(pool: Pool, tmp_path: Path, plan: str) -> None:
    pool.run(f"{__name__}:timed", Plan.parse(plan).processes, plan, tmp_path / "run")
    made = [checkpoint.step for checkpoint in list_checkpoints(Run(tmp_path / "run").checkpoints)]
    assert sorted(made) == [0, 3, 6, 9, 10] and Run(tmp_path / "run").choose().passed_over == ()


def test_a_stop_outweighs_a_request_to_save() -> None:
    stop = StopSignal()
    stop.ask_to_save(True)
    assert -(2.0**-19) < stop.flag < 0
    stop._handle(10, None)  # type: ignore[arg-type]
    stop.ask_to_save(True)
    assert stop.flag == 1.0 and torch.tensor([1 / 1024, stop.flag * 0 + SAVE]).half().sum() > 0
    stop.ask_to_save(False)
    assert stop.flag == 1.0


def test_a_count_of_restarts_that_is_no_number_is_refused(tmp_path: Path) -> None:
    train(tmp_path / "run", steps=2, save_every=1)
    Run(tmp_path / "run").describe(restarts=[[], None])
    with pytest.raises(RunError, match=r"run.json is damaged \(Expected `int`, got `array` - at `\$.restarts`\)"):
        train(tmp_path / "run", steps=3, save_every=1)
