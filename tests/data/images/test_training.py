"""Images in trainings: the same crops on any number of processes and workers, exact resume, and one message a fault."""

from pathlib import Path

import pytest
import torch
from torch import nn

from grappe import Task
from grappe.data import CentreCrop, Images, Normalise, RandomResizedCrop
from grappe.data.images.decode import simplejpeg
from tests.data.images.pictures import CLASSES, archive, files, folder, shards
from tests.data.test_loader import everyone, same
from tests.faults.resume_cell import samples
from tests.faults.resuming import check_same_bits, run
from tests.processes import Pool

SIDE = 16


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


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2, 4])
def test_crops_do_not_depend_on_who_decodes(data_folder: Path, processes: int, workers: int, monkeypatch) -> None:
    def crops(source: str, processes: int, workers: int) -> list:
        data = Images(data_folder / source, RandomResizedCrop(size=SIDE))
        return everyone(Photos(), data, processes, 6, f"workers={workers}")

    expected = crops("train.tar", 1, 0)
    assert [len(step) for step in expected] == [10, 10, 4, 10, 10, 4]
    assert not same(expected[:3], expected[3:])  # another epoch has other crops
    for source in ("train.tar", "train", "shards"):
        assert same(crops(source, processes, workers), expected)
    monkeypatch.setattr("grappe.data.images.decode.simplejpeg", lambda: None)  # Pillow alone
    assert same(crops("train.tar", processes, workers), expected)
    assert simplejpeg() is not None


@pytest.mark.parametrize("plan", ["workers=2", "replicate=2,workers=0", "shard=2,workers=1"])
def test_a_killed_training_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, data_folder: Path, plan: str) -> None:
    (tmp_path / "train.tar").symlink_to(data_folder / "train.tar")
    check_same_bits(pool, Photos(), plan, tmp_path)


def test_another_source_and_world_go_on_with_the_same_samples(pool: Pool, tmp_path: Path, data_folder: Path) -> None:
    (tmp_path / "train.tar").symlink_to(data_folder / "train.tar")
    run(pool, Photos(), "", tmp_path / "whole")
    run(pool, Photos(), "replicate=2", tmp_path / "parts", dies_at=3, save_every=2)
    (tmp_path / "train.tar").unlink()
    (tmp_path / "train.tar").symlink_to(data_folder / "train")  # a folder, by the name that the task knows
    run(pool, Photos(), "replicate=4", tmp_path / "parts")
    assert samples(tmp_path / "parts") == samples(tmp_path / "whole")
