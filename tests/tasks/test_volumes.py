"""The shipped 3D task: which voxels are a ball's, and that a newcomer sees the model find them."""

from pathlib import Path

import pytest

import grappe
from grappe.tasks.volumes import SPLITS, Balls, Volumes


def test_a_ball_is_brighter_and_drawn_from_its_number() -> None:
    volume, inside = Balls("train", 4, 16)[2]
    assert volume.shape == (1, 16, 16, 16) and inside.shape == (16, 16, 16)
    assert volume[0][inside == 1].mean() - volume[0][inside == 0].mean() == pytest.approx(2, abs=0.3)
    assert volume.equal(Balls("train", 4, 16)[2][0])
    assert not any(volume.equal(Balls(split, 4, 16)[2][0]) for split in SPLITS if split != "train")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 3])
def test_balls_are_found_within_the_epochs_of_the_task(tmp_path: Path, seed: int) -> None:
    """Balls are 2 % of all voxels: a model that names no voxel a ball's has an overlap of 0.49."""
    task = Volumes(size=16, seed=seed)
    scores = grappe.evaluate(grappe.train(task, "threads=1", tmp_path / "run"), task=task)
    assert scores.metrics["overlap"] > 0.75
