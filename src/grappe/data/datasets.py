"""Datasets of a task: prepared once a node, split, checked, and the order of their training samples."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from grappe.data.arrays import in_memory, one_by_one
from grappe.data.draw import mix, permute
from grappe.data.sampling import DrawnSamples, EpochOrder, SampleOrder, Sampling
from grappe.data.seeded import seeded
from grappe.data.stream import Stream
from grappe.errors import DataError, GrappeError, TaskError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import user_call
from grappe.errors.user_line import at, line_of
from grappe.launch.files import locked, own_folder, state_base
from grappe.task import Task, overrides
from grappe.words import host_name

if TYPE_CHECKING:
    from grappe.launch.world import World


LOCK = ".grappe-prepare.lock"


def dataset_of(task: Task, split: str, folder: Path, train: Any = None, *, fake: bool = False) -> Any:
    """The samples of `split`.

    Args:
        train: the samples of training, by whose classes another split's are numbered; None: they are not at hand.
        fake: whether the samples are those of the task's fake_data().

    Raises:
        TaskError: the task's data() fails, or returns no dataset that can be used.
    """
    if fake:
        dataset = user_call(task, "fake_data", split)
        check(dataset, split, task, "fake_data")
        return one_by_one(dataset) if overrides(task, "collate") else dataset
    # A data() that draws samples makes the same ones in each process, run and plan.
    with seeded(int.from_bytes(split.encode()[:7], "big")):
        dataset = user_call(task, "data", split, folder)
    if isinstance(dataset, Stream | IterableDataset | Iterator):
        if split != "train":
            raise TaskError(
                f"{type(task).__name__}.data({split!r}) is a stream: an evaluation sees the same samples each time, "
                f"so give some of them as a list: list(itertools.islice(stream, 1000)){at(task, 'data')}"
            )
        return dataset if isinstance(dataset, Stream) else Stream(dataset)
    if split != "train" and hasattr(dataset, "numbered_as"):
        with contextlib.suppress(DataError, TaskError):  # where they are not there, classes cannot be compared
            train = user_call(task, "data", "train", folder) if train is None else train
        dataset = dataset.numbered_as(train) if hasattr(train, "numbered_as") else dataset
    check(dataset, split, task)
    return one_by_one(dataset) if overrides(task, "collate") else dataset


def refuse_differing_classes(train: Any, validation: Any) -> None:
    """Raises DataError if two splits with names of classes give a name other numbers; `Images` are numbered alike."""
    numbers, others = _class_names(train), _class_names(validation)
    if numbers == others or not (numbers and others):
        return
    name = next((each for each in others if each not in numbers or numbers.index(each) != others.index(each)), None)
    if name is not None:
        there = f"is number {numbers.index(name)} in training" if name in numbers else "is not in training"
        raise DataError(
            f"the class {printable(name)!r} has number {others.index(name)} in validation and {there}: give both "
            "splits the classes of training, in its order"
        )


def _class_names(dataset: Any) -> list[str]:
    """Returns the names of a dataset's classes by number; [] where `classes` has something else, as each sample's."""
    names = getattr(dataset, "classes", None)
    is_list = isinstance(names, list | tuple) and all(isinstance(name, str) for name in names)
    return list(names) if is_list and len({*names}) == len(names) else []


def refuse_differing_lengths(world: World, lengths: Mapping[str, int]) -> None:
    """Raises DataError on all processes if one has other numbers of samples in a split. Collective."""
    gathered = world.gather((host_name(), dict(lengths)))
    first_host, first = gathered[0]
    for rank, (host, theirs) in enumerate(gathered):
        for split, count in theirs.items():
            if count != first[split]:
                raise DataError(
                    f"process {rank} on {host} has {count:,} {split} samples, process 0 on {first_host} has "
                    f"{first[split]:,}: a file or shard is missing on one of them. Stage or copy the data again"
                )


def prepare(task: Task, folder: Path, world: World | None = None) -> None:
    """Lets one process of each node prepare the data, one after the other where they share a disk. Collective.

    Raises:
        TaskError: the task's prepare() fails, on every process.
    """
    if not overrides(task, "prepare"):
        return
    problem: GrappeError | None = None
    if world is None or world.process.local_rank == 0:
        try:
            with locked(folder / LOCK):
                user_call(task, "prepare", folder)
        except GrappeError as error:
            problem = error
    if world is not None:
        reported = next((each for each in world.gather(problem) if each is not None), None)
        problem = None if reported is None else TaskError(str(reported))
    if problem is not None:
        raise problem


@contextlib.contextmanager
def once_at_a_time() -> Iterator[None]:
    """Context that this user's processes of this machine enter one after the other."""
    base = state_base()
    if base is not None:
        own_folder(base / "grappe")  # for the user alone, also where the lock is its first file
    with contextlib.nullcontext() if base is None else locked(base / "grappe" / LOCK):
        yield


