"""Steps computed once more as one process does: the finding, what is found, and what the check leaves alone."""

import functools
import itertools
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe import Task
from grappe.training.checked_steps import figures, gradient_distances
from grappe.training.run import Run
from grappe.verbs.runs import describe
from tests.faults import resuming
from tests.faults.resume_cell import hashes
from tests.parity.structured import Texts
from tests.parity.tasks import Images
from tests.processes import Pool

BOTH = Images(batchnorm=True, dropout=0.3, rule="adam", clip=0.5, samples=29)


class Searched(Images):
    """Calls a closure several times a step."""

    def optimizer(self, named_parameters):
        return torch.optim.LBFGS(named_parameters, lr=0.1, max_iter=3)


def said(pool: Pool, task: Task, plan: str, folder: Path, steps: int = 2) -> str:
    return resuming.run(pool, task, plan, folder / "run", steps=steps)


@pytest.mark.parametrize(
    ("task", "plan"),
    [
        *(
            (BOTH, plan)
            for plan in ("replicate=2", "replicate=3", "shard=2,zero=1", "shard=2", "engine=lightning,shard=2")
        ),
        (BOTH, "exact=4,replicate=2"),
        (Images(dropout=0.3, clip=0.5), "engine=textbook,replicate=2"),
        (Images(dropout=0.3), "replicate=2,microbatches=2"),
        (Images(), "pipeline=2,microbatches=2"),
        (Images(unused=True), "replicate=2"),
        (BOTH, "replicate=2,precision=fp64"),
        (BOTH, "replicate=2,precision=bf16"),
        (Texts(), "replicate=2"),
        (Searched(), "shard=2"),
    ],
)
def test_the_first_step_is_one_process_s(pool: Pool, task: Task, plan: str, tmp_path: Path) -> None:
    found = re.search(r"^checked: one process's first step, to (.*)$", said(pool, task, plan, tmp_path), re.M)
    assert found, "it says something else"
    loosest = 1e-8 if "fp64" in plan else 0.04 if "bf16" in plan else 1e-4
    assert found[1] == "the bit" or float(found[1]) < loosest


class Sums(nn.Module):
    """A layer whose inputs lose the batch's mean, from some forward on."""

    def __init__(self, begins: int) -> None:
        super().__init__()
        self.layer, self.begins = nn.Linear(3, 1), begins
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
        if self.calls > self.begins:
            inputs = inputs - inputs.mean(0)
        return self.layer(inputs)


class Drawing(Dataset):
    """Samples, with noise from a generator of its own, which counts them, if it draws."""

    def __init__(self, draws: bool) -> None:
        self.draws = draws
        self.generator, self.read = torch.Generator().manual_seed(3), 0
        self.inputs = torch.randn(48, 3, generator=torch.Generator().manual_seed(2))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        self.read += self.draws
        row = self.inputs[index]
        return row + self.read * torch.rand(3, generator=self.generator) / 100, row.sum()[None] + 1


class Centred(Task):
    """Regression; the batch's mean is taken off from the forward `begins` on."""

    epochs: int = 100
    batch_size: int = 16
    begins: int = 10**6
    draws: bool = False
    learning_rate: float = 0.01

    def model(self) -> nn.Module:
        return Sums(self.begins)

    def data(self, split: str, folder: Path) -> Any:
        return Drawing(self.draws)

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target) ** 2).flatten(1).mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=self.learning_rate)


class Compared(Centred):
    """The same, with a loss that compares the batch's samples, as it declares."""

    whole_batch_loss = True

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return ((output - target.std(0) - target) ** 2).mean()


class Halves(Centred):
    """The same, of at most half a batch."""

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        if output.requires_grad and len(output) > self.batch_size // 2:
            raise ValueError("too many rows")
        return super().loss(output, target)


@pytest.mark.parametrize(
    "plan",
    [
        "replicate=2",
        "shard=2",
        "replicate=2,microbatches=2",
        "engine=horovod,replicate=2",
        "replicate=2,precision=bf16",
    ],
)
def test_statistics_of_the_batch_are_found_in_the_first_step(pool: Pool, plan: str, tmp_path: Path) -> None:
    text = said(pool, Centred(begins=-1), plan, tmp_path)
    assert re.search(
        r"^its first step is not one process's: the (loss|gradient of layer\.\w+) differs by 0\.\d", text, re.M
    )
    assert re.search(r"test_checked_steps\.py:\d+ \(mean\): computed over several samples", text)
    assert ("--plan domain=2,cut=batch" in text) == ("engine" not in plan)


def test_a_loss_that_is_declared_to_compare_samples_is_no_cause(pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Compared(begins=-1), "replicate=2", tmp_path)
    assert re.search(r"\d\. test_checked_steps\.py:\d+ \(mean\): computed over several samples", text), text


