"""Corpora, mixtures, packed documents, streams: killed and resumed on other worlds, the ledger of tokens stays."""

import os
import random
from collections.abc import Iterator
from pathlib import Path

import datasets
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from grappe.data import Corpus, Packed, Stream, Windows, document_mask
from grappe.data.corpus import formats, mixture
from grappe.task import Task
from grappe.training.options import Options
from grappe.training.run import Run
from tests.data.corpus.shards import ENDINGS, corpus_folder, options
from tests.faults.resume_cell import samples
from tests.parity.cell import difference
from tests.processes import Pool

PART = "tests.faults.resume_cell:part"
ROWS, LONGEST = 47, 8
STREAMS = ("by skipping", "by its own state", "datasets", "unknown length")
FORMS = (*ENDINGS, "mixture", "windows", "packed", *STREAMS)
LIVES = [(("replicate=2", 3), ("", 8), ("replicate=3", None))]
"""Plans of the starts of a training, and the step behind which each is killed."""
if "GRAPPE_SOAK" in os.environ:
    LIVES += [
        (("", 1), ("shard=2", 5), ("replicate=2,workers=2", 9), ("", None)),
        (("replicate=3", 6), ("replicate=2", 7), ("replicate=4", 11), ("shard=3", None)),
    ]


def padded(tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    row = torch.tensor([*tokens, *[0] * LONGEST])[: LONGEST + 1]
    return row[:-1], row[1:]


class Rows:
    """Rows that are read in order, another way round in each epoch, and are spoilt by a random draw."""

    def __init__(self, corpus: Corpus) -> None:
        self.corpus, self.epoch, self.next = corpus, 0, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[dict]:
        first, self.next = self.next, 0
        for place in range(first, len(self.corpus)):
            self.next = place + 1
            row = self.corpus[place if self.epoch % 2 else len(self.corpus) - 1 - place]
            yield {"tokens": [random.randrange(1, 100), *row["tokens"]]}
        self.next = 0


class StatefulRows(Rows):
    """Rows whose place is kept."""

    def state_dict(self) -> dict:
        return {"next": self.next}

    def load_state_dict(self, state: dict) -> None:
        self.next = state["next"]


def stream_of(form: str, corpus: Corpus) -> Stream:
    if form == "datasets":
        shuffled = datasets.Dataset.from_list([corpus[place] for place in range(ROWS)]).to_iterable_dataset(3)
        return Stream(shuffled.shuffle(seed=5, buffer_size=9), of_row, samples=ROWS)
    source = StatefulRows(corpus) if form == "by its own state" else Rows(corpus)
    return Stream(source, of_row, samples=None if form == "unknown length" else ROWS)


def of_row(row: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Makes a sample of a row of any format."""
    if not isinstance(row, dict):
        return padded([int(token) for token in row])  # type: ignore[attr-defined]
    return padded([int(token) for token in row["tokens"]] if "tokens" in row else list(row["txt"][:LONGEST]))


class Reader(Task):
    """Predicts tokens of a corpus in one of the forms."""

    epochs: int = 2
    batch_size: int = 8
    form: str = ".jsonl"
    seed: int = 3

    def model(self) -> nn.Module:
        return Network()

    def data(self, split: str, folder: Path) -> object:
        form = self.form if split == "train" else ".jsonl"
        if form == "mixture":
            weights = ((".parquet", {0: 0.9, 9: 0.2}), (".jsonl.zst", 0.3), (".bin", {0: 0.0, 9: 0.7}))
            parts = {
                Corpus(folder / f"rows{ending}", of_row, window=2, **options(ending)): weight
                for ending, weight in weights
            }
            return Corpus.mix(parts, samples=ROWS)
        if form in STREAMS:
            return stream_of(form, Corpus(folder / "rows.jsonl"))
        if form in ("windows", "packed"):
            corpus = Corpus(folder / "rows.bin", dtype="uint16", end=0 if form == "packed" else None)
            return Packed(corpus, 2 * LONGEST) if form == "packed" else Windows(corpus, LONGEST)
        return Corpus(folder / f"rows{form}", of_row, window=2, **options(form))

    def loss(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none").view_as(target)

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        return target > 0

    def optimizer(self, named_parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(named_parameters, lr=0.5)  # type: ignore[arg-type]


class Network(nn.Module):
    """Attention over a document's tokens, all of which change its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.head = nn.Embedding(128, 16), nn.Linear(16, 16), nn.Linear(16, 128)

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor | None = None, documents: torch.Tensor | None = None
    ) -> torch.Tensor:
        tokens, groups = input_ids, torch.ones_like(input_ids) if documents is None else documents
        hidden = self.embed(tokens)
        mask = document_mask(groups)[:, 0]
        scores = (self.mix(hidden) @ hidden.transpose(1, 2)).masked_fill(~mask, -1e9)
        return self.head(scores.softmax(-1) @ hidden)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("corpora")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "BLOCK_BYTES", 500)
        patch.setattr(mixture, "_PERIOD", 20)
        patch.setattr(mixture, "_LEAST", 20)
        for ending in ENDINGS:
            corpus_folder(folder / f"rows{ending}", ending, ROWS)
            Corpus(folder / f"rows{ending}", **options(ending))  # indexed here, with small blocks
        yield folder


def run(pool: Pool, task: Task, plan: str, folder: Path, dies_at: int | None) -> str:
    processes = 1
    for part in filter(None, plan.split(",")):
        name, _, degree = part.partition("=")
        processes *= int(degree) if name in ("replicate", "shard") else 1
    plan = ",".join(filter(None, (plan, "precision=fp64")))  # in fp32 rounding alone makes 3e-5 of 12 steps
    steps = 12 if getattr(task, "form", "") == "unknown length" else None
    request = Options(log_samples=True, save_every=2, keep=100, steps=steps)
    return pool.run(PART, processes, task, plan, folder, request, dies_at)[0]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("life", LIVES, ids=lambda life: "-".join(str(plan or "one") for plan, _ in life))
def test_the_ledger_of_tokens_is_an_undisturbed_runs(pool: Pool, base: Path, form: str, life: tuple) -> None:
    task = Reader(form=form)
    whole, parts = base / f"whole{form}", base / f"parts{form}-{len(life[0][0])}{life[0][1]}"
    if not whole.exists():
        run(pool, task, "", whole, None)
    said = [run(pool, task, plan, parts, dies_at) for plan, dies_at in life]
    resumed = said[1 if life[0][1] > 1 else 2 :]  # the first checkpoint is that of step 2
    assert all("resuming from step" in each for each in resumed)
    assert samples(parts) == samples(whole)
    if form in STREAMS:  # a shuffle buffer of `datasets` is in no state
        how = form if form == "by its own state" else "by skipping"
        assert all(f"the stream is resumed {how}" in each for each in resumed)
    if form in ENDINGS:
        for epoch in range(2):
            seen = [number for step, ids in samples(whole).items() if (step - 1) // 6 == epoch for number in ids]
            assert sorted(seen) == list(range(ROWS))
    if form == "mixture":
        counts = [Run(folder).read_description()["drawn"] for folder in (whole, parts)]
        assert counts[0] == counts[1] and sum(counts[0].values()) == 2 * ROWS
    last = [Run(folder).latest() for folder in (whole, parts)]
    assert last[0] is not None and last[1] is not None and last[0].step == last[1].step
    weights = [{name: tensors.read(name) for name in tensors if "model" in name} for tensors in
               (each.read_tensors() for each in last)]  # fmt: skip
    gap, name = difference(*weights)
    assert gap <= 1e-11, f"{name} is {gap:.1e} away"
