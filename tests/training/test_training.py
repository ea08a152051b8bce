"""A training from start to end in one process: what it writes, when it evaluates, saves and stops, how it goes on."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import grappe
from grappe.checkpoint.format import list_checkpoints
from grappe.errors import DivergedError, TaskError, UsageError
from grappe.fields import count_or_part
from grappe.launch.rank import ProcessRank
from grappe.launch.signals import StopSignal
from grappe.plan import Plan
from grappe.task import Task
from grappe.training import loop
from grappe.training.options import Options
from grappe.training.request import Request, Result
from grappe.training.run import Run
from grappe.training.task_reference import TaskReference
from grappe.training.worker import worker
from tests.faults.resume_cell import curves
from tests.parity.tasks import Images

HERE = ProcessRank(launcher="test")


class Poisoned(Images):
    """One sample is not a number."""

    def data(self, split: str, folder: Path):
        data = super().data(split, folder)
        if split == "train":
            data.inputs[11] = float("nan")
        return data


class Averaged(Images):
    """A loss that averages."""

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().loss(output, target).mean()


class Rated(Images):
    """Learning rates that are NumPy's numbers."""

    def optimizer(self, named_parameters):
        return torch.optim.SGD([one for _, one in named_parameters], lr=np.float32(0.1))  # type: ignore[arg-type]

    def schedule(self, optimizer, total_steps: int):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: np.cos(step / total_steps))


def request_of(folder: Path, task: Task, plan: str = "threads=1", **fields: Any) -> Request:
    """A request of a training whose data lie beside its run."""
    place = {"run": folder, "base": folder.parent, "data": folder.parent}
    return Request(task=TaskReference.of(task), plan=Plan.parse(plan), **{**place, **fields})


def train(folder: Path, task: Task | None = None, plan: str = "threads=1", **options: Any) -> Result:
    """A training in this process, with a launcher's place so that nothing is redirected."""
    name, task = options.pop("name", ""), task or Images(epochs=3, dropout=0.3, rule="adam")
    return worker(request_of(folder, task, plan, name=name, options=Options(**options)), HERE, folder.parent)


def weights(run: Path) -> dict[str, torch.Tensor]:
    checkpoint = Run(run).latest()
    tensors = checkpoint.read_tensors()
    return {name: tensors.read(name) for name in tensors}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return set(a) == set(b) and all(torch.equal(a[name], b[name]) for name in a)


def test_a_run_is_what_the_design_says(tmp_path, capsys) -> None:
    result = train(tmp_path / "run", log_samples=True)
    run = Run(result.run)
    assert (result.status, result.step, run.is_finished()) == ("finished", 9, True)
    steps = list(run.records("step"))
    assert [step["step"] for step in steps] == list(range(1, 10))
    assert [step["samples"] for step in steps] == [12, 24, 29, 41, 53, 58, 70, 82, 87]
    assert [one["step"] for one in run.records("evaluation")] == [3, 6, 9]
    assert all(one["samples"] == 29 for one in run.records("evaluation"))
    assert sorted(one.name for one in run.checkpoints.iterdir()) == [f"step-{n:06d}" for n in (3, 6, 9)]
    known = run.read_description()
    assert known["fields"]["epochs"] == 3
    assert known["versions"]["torch"] == torch.__version__
    assert "finished, 9 steps" in capsys.readouterr().out
    noted = [json.loads(line) for line in (run.folder / "samples/rank-0.jsonl").read_text().splitlines()]
    epoch = [i for one in noted if one["kind"] == "step" and one["step"] <= 3 for i in one["ids"]]
    assert sorted(epoch) == list(range(29))
    evaluated = [i for one in noted if one["kind"] == "evaluation" and one["step"] == 3 for i in one["ids"]]
    assert sorted(evaluated) == sorted(epoch)


