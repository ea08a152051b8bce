"""Makes the pairwise cover: cells of plan x engine x task x precision in which each two values that can meet do.

    python -m tests.parity.cover   # repairs cover.txt: drops what is impossible or spare, adds what lacks

A line of `cover.txt` is a cell: a plan, a kind of task, an optimizer, and whether gradients are clipped. What can meet
is asked of grappe (`engines.check`), and of `fits`, which knows the tasks.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from grappe import engines, extensions
from grappe.errors import PlanError
from grappe.launch.world import AXES
from grappe.plan import Plan
from grappe.task import Task
from tests.parity.contrastive import Views
from tests.parity.optimizers import TunedImages, TunedTokens
from tests.parity.tasks import Images, Tokens

FILE = Path(__file__).with_name("cover.txt")
PROCESSES = 4
KEYS = (
    ("", "replicate=2", "replicate=3", "replicate=4"),
    ("", "shard=2", "shard=2,zero=1", "shard=2,zero=2", "shard=3"),
    (
        *("", "tensor=2", "domain=2", "exact=4"),
        *("pipeline=2", "pipeline=3,schedule=gpipe", "pipeline=2,schedule=interleaved"),
        "pipeline=2,schedule=zero_bubble",
    ),
    ("", "microbatches=2", "microbatches=3", "microbatches=4"),
    ("", "recompute", "recompute=selective", "recompute=host"),
    ("", "offload=cpu"),
    ("", "channels_last"),
    ("", "precision=bf16", "precision=fp64"),
    ("", "engine=textbook", "engine=lightning", "engine=deepspeed", "engine=horovod"),
)
"""The values of each part of a plan; "": the default."""
KINDS = ("images", "tokens", "tiny", "frozen", "unused", "dropout", "normed", "pairs")
RULES = ("sgd", "adam", "lars", "lamb", "muon")
CLIPS = ("free", "clipped")
FACTORS = (*KEYS, KINDS, RULES, CLIPS)
PRODUCTS = (
    "shard=4,zero=2", "replicate=2,shard=2,zero=1,microbatches=2", "tensor=2,shard=2,recompute",
    "exact=4,replicate=2,recompute", "pipeline=2,schedule=gpipe,microbatches=3", "pipeline=3,microbatches=3",
    "pipeline=3,schedule=zero_bubble,microbatches=3", "pipeline=4,schedule=gpipe,microbatches=2",
    "pipeline=4,microbatches=5", "pipeline=4,schedule=zero_bubble,microbatches=4",
    "pipeline=2,schedule=zero_bubble,microbatches=2,shard=2,zero=1", "pipeline=2,microbatches=3,shard=2,zero=2",
    "pipeline=2,microbatches=2,shard=2,recompute,offload=cpu", "pipeline=2,microbatches=2,tensor=2",
    "engine=textbook,replicate=4,microbatches=2", "engine=lightning,replicate=2,shard=2,zero=2,microbatches=2",
    "engine=deepspeed,shard=2,zero=2,offload=cpu,microbatches=2",
)  # fmt: skip
"""The plans of the night: numbers of processes that the cover has not, and three keys at once; with all of `TASKS`."""
TASKS = (
    ("images", "adam", "clipped"), ("tokens", "sgd", "free"), ("tiny", "sgd", "clipped"), ("frozen", "adam", "free"),
    ("unused", "sgd", "free"), ("dropout", "adam", "clipped"), ("normed", "adam", "clipped"), ("pairs", "sgd", "free"),
    ("tokens", "lars", "clipped"), ("tokens", "muon", "free"),
)  # fmt: skip
IMAGES = {
    "images": {},
    "tiny": {"batch_size": 3, "samples": 7, "epochs": 4},
    "frozen": {"frozen": True},
    "unused": {"unused": True},
    "dropout": {"dropout": 0.3},
    "normed": {"batchnorm": True},
}
Cell = tuple[str, ...]
"""A value of each factor."""


@functools.cache
def task_of(kind: str, rule: str, clip: str) -> Task:
    """Makes the task of a cell."""
    bound = 0.5 if clip == "clipped" else None
    if kind == "pairs":
        return Views(rule=rule)
    plain, tuned = (Tokens, TunedTokens) if kind == "tokens" else (Images, TunedImages)
    options = IMAGES.get(kind, {})
    return plain(rule=rule, clip=bound, **options) if rule in RULES[:2] else tuned(by=rule, clip=bound, **options)


def fits(plan: Plan, kind: str, rule: str, clip: str) -> bool:
    """Whether a task can be trained under a plan, and the plain loop is what it is compared with."""
    return all((
        kind == "tokens" or plan.tensor == 1,
        kind not in ("tokens", "pairs") or not plan.channels_last,
        kind != "pairs" or (rule in RULES[:2] and clip == "free" and plan.precision == "fp32"),
        kind not in ("pairs", "normed") or plan.domain == 1,
        kind != "dropout" or not plan.exact,  # its pieces have draws of their own
        kind != "dropout" or not plan.channels_last,  # torch draws in the order of memory
        # Synchronised over processes, not over microbatches, pieces or stages.
        kind != "normed" or (plan.microbatches == plan.pipeline == 1 and not plan.exact),
        kind != "normed" or plan.engine not in ("textbook", "horovod"),
        kind != "normed" or plan.precision != "bf16",  # the sums that it is rounded to are of other slices
        kind != "pairs" or plan.schedule != "interleaved",  # refused
        kind != "unused" or (plan.engine != "deepspeed" and plan.pipeline == 1),  # refused
        kind != "tiny" or rule != "muon",  # two of its seven samples are nearly equal: a last bit turns the AUROC
        plan.precision != "bf16" or rule == "sgd",  # others make a large step of a small gradient's rounding
        plan.engine != "deepspeed" or rule in RULES[:2] or (plan.shard == 1 and plan.offload == "none"),
    ))  # fmt: skip


def text_of(parts: Sequence[str], kind: str) -> str:
    """Writes a plan with what its kind of task needs."""
    more = {"normed": "batchnorm=sync", "dropout": "dropout=whole"}.get(kind, "")
    return str(Plan.parse(",".join(part for part in (*parts, more) if part)))


def values_of(line: str) -> Cell:
    """Reads a cell from its line."""
    text, *rest = line.split()
    present = set(text.split(","))
    parts = [
        max((value for value in values if set(filter(None, value.split(","))) <= present), key=len) for values in KEYS
    ]
    return (*parts, *rest)


def line_of(cell: Cell) -> str:
    """Writes a cell as a line."""
    *parts, kind, rule, clip = cell
    return f"{text_of(parts, kind) or 'one'} {kind} {rule} {clip}"


def products() -> list[str]:
    """Returns the lines of the night's cells."""
    cells = [(Plan.parse(text), task) for text in PRODUCTS for task in TASKS]
    return [line_of((str(plan), *task)) for plan, task in cells if fits(plan, *task)]


