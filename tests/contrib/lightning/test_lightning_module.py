"""grappe.from_lightning: learns what Lightning's own Trainer learns, under any plan; names what it refuses."""

import functools
import re
import warnings
from pathlib import Path

import lightning
import pytest
import torch
from torch.utils.data import DataLoader

import grappe
from grappe.checkpoint.initial import built
from grappe.data.datasets import training_order
from grappe.data.sampling import SampleOrder
from grappe.errors import TaskError
from grappe.parallel.materialise import fill, on_meta
from grappe.training.run import Run
from tests.commands import GRAPPE, ran
from tests.contrib.lightning import modules
from tests.contrib.lightning.modules import BATCH, HELD_OUT, TRAINING, BySteps, Data, Net
from tests.faults.resume_cell import curves
from tests.parity.cell import TOLERANCE, difference
from tests.processes import Pool
from tests.training.test_training import train
from tests.training.test_training_scores import trained

EPOCHS, STEPS = 2, 8
MODULES = {"epochs": Net, "steps": BySteps}


@functools.cache
def task_of(name: str) -> grappe.Task:
    torch.manual_seed(11)
    return grappe.from_lightning(MODULES[name](), Data(), epochs=EPOCHS)()


@functools.cache
def by_its_own_trainer(name: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The module under lightning.Trainer alone, on the same batches: weights and what its validation says."""
    torch.manual_seed(11)
    module, data = MODULES[name](), Data()
    data.setup("fit")
    order = SampleOrder(seed=0, length=TRAINING, batch_size=BATCH)
    per_epoch = order.steps_per_epoch

    class Batches:
        """The ledger's, epoch by epoch."""

        def __init__(self) -> None:
            self.epoch = 0

        def __len__(self) -> int:
            return per_epoch

        def __iter__(self):
            steps = [order.ids(self.epoch, step).tolist() for step in range(per_epoch)]
            self.epoch += 1
            return iter(steps)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=EPOCHS, logger=False, enable_checkpointing=False, num_sanity_val_steps=0,
            enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        )  # fmt: skip
        loader = DataLoader(data.train, batch_sampler=Batches())  # type: ignore[arg-type]
        trainer.fit(module, loader)
        trainer = lightning.Trainer(accelerator="cpu", logger=False, enable_progress_bar=False)
        whole = DataLoader(data.held_out, batch_size=HELD_OUT)
        found = trainer.validate(module, whole, verbose=False)[0]
    assert trainer is not None
    return {f"module.{name}": tensor for name, tensor in module.state_dict().items()}, dict(found)


@pytest.mark.parametrize(
    "plan",
    ["", "replicate=2", "shard=2", "replicate=2,microbatches=2", "engine=textbook,replicate=2",
     "engine=lightning", "engine=lightning,replicate=2"],
)  # fmt: skip
@pytest.mark.parametrize("name", MODULES)
def test_learns_what_its_own_trainer_learns(pool: Pool, name: str, plan: str) -> None:
    weights, _ = by_its_own_trainer(name)
    size = grappe.Plan.parse(plan).processes
    found = pool.run("tests.parity.cell:train", size, task_of(name), plan, STEPS)[0]
    gap, worst = difference(weights, found["weights"])
    assert gap <= TOLERANCE, f"{worst} is {gap:.1e} away"
    assert found["scores"].samples == TRAINING


def test_trains_evaluates_and_resumes_as_any_task(tmp_path: Path) -> None:
    weights, validation = by_its_own_trainer("epochs")
    train(tmp_path / "run", task_of("epochs"), steps=5, save_every=1)
    result = train(tmp_path / "run", task_of("epochs"), save_every=1)
    assert (result.status, result.step) == ("finished", STEPS)
    model = grappe.load(result.run, task_of("epochs"))
    assert isinstance(model.module, Net)
    assert difference(weights, model.state_dict())[0] <= TOLERANCE
    scores = grappe.evaluate(result.run, split="validation", task=task_of("epochs"), plan="threads=1")
    assert scores.samples == HELD_OUT
    assert scores.loss == pytest.approx(validation["val_loss"], rel=1e-5)
    assert dict(scores.metrics) == {"val_accuracy": pytest.approx(validation["val_accuracy"], rel=1e-5)}


