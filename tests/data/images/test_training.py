"""Images in trainings: the same crops on any number of processes and workers, exact resume, and one message a fault."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from grappe import Task
from grappe.data import CentreCrop, Images, Normalise, RandomResizedCrop
from grappe.data.images.decode import simplejpeg
from grappe.data.loader import BatchLoader, evaluation_loader, training_loader
from grappe.data.seeded import SeededDataset
from grappe.errors import DataError, GrappeError
from grappe.plan import Plan
from grappe.training.options import Options
from tests.data.images.pictures import CLASSES, archive, files, folder, shards
from tests.data.test_loader import world
from tests.faults.resume_cell import hashes, samples
from tests.processes import Pool

PART = "tests.faults.resume_cell:part"
SIDE = 16
COUNT = 24


class Photos(Task):
    """A small network on real photographs."""

    epochs: int = 2
    batch_size: int = 10
    source: str = "train.tar"

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Sequential(Normalise(), nn.Conv2d(3, 8, 3, stride=2), nn.ReLU()),
            nn.Sequential(nn.Conv2d(8, 8, 3, stride=2), nn.ReLU(), nn.Flatten()),
            nn.Linear(8 * 9, len(CLASSES)),
        )

    def data(self, split: str, folder: Path) -> Images:
        view = RandomResizedCrop(size=SIDE) if split == "train" else CentreCrop(size=SIDE)
        return Images(folder / self.source, view)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.1, momentum=0.9)


@pytest.fixture(scope="module")
def data_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("photos")
    archive(place / "train.tar", files())
    folder(place / "train", files())
    shards(place / "shards", dict(sorted(files().items())))
    return place


def crops(data: Images, processes: int, workers: int, make=training_loader) -> list[list[torch.Tensor]]:
    """The samples of each step over all processes, in the order of their slices, for two epochs."""
    plan = Plan.parse(f"replicate={processes},workers={workers}")
    loaders: list[BatchLoader] = [make(Photos(), data, plan, world(rank, processes)) for rank in range(processes)]
    each = [
        [[row for micro in batch.microbatches for row in micro.inputs[: micro.rows]] for batch in one.batches(0, 6)]
        for one in loaders
    ]
    return [list(itertools.chain.from_iterable(step)) for step in zip(*each, strict=True)]


def same(one: list[list[torch.Tensor]], other: list[list[torch.Tensor]]) -> bool:
    return all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_crops_do_not_depend_on_who_decodes(data_folder: Path, processes: int, workers: int, monkeypatch) -> None:
    view = RandomResizedCrop(size=SIDE)
    expected = crops(Images(data_folder / "train.tar", view), 1, 0)
    assert [len(step) for step in expected] == [10, 10, 4, 10, 10, 4]
    assert not same(expected[:3], expected[3:])  # another epoch has other crops
    for source in ("train.tar", "train", "shards"):
        assert same(crops(Images(data_folder / source, view), processes, workers), expected)
    monkeypatch.setattr("grappe.data.images.decode.simplejpeg", lambda: None)  # Pillow alone
    assert same(crops(Images(data_folder / "train.tar", view), processes, workers), expected)
    assert simplejpeg() is not None


def test_evaluation_sees_each_picture_once(data_folder: Path) -> None:
    data = Images(data_folder / "train.tar", CentreCrop(size=SIDE))
    loader = evaluation_loader(Photos(), data, Plan.parse("replicate=2"), world(1, 2))
    ids = [index for part in loader.slices(0, loader.order.steps_per_epoch) for index in part.ids.tolist()]
    assert len(ids) == 12


def test_samples_are_those_of_their_keys(data_folder: Path) -> None:
    """Wherever a dataset is asked for samples in a training, torch's generator has the sample's key."""
    data = Images(data_folder / "train.tar", RandomResizedCrop(size=SIDE))
    seeded = SeededDataset(data, seed=3)
    one, other = seeded[0, 5], seeded[1, 5]
    assert torch.equal(seeded[0, 5][0], one[0])
    assert not torch.equal(one[0], other[0])


def trained(pool: Pool, plan: str, run: Path, data: Path, task: Task, dies_at: int | None = None) -> str:
    run.parent.mkdir(exist_ok=True)
    if not (run.parent / task.source).exists():
        (run.parent / task.source).symlink_to(data / task.source)
    options = Options(log_samples=True, keep=100, save_every=2)
    return pool.run(PART, Plan.parse(plan).processes, task, plan, run, options, dies_at)[0]


@pytest.mark.parametrize("plan", ["workers=2", "replicate=2,workers=0", "shard=2,workers=1"])
def test_a_killed_training_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, data_folder: Path, plan: str) -> None:
    task = Photos()
    trained(pool, plan, tmp_path / "whole", data_folder, task)
    trained(pool, plan, tmp_path / "parts", data_folder, task, dies_at=3)
    assert "resuming from step 2" in trained(pool, plan, tmp_path / "parts", data_folder, task)
    assert hashes(tmp_path / "parts", 6) == hashes(tmp_path / "whole", 6)
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")


def test_another_source_and_world_go_on_with_the_same_samples(pool: Pool, tmp_path: Path, data_folder: Path) -> None:
    trained(pool, "", tmp_path / "whole", data_folder, Photos())
    trained(pool, "replicate=2", tmp_path / "parts", data_folder, Photos(), dies_at=3)
    (tmp_path / "train.tar").unlink()
    (tmp_path / "train.tar").symlink_to(data_folder / "train")  # a folder, by the name that the task knows
    trained(pool, "replicate=4", tmp_path / "parts", data_folder, Photos())
    seen = samples(tmp_path / "parts")
    assert seen == samples(tmp_path / "whole")


@pytest.mark.parametrize("plan", ["workers=0", "workers=2"])
def test_a_bad_file_ends_the_training_with_one_message(pool: Pool, tmp_path: Path, plan: str) -> None:
    found = dict(files())
    found[sorted(found)[7]] = b""
    archive(tmp_path / "train.tar", found)
    data = Images(tmp_path / "train.tar", RandomResizedCrop(size=SIDE))
    loader = training_loader(Photos(), data, Plan.parse(plan), world(0, 1))
    with pytest.raises(DataError) as caught:
        list(loader.batches(0, 3))
    assert str(caught.value).endswith(
        f"n01440764_7.JPEG: the file is empty. Find all such files, and leave them out: grappe data check {data.source}"
    )
    assert isinstance(caught.value, GrappeError)