def test_what_begins_later_is_found_and_ends_nothing(pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Centred(begins=20), "replicate=2", tmp_path, 300)
    assert "checked: one process's first step" in text
    step = re.search(r"^step (\d+) is not one process's", text, re.M)
    assert step and 20 < int(step[1]) <= 300
    assert Run(tmp_path / "run").latest().step == 300
    cells = " ".join(str(cell) for column in describe(tmp_path / "run").columns for cell in column.cells)
    assert re.search(r"\d steps against one process: at most .* apart, in step \d+", cells)


def test_batch_normalisation_of_its_own_rows_is_found(pool: Pool, tmp_path: Path) -> None:
    assert "its first step is not one process's" in said(pool, BOTH, "replicate=2,batchnorm=local", tmp_path)
    assert "its first step is not one process's" in said(pool, BOTH, "replicate=2,dropout=local", tmp_path / "b")


@pytest.mark.parametrize("plan", ["replicate=2,workers=0", "shard=2,workers=0"])
def test_it_leaves_the_training_alone(pool: Pool, plan: str, tmp_path: Path) -> None:
    for folder, check in (("with", True), ("without", False)):
        said = resuming.run(pool, Centred(draws=True), plan, tmp_path / folder, steps=6, no_check=not check)
        assert ("its first step is not one process's" in said) == check
    assert hashes(tmp_path / "with", 6) == hashes(tmp_path / "without", 6)


def test_one_process_and_measurements_are_not_checked(pool: Pool, tmp_path: Path) -> None:
    assert "one process's" not in said(pool, Centred(), "", tmp_path)
    assert "one process's" not in resuming.run(pool, Centred(), "replicate=2", tmp_path / "b", steps=2, steps_only=True)


def test_a_task_that_fails_on_the_whole_batch_is_said(pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Halves(), "replicate=2", tmp_path)
    assert "its first step could not be computed as one process does: ValueError: too many rows" in text


def gradients(**given: Tensor) -> Any:
    named = []
    for name, gradient in given.items():
        parameter = nn.Parameter(torch.zeros(gradient.shape, dtype=gradient.dtype))
        parameter.grad = gradient
        named.append((name, parameter))
    return figures(named)


def test_figures_see_scale_sign_order_and_absence() -> None:
    g = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    of = functools.partial(gradients, b=torch.ones(3))
    whole = of(a=g)
    assert max(gradient_distances(of(a=g.clone()), whole).values()) == 0
    for other in (g * 1.01, -g, g.flip(0), g.flip(1), g.roll(1, 0)):
        assert gradient_distances(of(a=other), whole)["the gradient of a"] > 5e-3
    assert gradient_distances(gradients(b=torch.ones(3)), whole)["the gradient of a"] > 0.9
    assert gradient_distances(of(a=g, c=torch.ones(1)), whole)["the gradient of c"] > 1
    assert gradient_distances(of(a=g + 1e-7), whole)["the gradient of a"] < 1e-5


def test_kinds_of_gradients_have_figures() -> None:
    z = torch.complex(torch.ones(3, 2), torch.zeros(3, 2))
    assert gradient_distances(gradients(z=z), gradients(z=z * 1j))["the gradient of z"] > 0.1
    rows = torch.eye(4)[:2].to_sparse()
    assert gradients(e=rows) == gradients(e=rows.to_dense())
    assert gradients(s=torch.tensor(2.0))["s", ()] == (2.0, 2.0)
    assert all(map(math.isfinite, gradients(h=torch.ones(3, dtype=torch.bfloat16))["h", (0,)]))


NOT_COUNTED = """
import torch
from grappe.profiling import memory

cpu = torch.device("cpu")
before = memory.peak(cpu)["host"]
with memory.not_counted(cpu):
    block = torch.ones(80_000_000)
    inside = memory.peak(cpu)["host"]
    del block
print(inside > before + 200e6, memory.peak(cpu)["host"] < before + 100e6)
"""


def test_a_check_is_in_no_peak() -> None:
    """In a process of its own, whose peak is low."""
    done = subprocess.run([sys.executable, "-c", NOT_COUNTED], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True"]


class Keeps(nn.Module):
    """A layer that keeps its inputs' mean, in a buffer or an attribute, and uses it from the second step on."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.layer, self.where = nn.Linear(3, 1), where
        if where == "buffer":
            self.register_buffer("centre", torch.zeros(3))
        else:
            self.centre = torch.zeros(3)

    def forward(self, inputs: Tensor) -> Tensor:
        output = self.layer(inputs - self.centre)
        if self.training:
            self.centre = 0.5 * self.centre + 0.5 * inputs.mean(0)
        return output


class Centring(Centred):
    where: str = "buffer"

    def model(self) -> nn.Module:
        return Keeps(self.where)


class Mean(nn.Module):
    def forward(self, tokens: Tensor) -> Tensor:
        return tokens.sum(1)


class Padded(Centred):
    """Texts that collate() pads to each batch's longest, and dropout."""

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Embedding(9, 3, padding_idx=0), nn.Dropout(0.5), Mean(), nn.Linear(3, 1))

    def units(self, model: Any) -> Any:
        return list(model)

    def data(self, split: str, folder: Path) -> Any:
        return [(torch.full((1 + number % 7,), 1 + number % 8), torch.ones(1)) for number in range(48)]

    def collate(self, samples: Any) -> Any:
        texts = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
        return texts, torch.stack([target for _, target in samples])