@pytest.mark.parametrize("plan", ["threads=1", "threads=1,engine=textbook", "threads=1,precision=bf16"])
@pytest.mark.parametrize("stop", [3, 4, 8])
def test_a_training_that_goes_on_is_the_one_that_never_stopped(tmp_path, plan: str, stop: int) -> None:
    task = Images(epochs=3, dropout=0.3, rule="adam", batchnorm=True, clip=0.5)
    whole = train(tmp_path / "whole", task, plan)
    paused = train(tmp_path / "parts", task, plan, steps=stop, log_samples=True)
    assert paused.status == "paused"
    assert not Run(paused.run).is_finished()
    went_on = train(tmp_path / "parts", task, plan, log_samples=True)
    assert went_on.step == whole.step
    assert same(weights(whole.run), weights(went_on.run))
    steps = [[one for one in curves(run) if one["kind"] == "step"] for run in (whole.run, went_on.run)]
    assert steps[0] == steps[1]


def test_evaluating_and_saving_when_asked_changes_nothing(tmp_path) -> None:
    result = train(tmp_path / "run", evaluate_every=2, save_every=4)
    assert [one["step"] for one in Run(result.run).records("evaluation")] == [2, 4, 6, 8, 9]
    names = sorted(one.name for one in Run(result.run).checkpoints.iterdir())
    assert names == ["step-000004", "step-000008", "step-000009"]
    a, b = train(tmp_path / "a"), train(tmp_path / "b", evaluate_every=1, save_every=1)
    assert same(weights(a.run), weights(b.run))


class Overfitted(Images):
    """Some validation targets are wrong: its best evaluation is neither at the first epoch nor at the last."""

    def data(self, split: str, folder: Path):
        data = super().data(split, folder)
        if split == "validation":
            data.targets[:6] = (data.targets[:6] + 1) % 5
        return data


OVERFITTED = Overfitted(epochs=12, rule="sgd", scheduled=False, dropout=0.3)


def tensors_by_step(run: Path) -> dict[int, dict[str, torch.Tensor]]:
    found = {}
    for checkpoint in list_checkpoints(Run(run).checkpoints):
        tensors = checkpoint.read_tensors()
        found[checkpoint.step] = {name: tensors.read(name) for name in tensors}
    return found


@pytest.fixture(scope="module")
def each_epoch(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, torch.Tensor]]:
    run = train(tmp_path_factory.mktemp("each") / "run", OVERFITTED, save_every=3, keep=100).run
    assert 3 < Run(run).choose("best").checkpoint.step < 33  # type: ignore[union-attr]
    return {Run(run).choose("best").checkpoint.step: {}, **tensors_by_step(run)}  # type: ignore[union-attr]


def test_where_saving_takes_too_much_of_the_time_epochs_are_left_out_and_the_best_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, each_epoch: dict[int, dict[str, torch.Tensor]]
) -> None:
    """Also where it is killed after the best, which was copied and not written yet."""
    monkeypatch.setattr(loop, "SAVING", (0.0, 0.0))  # the first epoch is saved: nothing has been spent before
    best = next(iter(each_epoch))
    uninterrupted = train(tmp_path / "run", OVERFITTED, keep=100).run
    evaluate, killed = loop.Training._evaluate, tmp_path / "killed"

    def dies(self: loop.Training, step: int) -> None:
        if step > best:
            raise KeyboardInterrupt
        evaluate(self, step)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(loop.Training, "_evaluate", dies)
        train(killed, OVERFITTED, keep=100)
    assert set(tensors_by_step(killed)) == {0, 3}
    train(killed, OVERFITTED, keep=100)
    for run in (uninterrupted, killed):
        found = tensors_by_step(run)
        assert {0, 3, best, 36} <= set(found) < set(each_epoch)
        assert all(same(tensors, each_epoch[step]) for step, tensors in found.items())
        assert Run(run).choose("best").checkpoint.step == best  # type: ignore[union-attr]


def test_a_loss_that_is_no_number_keeps_the_best_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "SAVING", (0.0, 0.0))
    backward = loop.Training._read_previous_step

    def diverges(self: loop.Training) -> None:
        if self.step == 8:
            raise DivergedError("the loss is nan")
        backward(self)

    monkeypatch.setattr(loop.Training, "_read_previous_step", diverges)
    with pytest.raises(DivergedError):
        train(tmp_path / "run", Images(rule="adam", epochs=4))
    assert Run(tmp_path / "run").choose("best").checkpoint.step == 6  # type: ignore[union-attr]


