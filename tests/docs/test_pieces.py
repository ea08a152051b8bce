"""The guides' pieces of Python, and a site's file, that no test of their own runs."""

import inspect
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from docs import translations
from torch.nn import functional

import grappe
from grappe.cli.commands import app
from grappe.optimizers import scale_factor, warmed_up
from grappe.tasks.digits import Digits
from tests.rates import rates

ROOT = translations.ROOT
COMPLETE = "# digits_npz.py: a file with images [N, 8, 8], labels [N]"


def opened(block: str) -> tuple[str, str]:
    """Returns the language of a block, and its text."""
    first, _, rest = block.partition("\n")
    return first.strip("`"), rest.rpartition("\n")[0]


def first(text: str) -> str:
    return text.partition("\n")[0].strip()


def block_of(guide: str, start: str) -> str:
    """The guide's block that begins so."""
    texts = [opened(block)[1] for block in translations.blocks((ROOT / "docs" / guide).read_text())]
    return next(text for text in texts if first(text) == start)


def piece(guide: str, start: str, **names: Any) -> dict[str, Any]:
    """Runs the guide's block that begins so, and returns what it defines."""
    exec(compile(textwrap.dedent(block_of(guide, start)), guide, "exec"), names)
    return names


def larger_batch(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pieces = piece(
        "larger-batch.md",
        "def optimizer(self, named_parameters):",
        torch=torch,
        scale_factor=scale_factor,
        warmed_up=warmed_up,
    )
    mine = type("Mine", (Digits,), {name: pieces[name] for name in ("optimizer", "schedule", "factor")})
    task = mine(batch_size=256)
    optimizer = task.optimizer(task.model().named_parameters())
    schedule = task.schedule(optimizer, 100)
    found = rates(optimizer, schedule, 100)
    assert found[0] < 0.2
    assert max(found) == pytest.approx(0.4, rel=0.05)  # 4 times the batch


def clip(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = piece("task.md", "class Clip(Task):", Task=grappe.Task, torch=torch, F=functional)["Clip"]
    output = torch.randn(4, 8), torch.randn(4, 8), torch.tensor(1.0)
    assert task.loss(None, output, None).shape == (4,)


def counts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defined = piece("task.md", "def loss(self, output, target):", torch=torch)
    mine = SimpleNamespace(compared=lambda output, target: (torch.rand(2), torch.rand(3)))
    boxes = [torch.rand(1, 5), torch.rand(2, 5)]
    losses, counted = defined["loss"](mine, None, boxes), defined["counts"](mine, boxes)
    assert {name: one.shape for name, one in losses.items()} == {name: one.shape for name, one in counted.items()}


def sampling(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defined = piece("task.md", "def sampling(self, dataset):", grappe=grappe)
    targets = torch.tensor([0, 0, 0, 1])
    assert isinstance(defined["sampling"](None, SimpleNamespace(targets=targets)), grappe.Sampling)


def prediction(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = piece("task.md", "def prediction(self, output):")["prediction"](None, torch.eye(3))
    assert found["class"].tolist() == [0, 1, 2]


def units(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = piece("too-big.md", "def units(self, model):")
    model = SimpleNamespace(embed="embed", blocks=["one", "two"], head="head")
    assert found["units"](None, model) == ["embed", "one", "two", "head"]
    assert found["cuts"](None, 2) == [4]


def lightning_module(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lightning")
    from tests.contrib.lightning import modules

    project = SimpleNamespace(MyModule=modules.Net, MyData=modules.Data)
    monkeypatch.setitem(sys.modules, "my_project", project)
    assert piece("lightning.md", "# mine.py")["Mine"].epochs == 20


def tuned(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)

    def quick(task: Any, space: Any, *, trials: int, parallel: int, study: str) -> Any:
        assert (trials, parallel) == (20, 2)
        plan, options = "device=cpu,threads=1", grappe.Options(steps=2)
        return grappe.tune(task, space, plan, trials=1, study=study, sampler="random", options=options)

    names = SimpleNamespace(tune=quick, load=grappe.load)
    found = piece("tune.md", "study = grappe.tune(", grappe=names)
    assert len(found["study"].trials) == 1
    assert isinstance(found["model"], torch.nn.Module)


def a_site(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "grappe" / "sites").mkdir(parents=True)
    text = block_of("another-cluster.md", 'title = "Mine"')
    (folder / "grappe" / "sites" / "mine.toml").write_text(text)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(folder))
    monkeypatch.chdir(folder)
    words = "submit --dry-run --site mine --account a --time 1h -- train digits --plan replicate=2"
    assert app(words.split(), exit_on_error=False, print_error=False) == 0


HERE = {
    ("task.md", "def loss(self, output, target):"): counts,
    ("larger-batch.md", "def optimizer(self, named_parameters):"): larger_batch,
    ("lightning.md", "# mine.py"): lightning_module,
    ("another-cluster.md", 'title = "Mine"'): a_site,
    ("task.md", "class Clip(Task):"): clip,
    ("task.md", "def sampling(self, dataset):"): sampling,
    ("task.md", "def prediction(self, output):"): prediction,
    ("too-big.md", "def units(self, model):"): units,
    ("tune.md", "study = grappe.tune("): tuned,
}
"""Blocks that are run here."""


@pytest.mark.parametrize("block", HERE, ids=" ".join)
def test_a_piece_of_code(block: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    HERE[block](tmp_path, monkeypatch)


def test_the_calls_of_the_guide_to_clusters_fit() -> None:
    import grappe.slurm

    inspect.signature(grappe.slurm.submit).bind("digits", gpus=[1, 2, 4], site="narval", account="def-prof", time="1h")
    inspect.signature(grappe.slurm.queue).bind([], until_empty=True)
    inspect.signature(grappe.slurm.logs).bind("digits-2026")