@pytest.mark.parametrize("where", ["buffer", "attribute"])
@pytest.mark.parametrize("plan", ["replicate=2", "shard=2"])
def test_what_a_forward_keeps_is_compared(pool: Pool, where: str, plan: str, tmp_path: Path) -> None:
    """The gradients of the first step are one process's."""
    text = said(pool, Centring(where=where), plan, tmp_path)
    found = f"its first step is not one process's: the {where} centre differs by "
    assert re.search(rf"^{re.escape(found)}[\d.]+\. test_checked_steps\.py:\d+ \(mean\): computed over", text, re.M)


def test_microbatches_are_compared_with_the_whole_batch(pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Centring(), "microbatches=2", tmp_path)
    assert "its first step is not the whole batch's: " in text
    assert "Without microbatches= each function gets the whole batch" in text
    assert "checked: the whole batch's first step, to " in said(pool, Images(), "microbatches=2", tmp_path / "other")


def test_padding_of_each_part_is_named(pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Padded(batch_size=6), "replicate=3,dropout=local", tmp_path)
    assert re.search(
        r"its first step is not .*\. collate\(\) pads each part of a batch to its own length \([\d, ]+\)", text
    )
    assert "With --plan domain=3,cut=batch" in text


@pytest.mark.parametrize(
    "plan", ["replicate=3", "shard=2", "replicate=2,microbatches=2", "pipeline=2,microbatches=2,replicate=2"]
)
def test_parts_are_padded_as_one_process_pads(plan: str, pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Padded(batch_size=6), plan, tmp_path, steps=8)
    assert "checked: one process's first step, to" in text
    assert "is not one process's" not in text
    assert "each process loads whole batches, and so pads as one process does" in text


class Normalised(Centred):
    """Normalises its activations again and again, over few rows: bf16 rounds gradients by a tenth."""

    def model(self) -> nn.Module:
        widths = (3, *[16] * 6)
        layers = [(nn.Linear(a, b), nn.BatchNorm1d(b), nn.ReLU()) for a, b in itertools.pairwise(widths)]
        return nn.Sequential(*itertools.chain.from_iterable(layers), nn.Linear(16, 1))


def test_rounding_of_bf16_is_no_difference(pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Normalised(), "replicate=2,precision=bf16", tmp_path)
    assert "checked: one process's first step" in text


def test_dropout_of_a_compiled_model_is_named(pool: Pool, tmp_path: Path) -> None:
    text = said(pool, Images(dropout=0.3), "replicate=2,compile", tmp_path)
    found = r"its first step is not one process's: .*dropout or noise that is not that of one process, since .* compile"
    assert re.search(found, text)


def test_the_plan_that_is_advised_is_one_process_s(pool: Pool, tmp_path: Path) -> None:
    for number, task in enumerate((Centring(), Padded(batch_size=6))):
        text = said(pool, task, "domain=3,cut=batch", tmp_path / str(number))
        assert "checked: one process's first step" in text


class SetByLoss(Images):
    """Sets the learning rate by the loss of the samples at hand, or by a count of the steps."""

    counted: bool = False

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        return {}

    def optimizer(self, named_parameters):
        self.kept["optimizer"] = made = super().optimizer(named_parameters)
        return made

    def loss(self, output, target):
        each = super().loss(output, target)
        self.kept["losses"] = self.kept.get("losses", 0) + 1
        for group in self.kept["optimizer"].param_groups if each.requires_grad else ():
            group["lr"] = 0.1 / self.kept["losses"] if self.counted else 0.1 * float(each.detach().mean())
        return each


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "microbatches=3", "engine=horovod,replicate=2"])
def test_a_rate_that_a_part_of_the_batch_sets_is_said_once(pool: Pool, plan: str, tmp_path: Path) -> None:
    text = said(pool, SetByLoss(), plan, tmp_path, steps=4)
    pattern = r"forward\(\) or loss\(\) sets the optimizer's lr of group 0 by .* part of the batch \(0\."
    assert len(re.findall(pattern, text)) == 1


def test_a_rate_that_steps_set_is_one_process_s(pool: Pool, tmp_path: Path) -> None:
    assert "checked: one process's first step" in said(pool, SetByLoss(counted=True), "replicate=2", tmp_path)
