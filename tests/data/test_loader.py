"""The processes' batches together are exactly the one-process batches: contracts 3 and 4."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from grappe import Arrays, Task, draw, mixup_pairs
from grappe.data.arrays import normalise
from grappe.data.batch import Batch
from grappe.data.datasets import check
from grappe.data.loader import BatchLoader, evaluation_loader, training_loader
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import World
from grappe.plan import Plan

untimed = settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.too_slow])


class Plain(Task):
    """Samples that are their own ids."""

    batch_size: int = 8

    def data(self, split: str, folder: Path) -> Dataset:
        return Arrays(torch.arange(20), torch.arange(20))


class Augmented(Task):
    """Random crops, flips and mixup on whole batches."""

    batch_size: int = 10

    def augment(self, inputs, targets, keys):
        chances = draw(keys, 3)
        flipped = torch.where(chances[:, 0, None, None, None] < 0.5, inputs.flip(-1), inputs)
        shift = (chances[:, 1] * 3).long()
        padded = torch.nn.functional.pad(flipped, (0, 2))
        columns = (shift[:, None] + torch.arange(4))[:, None, None, :].expand(-1, 1, 4, -1)
        cropped = padded.gather(3, columns)
        partner = mixup_pairs(len(keys), keys.device)
        first = torch.minimum(torch.arange(len(keys)), partner)
        share = chances[first, 2, None, None, None]
        return cropped * share + cropped[partner] * (1 - share), targets


class Drawing(Dataset):
    """Draws from the three global generators, as many users' datasets do."""

    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        numbers = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return torch.tensor([index, *numbers], dtype=torch.float64), index


def world(rank: int, size: int) -> World:
    return World(
        process=ProcessRank(rank=rank, size=size, local_rank=rank, local_size=size),
        device=torch.device("cpu"),
        data_rank=rank,
        data_size=size,
    )


def loaders(task: Task, data: Dataset, processes: int, plan: Plan, make=training_loader) -> list[BatchLoader]:
    return [make(task, data, plan, world(rank, processes)) for rank in range(processes)]


def rows(loader: BatchLoader, start: int, stop: int) -> list[list[torch.Tensor]]:
    """Each step's real input rows of one process, in order."""
    return [
        [row for micro in batch.microbatches for row in micro.inputs[: micro.rows]]
        for batch in loader.batches(start, stop)
    ]


def everyone(task: Task, data: Dataset, processes: int, stop: int, text: str = "", make=training_loader) -> list:
    """Each step's rows over all processes, in the order of their slices."""
    plan = Plan.parse(",".join(filter(None, [f"replicate={processes}", text])))
    each = [rows(loader, 0, stop) for loader in loaders(task, data, processes, plan, make)]
    return [[row for process in step for row in process] for step in zip(*each, strict=True)]


def same(a: list, b: list) -> bool:
    return len(a) == len(b) and all(
        len(x) == len(y) and all(torch.equal(p, q) for p, q in zip(x, y, strict=True))
        for x, y in zip(a, b, strict=True)
    )