def test_metrics_are_fresh_wherever_memory_comes_from() -> None:
    """A model that is filled on another device loses what is neither parameter nor buffer: metrics' states."""
    task = task_of("epochs")
    model = on_meta(task)
    model.to_empty(device="cpu")
    for metric in (one for one in model.modules() if type(one).__name__ == "MulticlassAccuracy"):
        for value in metric._defaults.values():
            value.fill_(1e9)
    fill(model, built(task), torch.device("cpu"))
    data = task.data("validation", Path())
    inputs, _ = task.collate([data[index] for index in range(HELD_OUT)])
    assert 0 <= model.eval()(inputs)[0, 1].item() <= 1


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        ("Manual", "Data", ["automatic_optimization"]),
        ("Hooked", "Data", ["on_train_epoch_end", "configure_gradient_clipping"]),
        ("Summed", "Data", ["training_step", "not the mean over its batch"]),
        ("Padded", "Data", ["training_step", "not the mean over its batch"]),
        ("Noisy", "Data", ["training_step", "draws its own random numbers"]),
        ("Counting", "Data", ["training_step", "depends on batch_idx"]),
        ("Ranked", "Data", ["largest", "not the mean over its batch"]),
        ("TwoOptimizers", "Data", ["configure_optimizers", "something else than one optimizer"]),
        ("Unmonitored", "Data", ["lr_scheduler", "monitors train_loss", "logs val_loss, val_accuracy"]),
        ("Attached", "Data", ["current_epoch", "not available"]),
        ("Net", "Weighted", ["sampler", "WeightedRandomSampler", "drop_last"]),
        ("Manual", "Ordered", ["grappe.Loop"]),
    ],
)
def test_what_it_cannot_carry_is_refused_by_name(module: str, data: str, words: list[str]) -> None:
    with pytest.raises(TaskError) as refused:
        grappe.from_lightning(getattr(modules, module)(), getattr(modules, data)())
    assert all(word in str(refused.value) for word in words), refused.value


def test_what_is_left_out_knowingly_is_not_refused() -> None:
    task = grappe.from_lightning(modules.Hooked(), modules.Ordered(), without=[
        "on_train_epoch_end", "configure_gradient_clipping",
    ])()  # fmt: skip
    assert (task.batch_size, task.epochs) == (BATCH, 10)
    ranked = grappe.from_lightning(modules.Ranked(), Data(), without=["largest"])
    assert set(ranked().metrics()) == {"val_accuracy"}


def test_a_schedule_that_is_left_out_is_left_out_of_the_training_too() -> None:
    task = grappe.from_lightning(modules.Plateau(), Data(), without=["lr_scheduler"])()
    optimizer = task.optimizer(list(task.model().named_parameters()))
    assert task.schedule(optimizer, 20) is None


