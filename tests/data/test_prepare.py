"""A task's prepare(): once a node before data(), one process after the other, an error on all of them."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grappe import Task
from grappe.data.arrays import Arrays
from grappe.data.datasets import dataset_of, prepare
from grappe.errors import TaskError
from grappe.launch.rank import ProcessRank
from grappe.launch.world import join
from grappe.plan import Plan
from tests.processes import Pool


class Prepared(Task):
    """Writes down who prepares."""

    fails: bool = False

    def prepare(self, folder: Path) -> None:
        if self.fails:
            raise RuntimeError("no network")
        with (folder / "log").open("a") as log:
            log.write("began ")
            log.write("ended ")


def of_node(process: ProcessRank, rendezvous_folder: Path, folder: Path, fails: bool, nodes: int) -> Any:
    """A process of one node, or of one of several, that prepares."""
    import dataclasses

    world = join(Plan.parse(f"replicate={process.size},threads=1"), process, rendezvous_folder)
    each = process.size // nodes
    world = dataclasses.replace(
        world, process=dataclasses.replace(process, local_rank=process.rank % each, local_size=each)
    )
    try:
        prepare(Prepared(fails=fails), folder, world)
        return (folder / "log").read_text()
    except TaskError as error:
        return str(error)
    finally:
        world.leave()


@pytest.mark.parametrize("nodes", [1, 2])
def test_one_process_of_each_node_prepares(pool: Pool, tmp_path: Path, nodes: int) -> None:
    found = pool.run("tests.data.test_prepare:of_node", 2, tmp_path / "new", False, nodes)
    assert found == ["began ended " * nodes] * 2


def test_its_error_is_every_processs(pool: Pool, tmp_path: Path) -> None:
    found = pool.run("tests.data.test_prepare:of_node", 2, tmp_path, True, 1)
    assert len(set(found)) == 1
    assert found[0].startswith("Prepared.prepare() failed: RuntimeError: no network (")


def test_a_folder_that_cannot_be_written_needs_no_lock(tmp_path: Path) -> None:
    asked = []

    class Looks(Task):
        def prepare(self, folder: Path) -> None:
            asked.append(folder)

    (tmp_path / "file").touch()
    prepare(Looks(), tmp_path / "file" / "data")
    assert asked == [tmp_path / "file" / "data"]
    prepare(Task(), tmp_path / "none")
    assert not (tmp_path / "none").exists()


class Drawing(Task):
    """Draws its samples from generators that nobody has seeded."""

    def data(self, split: str, folder: Path) -> Arrays:
        return Arrays(torch.randn(3) + random.random() + np.random.rand(), torch.zeros(3))


def test_a_data_that_draws_makes_the_same_samples_again(tmp_path: Path) -> None:
    first = dataset_of(Drawing(), "train", tmp_path).inputs
    before = torch.default_generator.get_state()
    assert torch.equal(first, dataset_of(Drawing(), "train", tmp_path).inputs)
    assert torch.equal(before, torch.default_generator.get_state())
    assert not torch.equal(first, dataset_of(Drawing(), "validation", tmp_path).inputs)
