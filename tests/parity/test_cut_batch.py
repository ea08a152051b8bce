"""domain=N,cut=batch against one process: models that compute over the samples of a batch, and keep what they saw."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import grappe
from grappe import Arrays, Task
from tests.parity.cell import difference
from tests.processes import Pool

STEPS = 5  # batches of 7, 7 and 3 samples: processes have uneven rows


class Samples(Task):
    """A classifier of 17 vectors of 6 numbers."""

    epochs: int = 2
    batch_size: int = 7
    clip: float | None = 1.0

    def model(self) -> nn.Module:
        return MODELS[type(self).__name__]()

    def data(self, split: str, folder: Path) -> Any:
        generator = torch.Generator().manual_seed(5)
        return Arrays(torch.randn(17, 6, generator=generator), torch.arange(17) % 3)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1, momentum=0.9)


class Statistics(Samples):
    """Hand-written normalisation, with a moving centre in a buffer that forward replaces, and noise of both kinds."""


class Hidden(Samples):
    """The centre is an attribute."""


class Experts(Samples):
    """A mixture of experts with a balancing loss, whose experts take rows by index."""

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return super().loss(output[0], target) + 0.1 * output[1]

    def scored(self, output: Any) -> Any:
        return output[0]


class Queue(Samples):
    """A queue of the last samples' features and its place."""


class Texts(Samples):
    """Words padded to each batch's longest text, with dropout."""

    def data(self, split: str, folder: Path) -> Any:
        generator = torch.Generator().manual_seed(5)
        return [(torch.randint(1, 9, (3 + number % 7,), generator=generator), number % 3) for number in range(17)]

    def collate(self, samples: Sequence[Any]) -> Any:
        words = nn.utils.rnn.pad_sequence([text for text, _ in samples], batch_first=True)
        drawn = torch.rand(words.shape) < 0.1  # masked at random, here
        return words.masked_fill(drawn, 0), torch.tensor([target for _, target in samples])


class Compared(Samples):
    """A loss that compares all samples, as a mean."""

    whole_batch_loss = True

    def loss(self, output: Any, target: Tensor) -> Tensor:
        features = F.normalize(output, dim=1)
        return F.cross_entropy(features @ features.T / 0.2, torch.arange(len(target)))


class Counted(Samples):
    """Two losses, one of which counts some samples."""

    def counts(self, target: Tensor) -> Any:
        return {"all": torch.ones(len(target)), "some": (target > 0).float()}

    def loss(self, output: Any, target: Tensor) -> Any:
        return {"all": super().loss(output, target), "some": output.square().sum(1)}


class Centred(nn.Module):
    def __init__(self, hidden: bool = False) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        if hidden:
            self.centre = torch.zeros(8, dtype=torch.float64)
        else:
            self.register_buffer("centre", torch.zeros(8))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs + 0.1 * torch.randn_like(inputs) + 0.1 * grappe.randn_like(inputs))
        if self.training:
            self.centre = 0.9 * self.centre + 0.1 * features.detach().mean(0)
        features = (features - features.mean(0)) / (features.std(0) + 0.1)
        return self.last(F.relu(features) - self.centre)


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.last = nn.Linear(6, 3), nn.Linear(8, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 8) for _ in range(3))

    def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        shares = self.gate(inputs).softmax(1)
        chosen = shares.argmax(1)
        features = inputs.new_zeros(len(inputs), 8)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(1)
            features = features.index_add(0, rows, expert(inputs[rows]) * shares[rows, number, None])
        balance = (F.one_hot(chosen, 3).to(shares.dtype).mean(0) * shares.mean(0)).sum()
        return self.last(F.relu(features)), balance.expand(len(inputs))


class Queued(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 3)
        self.register_buffer("queue", torch.ones(10, 4))
        self.register_buffer("place", torch.zeros((), dtype=torch.int64))

    def forward(self, inputs: Tensor) -> Tensor:
        features = self.first(inputs)
        nearest = (features @ self.queue.clone().T).softmax(1) @ self.queue.clone()
        if self.training:
            self.queue[(self.place + torch.arange(len(inputs))) % 10] = features.detach()
            self.place.add_(len(inputs)).remainder_(10)
        return self.last(features + nearest)


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(9, 8), nn.Linear(8, 3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        features = self.layer(self.embedding(words), src_key_padding_mask=words == 0)
        return self.last(features[:, 0])


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))


MODELS = {
    "Statistics": Centred, "Hidden": lambda: Centred(hidden=True), "Experts": Gated, "Queue": Queued, "Texts": Words,
    "Compared": plain, "Counted": plain,
}  # fmt: skip


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize(
    "task",
    [Statistics(), Hidden(), Experts(), Queue(), Texts(), Compared(), Counted()],
    ids=lambda task: type(task).__name__,
)
def test_each_function_gets_the_whole_batch(pool: Pool, task: Task, processes: int) -> None:
    [alone] = pool.run("tests.parity.cell:train", 1, task, "precision=fp64", STEPS)
    plan = f"domain={processes},cut=batch,precision=fp64"
    spread = pool.run("tests.parity.cell:train", processes, task, plan, STEPS)
    for losses in (each["losses"] for each in spread):
        assert losses == pytest.approx(alone["losses"], rel=1e-9)
    assert spread[0]["scores"].loss == pytest.approx(alone["scores"].loss, rel=1e-9)
    gap, name = difference(alone["weights"], spread[0]["weights"])
    assert gap < 1e-9, name


def test_what_is_gathered_is_said_with_its_line(pool: Pool) -> None:
    [first, _] = pool.run("tests.parity.cell:train", 2, Experts(), "domain=2,cut=batch", STEPS)
    [said] = [remark for remark in first["remarks"] if "operators without a rule" in remark]
    assert "test_cut_batch.py:" in said
    assert "nonzero" in said
