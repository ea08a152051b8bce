"""Killed and resumed: the same bits under the same plan, the same samples and weights under another."""

import itertools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import torch

from grappe.checkpoint.weights import LOCAL, MODEL, OPTIMIZER
from grappe.training.run import Run
from tests.faults.resume_cell import Loaded, hashes, samples
from tests.faults.resuming import SOAK, check_another_plan, check_same_bits, run
from tests.parity.tasks import Images
from tests.processes import Pool

Cell = dict[str, str]
Pair = frozenset[tuple[str, str]]


def grid(axes: Mapping[str, Sequence[str]], allowed: Callable[[Cell], bool]) -> list[Cell]:
    """Every cell that makes sense."""
    cells = (dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values()))
    return [cell for cell in cells if allowed(cell)]


def pairs(cell: Cell) -> set[Pair]:
    """Returns the pairs of values in a cell."""
    return {frozenset(two) for two in itertools.combinations(cell.items(), 2)}


def pairwise(cells: list[Cell]) -> list[Cell]:
    """Few of `cells` in which all the pairs occur that occur in any: greedily, the richest next."""
    each = [(cell, pairs(cell)) for cell in cells]
    missing = set().union(*(found for _, found in each))
    # A pair that few cells have must be met first: its cell is then free to bring others along.
    seldom = Counter(pair for _, found in each for pair in found)
    chosen = []
    while missing:
        # fsum: the same for every order of a set, so that all test processes choose the same cells.
        worth = lambda one: math.fsum(1 / seldom[pair] for pair in one[1] & missing)  # noqa: E731
        cell, found = max(each, key=worth)
        chosen.append(cell)
        missing -= found
    return chosen


AXES = {
    "layout": [
        "", "replicate=2", "replicate=3", "replicate=4", "shard=2", "shard=3", "replicate=2,shard=2",
        "engine=textbook,replicate=2", "engine=textbook,replicate=3",
    ],
    "zero": ["", "zero=1", "zero=2"],
    "microbatches": ["", "microbatches=2"],
    "precision": ["", "precision=bf16", "precision=fp16", "precision=fp64"],
    "batchnorm": ["plain", "batchnorm"],
    "data": ["arrays", "workers=0", "workers=2"],
    "rule": ["sgd", "adam"],
    "kill": ["first step", "epoch's end", "mid-epoch"],
}  # fmt: skip
KILLS = {"first step": (1, 1, 1), "epoch's end": (3, 3, 3), "mid-epoch": (2, 5, 4)}
WORLDS = ["", "replicate=2", "replicate=3", "shard=2", "shard=4", "replicate=2,shard=2"]
WANDERER = Images(rule="sgd", epochs=4, clip=0.5)


def _allowed(cell: Cell) -> bool:
    if cell["zero"] and "shard" not in cell["layout"]:
        return False
    if cell["precision"] == "precision=fp64":
        return cell["layout"] in ("", "shard=3", "engine=textbook,replicate=2", "engine=textbook,replicate=3")
    return not (cell["precision"] and "textbook" in cell["layout"])


GRID = grid(AXES, _allowed)
COVERED = {"replicate=2": "replicate=3", "replicate=4": "replicate=3", "engine=textbook,replicate=2": "its replicate=3"}
"""Layouts of the soak alone, and those whose uneven slices ask more."""
SELECTED = pairwise([cell for cell in GRID if cell["layout"] not in COVERED])


def plan_of(cell: Cell) -> str:
    parts = [cell["layout"], cell["zero"], cell["microbatches"], cell["precision"]]
    return ",".join(part for part in [*parts, cell["data"].removeprefix("arrays")] if part)


def task_of(cell: Cell) -> Images:
    kind = Images if cell["data"] == "arrays" else Loaded
    return kind(rule=cell["rule"], batchnorm=cell["batchnorm"] == "batchnorm", dropout=0.3, clip=0.5)


def test_the_selection_has_every_pair_of_the_grid() -> None:
    assert len(SELECTED) <= 22
    most = [cell for cell in GRID if cell["layout"] not in COVERED]
    assert set().union(*map(pairs, SELECTED)) == set().union(*map(pairs, most))


@pytest.mark.parametrize("cell", GRID if SOAK else SELECTED, ids=lambda cell: "-".join(filter(None, cell.values())))
def test_the_same_plan_goes_on_to_the_same_bits(pool: Pool, tmp_path: Path, cell: Cell) -> None:
    saved = check_same_bits(pool, task_of(cell), plan_of(cell), tmp_path, KILLS[cell["kill"]])
    assert (cell["batchnorm"] == "batchnorm") == any(name.startswith(LOCAL) for name in saved)


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(WORLDS, 2), (WORLDS[1], WORLDS[1])])
def test_another_world_goes_on_with_the_same_samples(pool, tmp_path, killed, before, after):
    told = check_another_plan(pool, WANDERER, killed, (before, after), tmp_path / "run")
    assert ("changed since: plan: " in told) == (before != after)


@pytest.mark.parametrize(("before", "after"), [("", "precision=fp64"), ("precision=fp64,replicate=2", "shard=2")])
def test_another_precision_goes_on_with_the_weights_and_the_optimizer(pool, tmp_path, killed, before, after):
    check_another_plan(pool, WANDERER, killed, (before, after), tmp_path / "run")
    tensors = Run(tmp_path / "run").latest().read_tensors()
    kinds = {tensors.read(name).dtype for name in tensors if name.startswith((MODEL, OPTIMIZER))}
    assert kinds == {torch.float64 if "fp64" in after else torch.float32}


@pytest.mark.parametrize(
    ("before", "after"),
    [("native", "textbook"), ("textbook", "native"), ("deepspeed,shard=2", "native,shard=2"), ("native", "deepspeed")],
)
def test_another_engine_takes_the_weights_over_and_says_so(pool: Pool, tmp_path: Path, before: str, after: str) -> None:
    task, folder = Images(rule="adam", dropout=0.3), tmp_path / "run"
    run(pool, task, f"engine={before}", folder, steps=4, save_every=2)
    was = {name for name in hashes(folder, 4) if name.startswith(MODEL)}
    told = run(pool, task, f"engine={after}", folder, steps=5, save_every=1)
    names = [text.partition(",")[0] for text in (before, after)]
    assert f"from engine {names[0]} to {names[1]}: only the weights are restored" in told
    tensors = Run(folder).latest().read_tensors()
    counted = {float(tensors.read(one)) for one in tensors if one.startswith(OPTIMIZER) and one.endswith(".step")}
    assert counted == {1.0}, "Adam's step counters are not those of a fresh optimizer"
    assert was <= set(hashes(folder, 5))
    assert list(samples(folder)) == [1, 2, 3, 4, 5]
