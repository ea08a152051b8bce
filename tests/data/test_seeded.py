"""SeededDataset datasets: a sample's own draws follow it to whatever process and worker loads it."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

from grappe.data.arrays import RepeatedDataset, one_by_one
from grappe.data.sampling import SampleOrder, cut
from grappe.data.seeded import SeededDataset
from grappe.errors import TaskError

# a busy machine is no reason to fail
untimed = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

LENGTH = 23


class Drawing(Dataset[torch.Tensor]):
    """Draws from the three global generators, an odd number of Gaussians each, since those come in pairs."""

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        own = [float(index), random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn()]
        return torch.cat([torch.tensor(own, dtype=torch.float64), torch.rand(1).double(), torch.randn(1).double()])


class Batching(Drawing):
    """A dataset with a batch path of its own, inside which no sample can be seeded."""

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        raise AssertionError("asked for a batch")


class OwnGenerators(Dataset[torch.Tensor]):
    """Draws from generators of its own, one of which a transform holds."""

    def __init__(self) -> None:
        self.of_torch, self.of_python = torch.Generator().manual_seed(1), random.Random(2)
        self.others = {"new": [np.random.default_rng(3), np.random.Generator(np.random.Philox(4))]}
        self.transform = Batching()
        self.transform.state = np.random.RandomState(5)
        self.shared = torch.default_generator, np.random.mtrand._rand, self.others

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> torch.Tensor:
        drawn = [self.of_python.random(), self.transform.state.rand(), *(each.random() for each in self.others["new"])]
        of_torch = [torch.rand(1, generator=self.of_torch).item(), torch.rand(1).item()]
        return torch.tensor([float(index), *drawn, *of_torch], dtype=torch.float64)


class Failing(Drawing):
    """Draws, and then cannot be read."""

    def __getitem__(self, index: int) -> torch.Tensor:
        super().__getitem__(index)
        raise OSError("a damaged file")


def draw_from_all() -> list[float]:
    return [random.random(), random.gauss(0, 1), np.random.rand(), np.random.randn(), *torch.randn(3).tolist()]


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    # leaves the second Gaussian of a pair waiting in Python's and NumPy's, which must be kept as well
    random.gauss(0, 1)
    np.random.randn()


@pytest.fixture(scope="module")
def alone() -> list[torch.Tensor]:
    """Each sample of epoch 1, asked for by itself."""
    seeded = SeededDataset(Drawing(), seed=5)
    return [seeded[1, index] for index in range(LENGTH)]


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("parts", [1, 3])
def test_neither_processes_nor_workers_change_a_sample(alone: list[torch.Tensor], parts: int, workers: int) -> None:
    order = SampleOrder(seed=5, length=LENGTH, batch_size=8)
    loaded = []
    for part in range(parts):
        requests = []
        for step in range(order.steps_per_epoch):
            ids = order.ids(1, step)
            requests.append([(1, int(index)) for index in ids[slice(*cut(len(ids), parts, part))]])
        batches = DataLoader(SeededDataset(Drawing(), seed=5), batch_sampler=requests, num_workers=workers)
        loaded += [sample for batch in batches for sample in batch]
    assert sorted(int(sample[0]) for sample in loaded) == list(range(LENGTH))
    assert all(torch.equal(sample, alone[int(sample[0])]) for sample in loaded)


@pytest.mark.parametrize("workers", [0, 2])
def test_generators_of_a_datasets_own_are_seeded_too(workers: int) -> None:
    requests = [(epoch, index) for epoch in (0, 1) for index in range(LENGTH)]
    whole = SeededDataset(OwnGenerators(), seed=7).__getitems__(requests)
    again = SeededDataset(OwnGenerators(), seed=7)
    again.__getitems__([(5, 3)])
    parts = [requests[::-1][first : first + 4] for first in range(0, len(requests), 4)]
    loader = DataLoader(again, batch_sampler=parts, collate_fn=list, num_workers=workers)
    assert torch.equal(torch.stack(whole), torch.stack([row for batch in loader for row in batch][::-1]))
    numbers = torch.stack(whole)[:, 1:].flatten().tolist()
    assert len(set(numbers)) == len(numbers), "two draws are the same"
    plain = SeededDataset(Drawing(), seed=7)[0, 4]
    assert torch.equal(plain, SeededDataset(Drawing(), seed=7)[0, 4])


def test_every_generator_is_seeded_by_seed_epoch_and_id() -> None:
    requests = [(seed, epoch, index) for seed in (5, 6) for epoch in (0, 1) for index in (0, 1)]
    draws = torch.stack([SeededDataset(Drawing(), seed=seed)[epoch, index][1:] for seed, epoch, index in requests])
    for column in draws.T:
        assert len(column.unique()) == len(requests)


def test_numpy_and_torch_do_not_draw_the_same() -> None:
    class Bits(Drawing):
        def __getitem__(self, index: int) -> Any:
            # torch makes a float32 of the low 24 bits of one output of the same Mersenne Twister
            outputs = np.random.randint(0, 2**32, size=4, dtype=np.uint32) & 0xFFFFFF
            return outputs.tolist(), (torch.rand(4) * 2**24).long().tolist()

    seeded = SeededDataset(Bits(), seed=5)
    for index in range(5):
        of_numpy, of_torch = seeded[0, index]
        assert of_numpy != of_torch


@pytest.mark.parametrize("dataset", [Drawing(), Failing()])
def test_the_generators_are_left_as_they_were(dataset: Drawing) -> None:
    seed_all(11)
    expected = draw_from_all()
    seed_all(11)
    try:
        SeededDataset(dataset, seed=5).__getitems__([(0, 1), (0, 2)])
    except OSError:
        assert isinstance(dataset, Failing)
    assert draw_from_all() == expected


def test_a_batch_path_of_the_dataset_is_passed_by(alone: list[torch.Tensor]) -> None:
    samples = SeededDataset(Batching(), seed=5).__getitems__([(1, 3), (1, 0)])
    assert torch.equal(torch.stack(samples), torch.stack([alone[3], alone[0]]))


class DrawingList(list[int]):
    """A list whose samples are drawn."""

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index), random.random()


ROWS = torch.arange(6).view(3, 2)
LISTS = [[5, 6, 7], (5, 6, 7), Subset([0, 5, 6, 7], [1, 2, 3]), RepeatedDataset([5, 6, 7])]


@pytest.mark.parametrize("dataset", [*LISTS, TensorDataset(ROWS), one_by_one(TensorDataset(ROWS, ROWS))])
def test_what_cannot_draw_is_not_seeded(monkeypatch: pytest.MonkeyPatch, dataset: Any) -> None:
    def refuse(key: int) -> None:
        raise AssertionError("seeded")

    monkeypatch.setattr("grappe.data.seeded.seed_generators", refuse)
    samples = SeededDataset(dataset, seed=5).__getitems__([(1, 2), (0, 0)])
    assert str(samples) == str([dataset[2], dataset[0]])


@pytest.mark.parametrize("dataset", [DrawingList([5, 6, 7]), Subset(DrawingList([5, 6, 7]), [0, 1, 2])])
def test_a_list_of_ones_own_kind_is_seeded(dataset: Any) -> None:
    seeded = SeededDataset(dataset, seed=5)
    assert seeded[1, 2] == seeded[1, 2] != seeded[0, 2]


def test_a_sample_of_a_list_that_is_missing_is_named() -> None:
    with pytest.raises(TaskError, match="sample 1 of data"):
        SeededDataset([5, None], seed=5).__getitems__([(0, 0), (0, 1)])


def test_ids_may_come_from_numpy(alone: list[torch.Tensor]) -> None:
    class Asked(Drawing):
        def __getitem__(self, index: int) -> Any:
            return type(index), super().__getitem__(index)

    kind, sample = SeededDataset(Asked(), seed=5)[1, np.int64(7)]
    assert kind is int  # what a file name or a JSON key is made from
    assert torch.equal(sample, alone[7])


class Curriculum(Dataset[int]):
    """Shows other samples in later epochs."""

    def __init__(self) -> None:
        self.epoch, self.calls = -1, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch, self.calls = epoch, self.calls + 1

    def __len__(self) -> int:
        return LENGTH

    def __getitem__(self, index: int) -> int:
        return 100 * self.epoch + index


def test_set_epoch_is_called_before_samples_of_another_epoch() -> None:
    dataset = Curriculum()
    train, validation = (SeededDataset(Subset(dataset, range(a, b)), seed=0) for a, b in ((0, 9), (9, 12)))
    assert train.__getitems__([(0, 1), (0, 2)]) == [1, 2]
    assert train.__getitems__([(2, 1), (3, 1)]) == [201, 301]
    assert validation.__getitems__([(0, 0)]) == [9]  # of the same dataset, which a training has set to epoch 3
    assert train.__getitems__([(3, 1), (3, 2)]) == [301, 302]
    assert dataset.calls == 5


@pytest.mark.parametrize("workers", [0, 2])
def test_workers_set_the_epoch_too(workers: int) -> None:
    seeded = SeededDataset(ConcatDataset([Curriculum(), TensorDataset(torch.arange(3))]), seed=0)
    loader = DataLoader(seeded, sampler=[(0, 1), (1, 1), (1, 2), (2, 0)], batch_size=2, num_workers=workers)
    assert [each.tolist() for each in loader] == [[1, 101], [102, 200]]
