"""ReduceLROnPlateau: fed with the score of each evaluation, alike on every process, and again when a run resumes."""

from pathlib import Path
from typing import Any

import pytest
from benchmarks import gallery_files
from torch.optim.lr_scheduler import ReduceLROnPlateau

import grappe
from grappe import finder
from grappe.errors import TaskError
from grappe.step.task_contract import schedule_of
from tests.faults.resume_cell import curves, hashes
from tests.faults.resuming import STEPS, check_same_bits, run
from tests.parity.tasks import Images
from tests.processes import Pool


class Watched(Images):
    """The rate halves whenever an evaluation is not much better than the best before: nearly each time."""

    monitor: str = "loss"
    mode: str = "min"

    def schedule(self, optimizer: Any, total_steps: int) -> Any:
        return ReduceLROnPlateau(optimizer, self.mode, factor=0.5, patience=0, threshold=0.02)


def scheduled(task: Images, folder: Path, score: str, mode: str = "min") -> list[float]:
    """The rates that the evaluations of a run give a schedule which is stepped by hand."""
    optimizer = task.optimizer(list(task.model().named_parameters()))
    by_hand = task.schedule(optimizer, STEPS)
    rates = []
    for line in sorted(curves(folder), key=lambda line: (line["step"], line["kind"] == "evaluation")):
        if line["kind"] == "step":
            rates.append(optimizer.param_groups[0]["lr"])
        else:
            by_hand.step(line[score])
    return rates


def rates(folder: Path) -> list[float]:
    return [line["lr"] for line in curves(folder) if line["kind"] == "step"]


@pytest.mark.parametrize(
    ("plan", "score"),
    [
        ("", "accuracy"),
        ("replicate=2", "loss"),
        ("shard=2", "loss"),
        ("pipeline=2,microbatches=2", "loss"),
        ("engine=lightning,replicate=2", "loss"),
        ("engine=deepspeed,replicate=2", "loss"),
        ("engine=textbook,replicate=2", "accuracy"),
    ],
)
def test_evaluations_step_it_and_a_resumed_run_has_the_same_rates(pool, tmp_path, plan, score):
    task = Watched(monitor=score, mode="max" if score == "accuracy" else "min")
    check_same_bits(pool, task, plan, tmp_path, evaluate_every=1)
    assert rates(tmp_path / "whole") == scheduled(task, tmp_path / "whole", score)
    assert rates(tmp_path / "whole")[-1] < rates(tmp_path / "whole")[0]


def test_another_engine_goes_on_with_the_rates(pool: Pool, tmp_path: Path) -> None:
    task, options = Watched(), {"evaluate_every": 1, "save_every": 2}
    run(pool, task, "replicate=2", tmp_path / "run", 5, **options)
    run(pool, task, "engine=textbook", tmp_path / "run", **options)
    assert rates(tmp_path / "run") == scheduled(task, tmp_path / "run", "loss")


def test_the_u_net_of_the_gallery_resumes_with_its_rates(tmp_path: Path) -> None:
    unet = finder.find(gallery_files.file("unet"))

    class Halving(unet):
        def schedule(self, optimizer: Any, total_steps: int) -> Any:
            return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.5)

    task = Halving(epochs=2, batch_size=100)
    for folder, steps in (("whole", 4), ("parts", 2), ("parts", 4)):
        options = grappe.Options(evaluate_every=1, save_every=1, steps=steps)
        grappe.train(task, "device=cpu,threads=1", tmp_path / folder, options=options)
    assert rates(tmp_path / "whole") == scheduled(task, tmp_path / "whole", "loss")
    assert rates(tmp_path / "whole")[-1] < 0.01
    assert curves(tmp_path / "parts") == curves(tmp_path / "whole")
    assert hashes(tmp_path / "parts", 4) == hashes(tmp_path / "whole", 4)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"monitor": "accuracy"}, "mode='min' for monitor='accuracy', of which more is better: give it mode='max'"),
        ({"mode": "max"}, "mode='max' for monitor='loss', of which less is better: give it mode='min'"),
    ],
)
def test_a_score_that_does_not_fit_is_refused(fields: dict[str, str], says: str) -> None:
    task = Watched(**fields)
    with pytest.raises(TaskError) as caught:
        schedule_of(task, task.optimizer(list(task.model().named_parameters())), 6)
    assert says in str(caught.value)


def test_a_name_that_only_evaluation_shows_is_checked_before_the_first_step(pool: Pool, tmp_path: Path) -> None:
    told = pool.run("tests.engines.told:told", 1, Watched(monitor="accurcy"), "", 1)
    assert told == [""]  # an engine alone evaluates nothing
    with pytest.raises(TaskError, match="monitor='accurcy', which no evaluation has: did you mean accuracy"):
        options = grappe.Options(steps=1)
        grappe.train(Watched(monitor="accurcy"), "device=cpu", tmp_path / "run", options=options)