def check(dataset: object, split: str, task: Task, method: str = "data") -> int:
    """Returns the length of the dataset that a method of the task returned.

    Raises:
        TaskError: the dataset is not map-style, or is empty.
    """
    what, place = f"{type(task).__name__}.{method}({split!r})", at(task, method)
    if isinstance(dataset, IterableDataset):
        raise TaskError(
            f"{what} is an IterableDataset: each process would read the whole stream. Give a map-style dataset "
            "(__len__ and __getitem__), or a task, which may train on a stream (see docs/corpus.md)"
        )
    if isinstance(dataset, DataLoader):
        raise TaskError(
            f"{what} gave a DataLoader: give its dataset, `return loader.dataset`; grappe makes the batches, by the "
            f"task's batch_size, its collate() and the plan's workers{place}"
        )
    kind = type(dataset).__name__
    if kind in ("DataFrame", "Series") and hasattr(dataset, "iloc"):
        raise TaskError(
            f"{what} gave a {kind}, whose columns do not show which part is input and which is target: "
            f"`return grappe.Arrays(frame[[…]], frame['…'])`{place}"
        )
    if (
        isinstance(dataset, tuple | list)
        and len(dataset) == 2
        and all(getattr(column, "ndim", 0) > 0 and hasattr(column, "dtype") and len(column) != 2 for column in dataset)
    ):
        raise TaskError(
            f"{what} gave a pair of arrays, not pairs of samples: `return grappe.Arrays(inputs, targets)`{place}"
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        if dataset is None and split == "test":
            raise TaskError(f"{type(task).__name__} has no test split: its data('test') returns None{place}")
        advice = "Is a `return` missing?" if dataset is None else "list(…) makes one of what can be iterated"
        raise TaskError(f"{what} gave {kind}: it needs __len__ and __getitem__. {advice}{place}")
    try:
        length = len(dataset)  # type: ignore[arg-type]
    except Exception as error:
        line = line_of(error)
        where = f" ({line})" if line else at(type(dataset), "__len__")
        raise TaskError(
            f"{what} has no length: {error}{where}. __len__ must return how many samples there are"
        ) from error
    if length == 0:
        where = at(type(dataset), "__len__") or place
        raise TaskError(f"{what} is empty: check the folder and the split{where}")
    return length


def training_order(task: Task, dataset: Dataset) -> SampleOrder:
    """Returns the order of the training samples, as the task's seed and `sampling` say."""
    if isinstance(dataset, Stream):
        if overrides(task, "sampling"):
            raise TaskError(f"a stream's samples come in its own order: leave sampling() out{at(task, 'sampling')}")
        return SampleOrder(seed=task.seed, length=len(dataset), batch_size=task.batch_size, shuffle=False)
    drawn: EpochOrder | None = drawn_samples(task, dataset)
    if drawn is None and hasattr(dataset, "epoch_order"):
        drawn = dataset.epoch_order()
    length = len(dataset) if drawn is None else drawn.samples  # type: ignore[arg-type]
    return SampleOrder(seed=task.seed, length=length, batch_size=task.batch_size, sampling=drawn)


def drawn_samples(task: Task, dataset: Dataset) -> DrawnSamples | None:
    """Returns the task's `sampling`, checked; None: an epoch has each sample once.

    Raises:
        TaskError: sampling() fails, or does not fit the dataset.
    """
    if not overrides(task, "sampling"):
        return None
    sampling = user_call(task, "sampling", dataset)
    if sampling is None:
        return None
    if not isinstance(sampling, Sampling):
        raise TaskError(
            f"{type(task).__name__}.sampling() returned {type(sampling).__name__}: return a grappe.Sampling, or None"
            + at(task, "sampling")
        )
    return DrawnSamples(sampling, len(dataset))  # type: ignore[arg-type]


_SPLIT = 0x7370  # a word of the key, so that the order differs from every epoch's


def split(dataset: Dataset, part: str, *, validation: float = 0.1, test: float = 0.0, seed: int = 0) -> Dataset:
    """Returns a part of a dataset, for `Task.data`: `return grappe.split(dataset, split, validation=0.1)`.

    The samples are drawn by `seed` and the dataset's length alone, so every process and every start has the same; the
    task's own seed does not move them. Arrays stay where they are, memory-mapped ones too.

    Args:
        part: "train", "validation" or "test".
        validation: the share of the samples that are for validation, 0 to 1; at least one sample.
        test: the share for the test.

    Raises:
        TaskError: a share is out of its range, or a part has no sample.
    """
    length = len(dataset)  # type: ignore[arg-type]
    if not (0 < validation < 1 and 0 <= test < 1 and validation + test < 1):
        raise TaskError(
            f"split(): validation={validation} and test={test} must be shares of all samples, and leave some to train "
            "on"
        )
    if part == "test" and not test:
        raise TaskError("split(): there is no test part: give its share, as in test=0.1")
    sizes = {"validation": max(1, round(validation * length)), "test": max(1, round(test * length)) if test else 0}
    sizes["train"] = length - sum(sizes.values())
    if part not in sizes:
        raise TaskError(f"split(): there is no part {part!r}: train, validation, test")
    if sizes["train"] < 1:
        raise TaskError(f"split(): {length} samples are too few for these parts")
    order = permute(np.arange(length, dtype=np.int64), key=mix(seed, _SPLIT), length=length)
    ends = np.cumsum([sizes["validation"], sizes["test"]])
    drawn = dict(zip(("validation", "test", "train"), np.split(order, ends), strict=True))[part]
    rows = np.sort(drawn)  # neighbours on a disk are read together
    arrays = in_memory(dataset)
    return Subset(dataset, rows.tolist()) if arrays is None else arrays.rows(rows)
