"""All hooks of Lightning: each is carried, or refused by its name; three modules in the wild run."""

from pathlib import Path

import lightning
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from lightning.pytorch.demos import boring_classes, lstm, transformer

import grappe
from grappe.contrib.lightning.lightning_module.unsupported import REMOVED
from grappe.errors import TaskError
from tests.contrib.lightning import hooks
from tests.contrib.lightning.modules import Data, Net
from tests.training.test_training import train


def test_every_method_of_lightnings_classes_is_known() -> None:
    """A hook that a new Lightning brings is found here, and not dropped in silence."""
    theirs = hooks.methods(LightningModule)
    assert theirs <= hooks.OF_THE_MODULE | hooks.OF_USERS


def test_the_guides_table_is_what_trying_each_hook_says() -> None:
    assert lightning.__version__.startswith("2.6")
    guide = hooks.GUIDE.read_text()
    assert guide == hooks.written(guide), "python -m tests.contrib.lightning.hooks writes it anew"


@pytest.mark.parametrize("name", REMOVED)
def test_hooks_of_lightning_1_are_refused_with_what_they_became(name: str) -> None:
    old = type("Old", (Net,), {name: lambda self, *rest: None})
    with pytest.raises(TaskError, match=f"{name}.*became {REMOVED[name]}"):
        grappe.from_lightning(old(), Data())


class WithTestStep(Net):
    """A test_step that logs what validation_step does, under test_'s names and of doubled outputs."""

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log_dict({"test_loss": 2 * F.cross_entropy(self(x), y)})
        self.log("test_accuracy", (self(x).argmax(1) == y).float().mean())


class WithTest(Data):
    def test_dataloader(self):
        return self.val_dataloader()


def test_test_data_is_scored_by_test_step(tmp_path: Path) -> None:
    torch.manual_seed(0)
    task = grappe.from_lightning(WithTestStep(), WithTest(), epochs=1)()
    run = train(tmp_path / "run", task).run
    validation, test = (
        grappe.evaluate(run, split=split, task=task, plan="threads=1") for split in ("validation", "test")
    )
    assert test.loss == pytest.approx(2 * validation.loss, rel=1e-5)
    assert dict(test.metrics) == pytest.approx(dict(validation.metrics))


class OtherTest(WithTestStep):
    def test_step(self, batch, batch_idx):
        self.log("test_loss", F.cross_entropy(self(batch[0]), batch[1]))


def test_a_test_step_of_other_metrics_is_refused() -> None:
    with pytest.raises(TaskError, match=r"test_step .it logs nothing, and validation_step val_accuracy"):
        grappe.from_lightning(OtherTest(), WithTest())
    grappe.from_lightning(OtherTest(), WithTest(), without=["test_step"])


class Late(Net):
    """A module whose layers are made by configure_sharded_model, as in the Alliance's DeepSpeed scripts."""

    def __init__(self) -> None:
        super().__init__()
        del self.net

    def configure_sharded_model(self):
        self.net = torch.nn.Linear(6, 3)


def test_a_model_that_is_made_late(tmp_path: Path) -> None:
    assert train(tmp_path / "run", grappe.from_lightning(Late(), Data(), epochs=1)()).status == "finished"


def wild(name: str, folder: Path) -> type[grappe.Task]:
    """Lightning's own demos as they are."""
    if name == "BoringModel":
        return grappe.from_lightning(boring_classes.BoringModel(), epochs=1, batch_size=16)
    if name == "BoringDataModule":
        made = boring_classes.BoringModel(), boring_classes.BoringDataModule()
        return grappe.from_lightning(*made, epochs=1, batch_size=16)
    (folder / "data").mkdir(exist_ok=True)
    words = " ".join(f"w{number % 17}" for number in range(700))
    (folder / "data" / "wikitext-2.txt").write_text(f"{words}\n")
    made = transformer.LightningTransformer(vocab_size=40)
    return grappe.from_lightning(made, epochs=1, batch_size=8, validation=0.2)


@pytest.mark.parametrize("name", ["BoringModel", "BoringDataModule", "LightningTransformer"])
def test_modules_in_the_wild_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = train(tmp_path / "run", wild(name, tmp_path)())
    assert result.status == "finished"
    assert result.step > 0


@pytest.mark.parametrize(
    ("module", "data", "words"),
    [
        (boring_classes.DemoModel, boring_classes.BoringDataModule, "not the mean over its batch"),
        (boring_classes.ManualOptimBoringModel, None, "automatic_optimization"),
        (lstm.LightningLSTM, None, "on_train_epoch_end"),
        (boring_classes.BoringModel, boring_classes.IterableBoringDataModule, "gives list"),
    ],
)
def test_the_demos_that_cannot_be_carried_are_refused_by_name(module, data, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        grappe.from_lightning(module(), data() if data else None)