def in_turn(first: Sequence[Any], second: Sequence[Any]) -> list[Any]:
    """Returns the product of two lists, all but one cell for each of the longer list's values marked for the night."""
    places = itertools.product(range(len(first)), range(len(second)))
    by_day = {(number % len(first), number % len(second)) for number in range(max(len(first), len(second)))}
    return [pytest.param(first[i], second[j], marks=() if (i, j) in by_day else pytest.mark.nightly) for i, j in places]


def plans() -> Iterator[tuple[Cell, Plan]]:
    """Yields each combination of the plan's parts that its engine supports, whether it is installed here or not."""
    settings = {part: settings_of(part) for values in KEYS for part in values}
    listed = functools.cache(extensions.having)  # which reads the folder of extensions, for each plan several times
    with (
        mock.patch("importlib.util.find_spec", return_value=True),
        mock.patch.object(extensions, "having", listed),
        mock.patch.object(engines, "names", functools.cache(engines.names)),
    ):
        for engine in KEYS[-1]:
            supported = engines.find(settings[engine].get("engine", "native")).supported_keys
            able = [[part for part in values if settings[part].keys() <= supported] for values in KEYS[:-1]]
            for parts in itertools.product(*able):
                options: dict[str, Any] = {}
                for part in (*parts, engine):
                    options.update(settings[part])
                if math.prod(options.get(axis, 1) for axis in AXES) > PROCESSES:
                    continue
                with contextlib.suppress(PlanError):
                    plan = Plan(**options)
                    engines.check(plan)
                    if plan.engine != "lightning" or plan.offload == "none":  # it is DeepSpeed's, and tested there
                        yield (*parts, engine), plan


