"""Seeds the global generators before each sample, so that a dataset's random draws depend on the sample alone."""

from __future__ import annotations

import random
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, StackDataset, Subset, TensorDataset

from grappe.data.arrays import RepeatedDataset
from grappe.data.draw import mix
from grappe.errors import TaskError
from grappe.errors.user_code import calls_users, sentence
from grappe.errors.user_line import at
from grappe.private_api.torch import tree_flatten


class SeededDataset(Dataset[Any]):
    """Map-style dataset indexed by (epoch, id), whose random draws do not depend on the process that loads the sample.

    Before each `dataset[id]`, Python's `random`, NumPy's global generator and torch's CPU generator are seeded from
    `mix(seed, epoch, id)`; after each batch the three are restored, since dropout draws from torch's in the
    same process. This costs about 8 microseconds a sample and 85 a batch, whether the dataset draws or not; nothing
    where it cannot, as a list. Generators in attributes of the dataset are seeded, too, see `own_generators`. A keyed
    dataset is given its key, and nothing is seeded: threads may load its samples.
    """

    def __init__(self, dataset: Dataset[Any], *, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self._keyed = keyed_sample(dataset)
        self._by_epoch = by_epoch(dataset)
        self._draws_nothing = draws_nothing(dataset)
        self._generators: list[Any] | None = None

    @property
    def keyed(self) -> Callable[[tuple[int, int]], Any] | None:
        """A function that loads the sample of a request (epoch, id), in any thread; None: the dataset is not keyed."""
        return None if self._keyed is None else self._by_key

    def __len__(self) -> int:
        return len(cast(Sized, self.dataset))

    def __getitem__(self, index: tuple[int, int]) -> Any:
        """Loads one sample, for a request (epoch, id)."""
        return self.__getitems__([index])[0]

    @calls_users("a sample of data()")
    def __getitems__(self, requests: Iterable[tuple[int, int]]) -> list[Any]:
        """Loads the samples of a batch, in order, for requests (epoch, id).

        One by one, even if the dataset has its own `__getitems__`, in which single samples could not be seeded.
        """
        requests = list(requests)
        samples = KeyedSamples()
        samples.key = mix(self.seed, *requests[0])
        if self._keyed is not None:
            samples += [self._by_key(request) for request in requests]
            return samples
        if self._draws_nothing and not self._by_epoch:
            samples += [self._sample(index) for _, index in requests]
            return samples
        if self._generators is None:
            self._generators = own_generators(self.dataset)
        with generators_kept():
            for epoch, index in requests:
                for each in self._by_epoch:
                    if _epochs.get(each) != epoch:
                        each.set_epoch(epoch)
                        _epochs[each] = epoch
                key = mix(self.seed, epoch, index)
                seed_generators(key)
                for number, generator in enumerate(self._generators):
                    own = mix(key, number)
                    if isinstance(generator, torch.Generator):
                        generator.manual_seed(own)
                    elif isinstance(generator, np.random.Generator):
                        generator.bit_generator.state = type(generator.bit_generator)(own).state
                    else:
                        generator.seed(own >> 31 if isinstance(generator, np.random.RandomState) else own)
                samples.append(self._sample(index))
        return samples

    def _sample(self, index: int) -> Any:
        sample = self.dataset[int(index)]
        if sample is None:
            raise missing(self.dataset, int(index))
        return sample

    def _by_key(self, request: tuple[int, int]) -> Any:
        epoch, index = request
        assert self._keyed is not None
        sample = self._keyed(int(index), mix(self.seed, epoch, index))
        if sample is None:
            raise missing(self.dataset, int(index))
        return sample


class KeyedSamples(list[Any]):
    """The samples of a batch."""

    key: int
    """A number of 63 bits for what is drawn for the batch, which depends on the first request alone."""


def missing(dataset: Any, index: int) -> TaskError:
    """Makes the error of a sample that is None."""
    return TaskError(
        f"sample {index} of data() is None: is a `return` missing? To leave a sample out, do not "
        "count it in __len__: every sample is seen once" + at(type(dataset), "__getitem__")
    )


def keyed_sample(dataset: Any) -> Callable[[int, int], Any] | None:
    """Returns the function of (index, key) that loads a sample of a keyed dataset; None: it is none.

    A dataset is keyed if it says so, `keyed = True`, and has a method `sample(index, key)` that depends on its
    arguments alone.
    """
    if isinstance(dataset, RepeatedDataset):
        inner, length = keyed_sample(dataset.dataset), len(dataset)
        return None if inner is None else lambda index, key: inner(index % length, key)
    if type(dataset) is Subset:
        inner, chosen = keyed_sample(dataset.dataset), dataset.indices
        return None if inner is None else lambda index, key: inner(chosen[index], key)
    if getattr(dataset, "keyed", False) is not True or not claims(type(dataset), "sample", "__getitem__"):
        return None
    return lambda index, key: dataset.sample(index, mix(key, index))


_epochs = weakref.WeakKeyDictionary[Any, int]()
"""The epoch that each dataset of this process was set to: a training and its validation may have parts of one."""


def by_epoch(dataset: Any) -> list[Any]:
    """Lists the datasets with a `set_epoch(epoch)`, which is called before samples of another epoch are read.

    A dataset itself, or those of which torch's Subset, ConcatDataset or StackDataset is made.
    """
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    inner: Any = ()
    if isinstance(dataset, Subset | RepeatedDataset):
        inner = [dataset.dataset]
    elif isinstance(dataset, ConcatDataset | StackDataset):
        inner = dataset.datasets
    return [each for part in (inner.values() if isinstance(inner, dict) else inner) for each in by_epoch(part)]


def draws_nothing(dataset: Any) -> bool:
    """Returns whether no code of a user's runs where a sample is read, so that none can draw: a list, rows of tensors.

    Exact types: a class derived from one of them may draw.
    """
    kind = type(dataset)
    if kind is RepeatedDataset or kind is Subset:
        return draws_nothing(dataset.dataset)
    return kind in (list, tuple, TensorDataset)


def claims(kind: type, claim: str, method: str) -> bool:
    """Returns whether a class says `claim` where it defines `method`, or below: an override ends a base's claim."""
    order = [vars(base) for base in kind.__mro__]
    claimed = next((number for number, names in enumerate(order) if claim in names), None)
    defined = next((number for number, names in enumerate(order) if method in names), len(order))
    return claimed is not None and claimed <= defined


@contextmanager
def seeded(key: int) -> Iterator[None]:
    """Context in which the three global generators are seeded from `key`; afterwards they are restored."""
    with generators_kept():
        seed_generators(key)
        yield


def seed_generators(key: int) -> None:
    """Seeds the three global generators from a key of 63 bits."""
    seed_python(key)
    torch.default_generator.manual_seed(key)


def seed_python(key: int) -> None:
    """Seeds Python's and NumPy's generators from a key of 63 bits, in 10 microseconds."""
    random.seed(key)
    # NumPy's and torch's are Mersenne Twisters seeded alike by 32 bits: from the same 32 they would draw the same.
    np.random.seed(key >> 31)


GLOBAL = {id(torch.default_generator), id(random.random.__self__), id(np.random.get_state.__self__)}
GENERATORS = torch.Generator, np.random.Generator, np.random.RandomState, random.Random
NOT_SEARCHED = type, types.ModuleType, types.FunctionType, torch.Tensor, np.ndarray
LONGEST = 1000  # entries of a list or a dictionary that is searched: longer ones are samples


def own_generators(dataset: Any) -> list[Any]:
    """Lists the generators of torch, NumPy and Python in attributes of a dataset, and of what it is made of.

    Attributes are searched of any objects but modules of Python, classes, functions, tensors and arrays. A generator
    elsewhere, a closure's say, is not found: then a training's first step is not that of one process, and says so.
    """
    generators, seen, left = [], set(GLOBAL), [dataset]
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, GENERATORS):
            generators.append(each)
        elif isinstance(each, list | tuple | dict):
            left += list(each.values() if isinstance(each, dict) else each) if len(each) <= LONGEST else []
        elif not isinstance(each, NOT_SEARCHED):
            left += list(getattr(each, "__dict__", {}).values())
    return generators


