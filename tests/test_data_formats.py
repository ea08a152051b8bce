"""The guide's classes for other formats: each gives every sample, once, to workers too, in one order."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from grappe import Task
from grappe.data.loader import training_loader
from grappe.plan import Plan
from tests.data.test_loader import world

PAGE = (Path(__file__).parent.parent / "docs" / "data-formats.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
INPUTS = np.arange(60, dtype=np.float32).reshape(20, 3)
TARGETS = np.arange(20)


class Ten(Task):
    """A batch size: nothing is trained."""

    batch_size: int = 8


def taken(name: str, *packages: str) -> dict[str, Any]:
    """Runs the guide's block that defines a class; skips where a package is missing."""
    for package in packages:
        pytest.importorskip(package)
    names: dict[str, Any] = {}
    exec(compile(next(one for one in CODE if f"class {name}(" in one), "data-formats.md", "exec"), names)
    return names


def mapped(folder: Path) -> Any:
    np.save(folder / "inputs.npy", INPUTS)
    np.save(folder / "targets.npy", TARGETS)
    return taken("Mapped")["Mapped"](folder)


def table(folder: Path) -> Any:
    names = taken("Table", "pyarrow")
    rows = names["pa"].table({"inputs": INPUTS.tolist(), "target": TARGETS})
    names["pq"].write_table(rows, folder / "rows.parquet", row_group_size=7)
    names["to_arrow"](folder / "rows.parquet", folder / "rows.arrow")
    return names["Table"](folder / "rows.arrow")


def hdf5(folder: Path) -> Any:
    names = taken("Hdf5", "h5py")
    with names["h5py"].File(folder / "rows.h5", "w") as content:
        content["inputs"], content["targets"] = INPUTS, TARGETS
    return names["Hdf5"](folder / "rows.h5")


def of_lmdb(folder: Path) -> Any:
    names = taken("Lmdb", "lmdb")
    with names["lmdb"].open(str(folder / "rows")) as environment, environment.begin(write=True) as transaction:
        for index, (row, target) in enumerate(zip(INPUTS, TARGETS, strict=True)):
            transaction.put(b"%08d" % index, row.tobytes() + np.int64(target).tobytes())
    return names["Lmdb"](folder / "rows")


def rows(folder: Path) -> Any:
    names = taken("Rows", "datasets")
    content = {"inputs": INPUTS.tolist(), "target": TARGETS.tolist()}
    names["datasets"].Dataset.from_dict(content).save_to_disk(str(folder / "rows"))
    return names["Rows"](folder / "rows")


@pytest.mark.parametrize("make", [mapped, table, hdf5, of_lmdb, rows])
def test_every_sample_comes_once_also_from_workers(make: Callable[[Path], Any], tmp_path: Path) -> None:
    data = make(tmp_path)
    found = []
    for plan in ("workers=0", "workers=2"):
        loader = training_loader(Ten(), data, Plan.parse(plan), world(0, 1))
        data[0]  # opened here, before workers are forked
        found.append([batch.microbatches[0] for batch in loader.batches(0, 3)])
        loader.sources.close()
    for one, other in zip(*found, strict=True):
        assert torch.equal(one.inputs, other.inputs)
        assert torch.equal(one.targets, other.targets)
    inputs, targets = (torch.cat([getattr(one, name) for one in found[0]]) for name in ("inputs", "targets"))
    assert sorted(targets.tolist()) == TARGETS.tolist()
    assert torch.equal(inputs, torch.from_numpy(INPUTS)[targets])


def test_tokens_are_windows_and_the_same_a_token_further(tmp_path: Path) -> None:
    np.save(tmp_path / "tokens.npy", np.arange(70_000 - 11, 70_000, dtype=np.uint32))
    data = taken("Tokens")["Tokens"](tmp_path / "tokens.npy", 5)
    assert len(data) == 2
    assert data[1][0].tolist() == [69_994, 69_995, 69_996, 69_997, 69_998]
    assert data[1][1].tolist() == [69_995, 69_996, 69_997, 69_998, 69_999]


def test_a_keyed_class_of_ones_own_is_loaded_alike_by_all() -> None:
    data = taken("Noisy")["Noisy"](torch.from_numpy(INPUTS), torch.from_numpy(TARGETS))
    found = []
    for plan in ("workers=0", "workers=2", "workers=2,loading=threads"):
        loader = training_loader(Ten(), data, Plan.parse(plan), world(0, 1))
        found.append(torch.cat([batch.microbatches[0].inputs for batch in loader.batches(0, 6)]))
        loader.sources.close()
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    assert len(found[0].unique()) == 2 * 60