def settings_of(part: str) -> dict[str, Any]:
    """Returns the keys of a part of a plan."""
    plan = Plan.parse(part)
    return {key: getattr(plan, key) for key in plan.changed_keys()}


@functools.cache
def possible() -> np.ndarray:
    """Returns all possible cells [cells x factors], as the values' numbers."""
    number = [{value: index for index, value in enumerate(values)} for values in FACTORS]
    tasks = list(itertools.product(KINDS, RULES, CLIPS))
    last = [bytes(map(dict.__getitem__, number[len(KEYS) :], task)) for task in tasks]
    cells = bytearray()
    for parts, plan in plans():
        first = bytes(map(dict.__getitem__, number, parts))
        for task, numbers in zip(tasks, last, strict=True):
            if fits(plan, *task):
                cells += first + numbers
    return np.frombuffer(cells, dtype=np.uint8).reshape(-1, len(FACTORS))


def pairs_of(cells: np.ndarray) -> set[tuple[int, int, int, int]]:
    """Returns the pairs that stand in cells: two factors, and the numbers of their values."""
    two = itertools.combinations(range(len(FACTORS)), 2)
    return {
        (i, j, *divmod(int(n), 100)) for i, j in two for n in np.unique(cells[:, i].astype(int) * 100 + cells[:, j])
    }


def stored() -> list[str]:
    """Returns the lines of the cells."""
    return FILE.read_text().splitlines() if FILE.exists() else []


def numbered(lines: Sequence[str]) -> np.ndarray:
    """Returns lines as `possible` has them."""
    rows = [[values.index(value) for values, value in zip(FACTORS, values_of(line), strict=True)] for line in lines]
    return np.array(rows, dtype=np.uint8).reshape(-1, len(FACTORS))


def repaired(lines: Sequence[str]) -> list[str]:
    """Returns cells that cover each possible pair: the possible ones of `lines` that are needed, and new ones."""
    cells = possible()
    rows = {row.tobytes() for row in cells}
    chosen = [row for row in numbered(lines) if row.tobytes() in rows]
    missing = np.zeros((len(FACTORS), len(FACTORS), 10, 10))
    for i, j in itertools.combinations(range(len(FACTORS)), 2):
        np.add.at(missing[i, j], (cells[:, i], cells[:, j]), 1.0)
    missing[missing > 0] **= -0.5  # a rare pair weighs more: the cell that has it is free to bring others along
    for row in chosen:
        clear(missing, row)
    while missing.any():
        two = itertools.combinations(range(len(FACTORS)), 2)
        worth = sum(missing[i, j][cells[:, i], cells[:, j]] for i, j in two)
        chosen.append(cells[int(np.argmax(worth))])
        clear(missing, chosen[-1])
    wanted = pairs_of(cells)
    for row in list(chosen):
        rest = [other for other in chosen if other is not row]
        if rest and pairs_of(np.array(rest)) == wanted:
            chosen = rest
    return sorted(line_of(tuple(values[n] for values, n in zip(FACTORS, row, strict=True))) for row in chosen)


def clear(missing: np.ndarray, row: np.ndarray) -> None:
    """Takes the pairs of a cell away from those that are missing."""
    for i, j in itertools.combinations(range(len(FACTORS)), 2):
        missing[i, j, row[i], row[j]] = 0.0


if __name__ == "__main__":
    FILE.write_text("\n".join(repaired(stored())) + "\n")
    print(f"{len(stored())} cells")