@untimed
@given(
    length=st.integers(1, 60),
    batch=st.integers(1, 20),
    processes=st.integers(1, 6),
    micro=st.integers(1, 4),
    seed=st.integers(0, 5),
)
def test_slices_together_are_the_one_process_step(length, batch, processes, micro, seed) -> None:
    task = Plain(batch_size=batch, seed=seed)
    data = Arrays(torch.arange(length), torch.arange(length))
    steps = 2 * -(-length // batch)
    one = everyone(task, data, 1, steps)
    assert same(one, everyone(task, data, processes, steps, f"microbatches={micro}"))
    for epoch in (one[: steps // 2], one[steps // 2 :]):
        assert sorted(int(row) for step in epoch for row in step) == list(range(length))


@untimed
@given(length=st.integers(1, 60), batch=st.integers(1, 20), processes=st.integers(1, 6))
def test_evaluation_sees_each_sample_once(length, batch, processes) -> None:
    data = Arrays(torch.arange(length), torch.arange(length))
    task = Plain(batch_size=batch)
    made = loaders(task, data, processes, Plan(replicate=processes), evaluation_loader)
    steps = made[0].order.steps_per_epoch
    seen = [int(row) for loader in made for step in rows(loader, 0, steps) for row in step]
    assert sorted(seen) == list(range(length))
    calls = {len(list(loader.batches(0, steps))) for loader in made}
    assert calls == {steps}, "processes must go through the model equally often"


@pytest.mark.parametrize("processes", [2, 3, 4])
@pytest.mark.parametrize("text", ["", "microbatches=2", "microbatches=3"])
def test_augmentation_belongs_to_the_sample(processes: int, text: str) -> None:
    data = Arrays(torch.randn(33, 1, 4, 4), torch.arange(33))
    one = everyone(Augmented(), data, 1, 8)
    assert same(one, everyone(Augmented(), data, processes, 8, text))
    plain = [data.inputs[i] for i in training_loader(Augmented(), data, Plan(), world(0, 1)).order.ids(0, 0)]
    assert not any(torch.equal(a, b) for a, b in zip(one[0], plain, strict=True)), "it did not augment"


@pytest.mark.parametrize(("processes", "workers"), [(1, 1), (1, 2), (2, 0), (3, 0), (2, 2)])
def test_a_dataset_that_draws_draws_for_the_sample(processes: int, workers: int) -> None:
    task = Plain(batch_size=6)
    one = everyone(task, Drawing(), 1, 8, "workers=0")
    assert same(one, everyone(task, Drawing(), processes, 8, f"workers={workers}"))
    draws = {tuple(row[1:].tolist()) for step in one for row in step}
    assert len(draws) == sum(len(step) for step in one), "two samples, or two epochs, drew the same"


def test_draws_are_the_same_in_each_evaluation_and_from_any_step_on() -> None:
    loader = evaluation_loader(Plain(), Drawing(), Plan(), world(0, 1))
    steps = loader.order.steps_per_epoch
    assert same(rows(loader, 0, steps), rows(loader, 0, steps))
    torch.manual_seed(3)
    before = torch.get_rng_state()
    list(training_loader(Plain(), Drawing(), Plan(), world(0, 1)).batches(0, 3))
    assert torch.equal(before, torch.get_rng_state())
    loader = training_loader(Plain(), Drawing(), Plan(workers=0), world(0, 1))
    assert same(rows(loader, 0, 9)[5:], rows(loader, 5, 9))


def test_an_empty_slice_still_goes_through_the_model() -> None:
    task = Plain(batch_size=2)
    data = Arrays(torch.arange(6), torch.arange(6))
    first = loaders(task, data, 3, Plan(replicate=3))
    batches = [next(iter(loader.batches(0, 1))) for loader in first]
    assert sorted(batch.microbatches[0].rows for batch in batches) == [0, 0, 2]
    assert all(len(batch.microbatches[0].inputs) >= 1 for batch in batches)
    assert all(batch.samples == 2 and batch.count == 2.0 for batch in batches)


class Counted(Plain):
    """Each sample has as many values of the loss as its id, less one; the rest count nothing."""

    def counts(self, target: torch.Tensor) -> torch.Tensor:
        return torch.arange(20) < target[:, None]


def test_a_row_of_padding_counts_nothing() -> None:
    """Sample 0, which is the padding, has counts here."""
    data = Arrays(torch.arange(1, 7), torch.arange(1, 7))
    made = loaders(Counted(batch_size=2), data, 3, Plan(replicate=3))
    for step in zip(*(loader.batches(0, 3) for loader in made), strict=True):
        [filled] = [batch.microbatches[0] for batch in step if batch.microbatches[0].rows]
        counts = [float(batch.microbatches[0].weights.sum()) for batch in step]
        assert sorted(counts) == [0.0, 0.0, float(filled.targets.sum())]


@pytest.mark.parametrize("microbatches", [2, 3, 5])
def test_microbatches_of_a_pipeline_are_the_batch_in_order(microbatches: int) -> None:
    data = [(torch.tensor([number]), number) for number in range(20)]
    plan = Plan(pipeline=2, microbatches=microbatches)
    [cut] = loaders(Plain(), data, 1, plan)  # which loads each batch at once
    assert same(rows(cut, 0, 6), everyone(Plain(), data, 1, 6))


def test_arrays_transform_and_nest() -> None:
    images = np.arange(24, dtype=np.uint8).reshape(2, 3, 2, 2)
    data = Arrays({"image": images, "size": np.array([1, 2])}, np.array([0, 1]))
    inputs, targets = data.gather(np.array([1]))
    assert inputs["image"].shape == (1, 3, 2, 2)
    assert inputs["size"].tolist() == [2]
    assert targets.tolist() == [1]
    assert data[0][0]["size"].item() == 1
    with pytest.raises(TaskError, match="different lengths"):
        Arrays(images, np.array([0, 1, 2]))


def test_normalise_is_the_users_formula() -> None:
    images = torch.randint(0, 256, (4, 3, 5, 5), dtype=torch.uint8)
    mean, std = torch.tensor([0.5, 0.4, 0.3]), torch.tensor([0.5, 0.25, 0.2])
    wanted = (images.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1)
    found = normalise((0.5, 0.4, 0.3), (0.5, 0.25, 0.2))(images)
    assert torch.allclose(found, wanted, atol=1e-5)


def test_tensor_datasets_take_the_fast_path() -> None:
    data = TensorDataset(torch.arange(9), torch.arange(9))
    loader = training_loader(Plain(batch_size=4), data, Plan(workers=5), world(0, 1))
    assert [len(step) for step in rows(loader, 0, 3)] == [4, 4, 1]


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


@pytest.mark.parametrize(
    ("dataset", "words"),
    [(Stream(), "IterableDataset"), (Arrays(torch.ones(0), torch.ones(0)), "empty"), (object(), "__len__")],
)
def test_datasets_that_cannot_be_used_are_refused(dataset: object, words: str) -> None:
    with pytest.raises(TaskError, match=words):
        check(dataset, "train", Plain())


def test_a_step_that_a_child_loads_leaves_dataset_and_files_as_they_were(tmp_path: Path) -> None:
    class Counting(Dataset):
        def __init__(self) -> None:
            (tmp_path / "rows").write_bytes(bytes(range(100)))
            self.read, self.file = 0, (tmp_path / "rows").open("rb", buffering=0)

        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            self.read += 1
            return torch.tensor([self.file.read(1)[0]]), index

    dataset = Counting()
    dataset.file.seek(5)
    loader = training_loader(Plain(batch_size=4), dataset, Plan(workers=0), world(0, 1))
    (micro,) = next(loader.rehearsed(1, apart=True)).microbatches
    assert micro.inputs.flatten().tolist() == [5, 6, 7, 8]
    assert (dataset.read, dataset.file.tell()) == (0, 5)
    (again,) = next(loader.rehearsed(1)).microbatches
    assert again.inputs.equal(micro.inputs) and dataset.read == 4


class Texts(Task):
    """Texts of 1 to 7 words, padded to the longest."""

    batch_size: int = 6
    form: str = "padded"

    def data(self, split: str, folder: Path) -> list[torch.Tensor]:
        return [torch.full((1 + number % 7,), 1 + number) for number in range(30)]

    def collate(self, samples: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        texts = torch.nn.utils.rnn.pad_sequence(samples, batch_first=self.form != "time first")
        lengths = torch.tensor([len(text) for text in samples])
        return (texts + texts[:1] if self.form == "mixed" else texts), lengths


@pytest.mark.parametrize("workers", [0, 1])
def test_parts_are_padded_to_the_longest_of_the_batch(workers: int) -> None:
    task = Texts()
    data = task.data("train", Path())
    loader = training_loader(task, data, Plan(microbatches=4, workers=workers), world(0, 1))
    (whole,) = zip(*(batch.microbatches for batch in one_by_one(task, data)), strict=True)
    for batch, expected in zip(loader.batches(0, 8), whole, strict=True):
        parts = batch.microbatches
        assert torch.equal(torch.cat([micro.inputs[: micro.rows] for micro in parts]), expected.inputs)
        assert torch.equal(torch.cat([micro.targets[: micro.rows] for micro in parts]), expected.targets)
    assert loader.collates_whole
    assert "each process loads whole batches" in loader.remarks()[0]


@pytest.mark.parametrize("form", ["time first", "mixed"])
def test_parts_that_do_not_only_lack_padding_stay_as_they_are(form: str) -> None:
    task = Texts(form=form)
    loader = training_loader(task, task.data("train", Path()), Plan(microbatches=2, workers=0), world(0, 1))
    batches = list(loader.batches(0, 3))
    longest = 1 if form == "mixed" else 0
    lengths = {micro.inputs.shape[longest] == int(micro.targets.max()) for b in batches for micro in b.microbatches}
    assert lengths == {True}
    assert not loader.collates_whole
    assert not loader.remarks()


def one_by_one(task: Task, data: list[torch.Tensor]) -> list[Batch]:
    return list(training_loader(task, data, Plan(workers=0), world(0, 1)).batches(0, 8))