def test_patience_stops_and_counts_as_finished(tmp_path) -> None:
    task = Images(epochs=30, rule="sgd", scheduled=False)
    result = train(tmp_path / "run", dataclasses.replace(task, epochs=30), patience=1, evaluate_every=1)
    losses = [one["loss"] for one in Run(result.run).records("evaluation")]
    assert result.status == "stopped"
    assert losses[-1] >= min(losses[:-1])
    assert losses[:-1] == sorted(losses[:-1], reverse=True)
    assert Run(result.run).is_finished()


def test_a_loss_that_is_no_number_stops_before_anything_is_saved_over(tmp_path) -> None:
    with pytest.raises(DivergedError, match=r"epoch 1, step \d+ \(sample ids .*11.*\. No checkpoint was overwritten"):
        train(tmp_path / "run", Poisoned(epochs=2, batch_size=10))
    run = Run(tmp_path / "run")
    assert run.read_status(run.read_description()).startswith("failed: the loss")
    assert [one.name for one in Run(tmp_path / "run").checkpoints.iterdir()] == ["step-000000"]
    assert Run(tmp_path / "run").latest() is not None


class Assays(Task):
    """A table of which some targets were not measured, and one batch has none."""

    epochs: int = 1
    batch_size: int = 4
    filled: bool = True

    def model(self) -> nn.Module:
        return nn.Linear(3, 2)

    def data(self, split: str, folder: Path) -> grappe.Arrays:
        inputs = torch.randn(18, 3, generator=torch.Generator().manual_seed(len(split)))
        targets = inputs[:, :2] * 2
        targets[::3] = targets[4:8] = torch.nan
        return grappe.Arrays(inputs, targets)

    def sampling(self, dataset: Any) -> grappe.Sampling:
        return grappe.Sampling(shuffle=False)

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        return ~target.isnan()

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.mse_loss(output, target.nan_to_num() if self.filled else target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(named_parameters, lr=0.1)


def test_targets_that_are_no_numbers_are_named_where_they_count_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        DivergedError, match=r"0 x NaN is NaN.*target = target.nan_to_num\(\) in loss\(\).*in loss\(\):"
    ):
        train(tmp_path / "run", Assays(filled=False))


@pytest.mark.parametrize("plan", ["", "microbatches=2", "exact=2"])
def test_a_batch_in_which_nothing_counts_has_a_loss_of_zero(tmp_path: Path, plan: str) -> None:
    task = Assays()
    run = grappe.train(task, f"{plan},device=cpu,threads=1".strip(","), tmp_path / "run")
    torch.manual_seed(task.seed)
    model, dataset = task.model(), task.data("train", Path())
    optimizer = task.optimizer(model.parameters())
    for rows in torch.arange(18).split(4):
        optimizer.zero_grad()
        inputs, targets = dataset.inputs[rows], dataset.targets[rows]
        counts = task.counts(targets)
        ((task.loss(model(inputs), targets) * counts).sum() / counts.sum().clamp(min=1)).backward()
        optimizer.step()
    for name, weight in grappe.load(run).state_dict().items():
        torch.testing.assert_close(weight, model.state_dict()[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "exact=2,replicate=2", "engine=lightning,replicate=2"])
def test_a_loss_that_is_no_number_is_named_by_process(tmp_path: Path, plan: str) -> None:
    words = r"on process [01] of 2 alone \(node [^ ]+\) \(sample ids [\d, ]*11"
    with pytest.raises(DivergedError, match=words) as error:
        grappe.train(Poisoned(epochs=2, batch_size=10), f"{plan},device=cpu,threads=1", tmp_path / "run")
    assert str(error.value).partition("sample ids ")[2].partition(")")[0].count(",") in (3, 5), "its own"


def test_a_loss_that_averages_is_refused(tmp_path) -> None:
    with pytest.raises(TaskError, match='reduction="none"'):
        train(tmp_path / "run", Averaged())