@pytest.mark.parametrize("monitor", ["val_loss", "val_accuracy"])
def test_a_rate_that_falls_on_a_plateau_is_given_the_monitors_score(tmp_path: Path, monitor: str) -> None:
    module = modules.Plateau()
    module.monitor = monitor
    task = grappe.from_lightning(module, Data(), epochs=3)()
    train(tmp_path / "run", task)
    steps = [line["lr"] for line in curves(tmp_path / "run") if line["kind"] == "step"]
    assert steps[:: STEPS // EPOCHS] == [0.1, 0.1, pytest.approx(0.01)]


@pytest.mark.parametrize(
    ("module", "feature"), [("TwoOptimizers", "configure_optimizers"), ("Manual", "automatic_optimization")]
)
def test_what_a_task_cannot_do_without_is_refused_all_the_same(module: str, feature: str) -> None:
    with pytest.raises(TaskError, match=feature):
        grappe.from_lightning(getattr(modules, module)(), Data(), without=[feature])


@pytest.mark.parametrize(
    ("wrong", "words"), [("shuffel", "no such feature"), ("on_train_epoch_ends", "did you mean on_train_epoch_end?")]
)
def test_a_mistyped_name_is_not_left_out(wrong: str, words: str) -> None:
    both = ["on_train_epoch_end", "configure_gradient_clipping", wrong]
    with pytest.raises(TaskError, match=re.escape(words)):
        grappe.from_lightning(modules.Hooked(), modules.Data(), without=both)


def test_a_loader_that_does_not_shuffle_keeps_its_order_and_is_prepared() -> None:
    before = modules.Ordered.prepared
    task = grappe.from_lightning(modules.Net(), modules.Ordered())()
    assert modules.Ordered.prepared == before + 1
    task.prepare(Path())
    assert modules.Ordered.prepared == before + 2
    order = training_order(task, task.data("train", Path()))
    assert [order.order(epoch, 0, TRAINING).tolist() for epoch in (0, 3)] == [list(range(TRAINING))] * 2
    shuffled = grappe.from_lightning(modules.Net(), modules.Data())()
    assert training_order(shuffled, shuffled.data("train", Path())).sampling is None


def test_a_share_of_the_training_samples_validates() -> None:
    task = grappe.from_lightning(modules.Net(), modules.Unvalidated(), validation=0.25)()
    sizes = [len(task.data(split, Path())) for split in ("train", "validation")]  # type: ignore[arg-type]
    assert sum(sizes) == TRAINING
    assert sizes[1] == round(TRAINING / 4)
    assert not task.notes()


def test_without_a_validation_loader_all_samples_are_trained_on_and_that_is_said(tmp_path: Path) -> None:
    """The page's script: pytorch_lightning, `trainer.fit(net, train_loader)`."""
    import pytorch_lightning

    class Page(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.fc = torch.nn.Linear(6, 3)

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.fc(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=0.1)

    loader = modules.Unvalidated().train_dataloader()
    task = grappe.from_lightning(Page(), loader, epochs=1)()
    assert [len(task.data(split, Path())) for split in ("train", "validation")] == [TRAINING, 4]  # type: ignore[arg-type]
    assert any("no validation loader" in note and "validation=0.1" in note for note in task.notes())
    run = Run(train(tmp_path / "run", task).run)
    assert [(one["samples"], one["split"]) for one in run.records("evaluation")] == [
        (4, "validation (training samples)")
    ]
    assert sum(1 for _ in run.records("step")) == -(-TRAINING // BATCH)


def test_loaders_that_are_not_given_are_the_modules() -> None:
    """As of `trainer.fit(net, train_loader)` and `trainer.test(net)`."""

    class Own(Net):
        def setup(self, stage):
            self.data = Data()
            self.data.setup(stage)

        def val_dataloader(self):
            return self.data.val_dataloader()

        def test_dataloader(self):
            return self.data.val_dataloader()

    loader = modules.Unvalidated().train_dataloader()
    task = grappe.from_lightning(Own(), loader)()
    assert [len(task.data(split, Path())) for split in ("validation", "test")] == [HELD_OUT] * 2  # type: ignore[arg-type]
    task = grappe.from_lightning(Own(), (loader, loader, loader))()
    assert [len(task.data(split, Path())) for split in ("validation", "test")] == [TRAINING] * 2  # type: ignore[arg-type]
    task = grappe.from_lightning(Own(), loader, loader, loader)()  # as Trainer.fit takes them
    assert [len(task.data(split, Path())) for split in ("validation", "test")] == [TRAINING] * 2  # type: ignore[arg-type]
    for wrong in ((Data(), loader), (loader,) * 4):
        with pytest.raises(TaskError, match="a data module, or one to three loaders"):
            grappe.from_lightning(Own(), *wrong)
    with pytest.raises(TaskError, match=r"from_lightning\(…\) has no test_dataloader\(\)"):
        grappe.from_lightning(Net(), (loader, loader))().data("test", Path())


@pytest.mark.parametrize("plan", ["", "replicate=2,microbatches=2"])
def test_what_training_step_logs_is_kept(pool: Pool, tmp_path: Path, plan: str) -> None:
    torch.manual_seed(11)
    module = modules.Telling()
    task = grappe.from_lightning(module, Data(), epochs=1)()
    [note] = task.notes()
    assert all(word in note for word in ("largest (it is not the mean", "shape (it is not one", "first (it depends"))
    assert "accuracy" not in note
    records = trained(pool, task, plan, tmp_path / "run")
    # The weights change from step to step, so a plain loop says what the accuracy was.
    data, right = Data(), 0.0
    data.setup("fit")
    order = SampleOrder(seed=0, length=TRAINING, batch_size=BATCH)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    for step in range(order.steps_per_epoch):
        x, y = (torch.stack(column) for column in zip(*(data.train[i] for i in order.ids(0, step)), strict=True))
        output = module.net(x)
        right += float((output.argmax(1) == y).sum())
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(output, y).backward()
        optimizer.step()
    [scores] = [one for one in records if one["kind"] == "evaluation"]
    assert scores["training_accuracy"] == pytest.approx(right / TRAINING)
    assert not {"training_largest", "training_first"} & scores.keys()


TASK_FILE = """
import grappe
from tests.contrib.lightning.modules import Data, Net

Carried = grappe.from_lightning(Net(), Data(), epochs=2)
"""


def test_a_file_with_one_is_a_task_on_the_command_line(tmp_path: Path) -> None:
    from grappe import finder

    (tmp_path / "mine.py").write_text(TASK_FILE)
    for reference in (f"{tmp_path / 'mine.py'}", f"{tmp_path / 'mine.py'}:Carried"):
        task = finder.make(finder.find(reference), {"epochs": "3", "batch_size": "4"})
        assert (type(task).__name__, task.epochs, task.batch_size) == ("NetTask", 3, 4)


def test_it_is_measured_as_any_task(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(TASK_FILE)
    plans = ("--plan", "device=cpu,threads=1", "--plan", "device=cpu,threads=1,replicate=2")
    words = ("measure", "mine.py", *plans, "--steps", "5", "--repeats", "1", "--no-advice")
    done = ran(GRAPPE, *words, cwd=tmp_path, PYTHONPATH=str(Path(__file__).parents[2]))
    assert done.returncode == 0, done.stderr
    assert "replicate=2" in done.stdout