@contextmanager
def generators_kept() -> Iterator[None]:
    """Context that restores the three global generators at its end."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    of_torch = torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(of_python)
        np.random.set_state(of_numpy)
        torch.default_generator.set_state(of_torch)


def fingerprint(dataset: Dataset[Any]) -> str:
    """Returns `LENGTH-HASH`, the hash over the first, middle and last sample, drawn as for epoch 0 and seed 0."""
    length = len(dataset)  # type: ignore[arg-type]
    if isinstance(dataset, IterableDataset):
        return f"{'' if dataset.endless else length}-stream"  # type: ignore[attr-defined]
    seeded = SeededDataset(dataset, seed=0)
    try:
        samples = seeded.__getitems__([(0, 0), (0, length // 2), (0, length - 1)])
    except IndexError as error:
        raise TaskError(
            f"len(data()) is {length}, but it has no sample for an index below that: is __len__ right? "
            f"{sentence(error)}"
        ) from error
    return f"{length}-{digest(samples)}"


def digest(samples: Iterable[Any]) -> str:
    """Computes a hash of samples."""
    hashed = xxhash.xxh3_64()
    for sample in samples:
        for leaf in tree_flatten(sample)[0]:
            hashed.update(_bytes(leaf))
    return hashed.hexdigest()


@calls_users("a sample of data()")
def _bytes(leaf: Any) -> bytes:
    if isinstance(leaf, torch.Tensor):
        leaf = leaf.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy() if leaf.numel() else b""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.tobytes() if leaf.dtype != object else str(leaf.shape).encode()
    if isinstance(leaf, bytes | str | int | float | bool):
        return repr(leaf).encode()
    return type(leaf).__qualname__.encode()  # an image, for example: its class must do