class Stopped(StopSignal):
    """A signal that comes while one step is under way."""

    at: int = 0
    calls: int = 0

    @property
    def flag(self) -> float:
        Stopped.calls += 1
        return 1.0 if Stopped.calls >= Stopped.at else 0.0


@pytest.mark.parametrize("at", [3, 9])
def test_an_evaluation_that_a_signal_prevented_is_made_when_the_run_goes_on(tmp_path, monkeypatch, at: int) -> None:
    whole = train(tmp_path / "whole")
    monkeypatch.setattr("grappe.training.worker.StopSignal", Stopped)
    # The flag is read a step late: raised in the step before, it stops the one at which an evaluation is due.
    Stopped.calls, Stopped.at = 0, at - 1
    assert train(tmp_path / "run").status == "interrupted"
    assert at not in [one["step"] for one in Run(tmp_path / "run").records("evaluation")]
    Stopped.calls, Stopped.at = 0, 10**9
    assert train(tmp_path / "run").status == "finished"
    found, wanted = (list(Run(folder).records("evaluation")) for folder in (tmp_path / "run", whole.run))
    assert found == wanted
    assert same(weights(whole.run), weights(tmp_path / "run"))


def test_numpys_learning_rates_are_numbers_in_the_curves(tmp_path: Path) -> None:
    train(tmp_path / "run", Rated(epochs=2))
    run = Run(tmp_path / "run")
    rates = [one["lr"] for one in run.records("step")]
    assert rates == pytest.approx([0.1 * np.cos(step / 6) for step in range(6)])
    assert run.read_description()["start"]["optimizer"]["lr"] == pytest.approx(0.1)


def test_a_part_of_an_epoch_is_printed() -> None:
    def after(every: float, per_epoch: int, steps: int) -> list[int]:
        prints = Options(print_every=every).printing(per_epoch)
        return [step for step in range(1, steps + 1) if prints(step)]

    assert after(0.1, 20, 40) == list(range(2, 41, 2))
    assert after(0.1, 23, 46) == [3, 5, 7, 10, 12, 14, 17, 19, 21, 23, 26, 28, 30, 33, 35, 37, 40, 42, 44, 46]
    assert after(0.1, 3, 6) == [1, 2, 3, 4, 5, 6] and after(0.5, 9, 9) == [5, 9] and after(4, 9, 9) == [4, 8]
    assert after(1e-320, 3, 6) == [1, 2, 3, 4, 5, 6]
    assert [count_or_part(text, "") for text in ("50", "0.1", "1/10")] == [50, 0.1, 0.1]
    for wrong in (0, 1.5, -1):
        with pytest.raises(UsageError, match="a part of an epoch"):
            Options(print_every=wrong)


def test_a_few_validation_batches_say_what_all_would_take(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    run = Run(train(tmp_path / "run", plan="threads=1,validation_batch=10", validation_batches=2).run)
    assert {one["samples"] for one in run.records("evaluation")} == {20}
    out = capsys.readouterr().out
    assert "the first 2 of 3 batches took" in out and "all of them would take about" in out


def test_the_mean_loss_is_printed_every_so_many_steps(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train(tmp_path / "run", print_every=2)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    shown = {int(one[3]): (float(one[5]), float(one[7])) for one in lines if one[:1] == ["epoch"] and "lr" in one}
    records = {one["step"]: one for one in Run(tmp_path / "run").records("step")}
    assert list(shown) == [2, 4, 6, 8]
    for one in records.values():
        assert 0 < one["data"] + one["device"] <= one["seconds"] * 1.001
    for step, (loss, lr) in shown.items():
        two = [
            (records[each]["samples"] - records.get(each - 1, {}).get("samples", 0), records[each]["loss"])
            for each in (step - 1, step)
        ]
        mean = sum(samples * each for samples, each in two) / sum(samples for samples, _ in two)
        assert loss == pytest.approx(mean, rel=5e-4)  # four digits are shown
        assert lr == pytest.approx(records[step]["lr"], rel=0.01)
