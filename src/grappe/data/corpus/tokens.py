"""Cuts corpora of tokens into windows, and packs documents so that none sees another: samples of a language model.

Shapes: L tokens of a sample; B samples of a batch.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from grappe.data.corpus.corpus import MOST_OPEN, Corpus
from grappe.data.corpus.formats import Format
from grappe.data.corpus.index import WordsAndArrays
from grappe.data.draw import mix, permute
from grappe.errors import DataError, TaskError
from grappe.launch.terminal import complain
from grappe.task import Task

IGNORED = -100
"""The target where nothing is to be predicted: torch's cross_entropy ignores it, and `counts` must not count it."""


class _TokenDataset(Dataset[Any]):
    """Samples that are cut from the tokens of a corpus, one block after the other."""

    keyed = True

    def __init__(self, corpus: Corpus, length: int, column: str) -> None:
        if length < 1:
            raise TaskError(f"length={length}: it must be at least 1")
        self.corpus, self.length, self.column, self.name = corpus, length, column, corpus.name
        bounds = [corpus.tokens(number, column)[2][[0, -1]].tolist() for number in range(len(corpus.index.blocks))]
        self._firsts = [first for first, _ in bounds]
        self._ends = np.cumsum([last - first for first, last in bounds], dtype=np.int64).tolist()
        self._mapped: dict[int, tuple[Format, NDArray[Any]]] = {}
        self.tokens = self._ends[-1]
        """Number of tokens of the whole corpus."""

    def _cut(self, start: int, count: int) -> NDArray[np.int64]:
        """Returns `count` tokens of a block, from the place `start` among all tokens on."""
        block = bisect.bisect_right(self._ends, start)
        if (mapped := self._mapped.get(block)) is None:
            if len(self._mapped) >= MOST_OPEN:
                self._mapped.clear()
            mapped = self._mapped[block] = self.corpus.tokens(block, self.column)[:2]
        mapped[0].check()
        first = self._firsts[block] + start - (self._ends[block - 1] if block else 0)
        return mapped[1][first : first + count].astype(np.int64)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_mapped": {}}

    def __getitem__(self, index: int) -> Any:
        return self.sample(index, 0)

    def sample(self, index: int, key: int) -> Any:
        """Returns a sample; it draws no random numbers."""
        raise NotImplementedError


class Windows(_TokenDataset):
    """Windows of L tokens, one after the other whatever the documents: pairs (tokens [L], the next tokens [L]), int64.

    Args:
        corpus: of token files (dtype=), or with a column of lists of tokens, as `grappe data tokenize` writes.
    """

    def __init__(self, corpus: Corpus, length: int, *, column: str = "tokens") -> None:
        super().__init__(corpus, length, column)
        sizes = np.diff(np.array([0, *self._ends], np.int64))
        self._window_ends = np.cumsum(np.maximum(sizes - 1, 0) // length).tolist()
        if not len(self):
            raise DataError(f"{corpus.name}: no part of its {self.tokens:,} tokens has the {length + 1:,} of a window")

    def __len__(self) -> int:
        return self._window_ends[-1]

    def sample(self, index: int, key: int) -> tuple[Tensor, Tensor]:
        """Returns a window, and the same a token further."""
        if not 0 <= index < self._window_ends[-1]:
            raise IndexError(f"window {index} of {len(self)}")
        block = bisect.bisect_right(self._window_ends, index)
        before, windows = (self._ends[block - 1], self._window_ends[block - 1]) if block else (0, 0)
        tokens = torch.from_numpy(self._cut(before + (index - windows) * self.length, self.length + 1))
        return tokens[:-1], tokens[1:]


class Packed(_TokenDataset):
    """Documents, packed by best fit into samples of L tokens; a longer one is cut, and no token is predicted twice.

    A sample is a pair: a dictionary of `input_ids`, `position_ids` (from 0 in each document) and `documents` (1, 2, …;
    0 for padding), each int64 [L], and the targets, int64 [L], -100 where nothing is to be predicted. The dictionary
    reaches the model by these names: have it use `document_mask(documents)`, and the task's `counts` return
    `target != -100`. Which documents are together depends on the corpus and the seed alone.

    Args:
        corpus: of token files with `end=`, or with a column of lists of tokens.
    """

    def __init__(self, corpus: Corpus, length: int, *, column: str = "tokens", seed: int = 0) -> None:
        super().__init__(corpus, length, column)
        self.seed = seed

        def make() -> WordsAndArrays:
            starts, counts = self._pieces()
            packs = best_fit(counts, length, seed)
            by_pack = np.argsort(packs, kind="stable")
            ends = np.cumsum(np.bincount(packs)).astype(np.uint32)
            return (), (ends, starts[by_pack].astype(np.uint64), counts[by_pack].astype(np.uint32))

        name = f"{column}-{length}-{seed}-{len(corpus)}.packed"
        kinds = [np.dtype(kind) for kind in ("<u4", "<u8", "<u4")]
        # The end of each sample's pieces; each piece's start, and the number of tokens that it predicts.
        self._pack_ends, self._starts, self._counts = corpus.shards.kept(name, kinds, make)[0][1]

    def __len__(self) -> int:
        return len(self._pack_ends)

    @property
    def filled(self) -> float:
        """The share of the samples' tokens that are no padding."""
        return int(self._counts.sum(dtype=np.int64)) / (len(self) * self.length)

    def sample(self, index: int, key: int) -> tuple[dict[str, Tensor], Tensor]:
        """Returns the documents of a sample."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        first, last = int(self._pack_ends[index - 1]) if index else 0, int(self._pack_ends[index])
        rows = np.zeros((3, self.length), np.int64)
        target, at = np.full(self.length, IGNORED, np.int64), 0
        for number, piece in enumerate(range(first, last), 1):
            count = int(self._counts[piece])
            tokens, end = self._cut(int(self._starts[piece]), count + 1), at + count
            rows[0, at:end], rows[1, at:end], rows[2, at:end] = tokens[:-1], np.arange(count), number
            target[at:end], at = tokens[1:], end
        names = ("input_ids", "position_ids", "documents")
        return dict(zip(names, map(torch.from_numpy, rows), strict=True)), torch.from_numpy(target)

    def _pieces(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Returns where each piece of a document starts among all tokens, and how many tokens it predicts."""
        starts, predicted = [], []
        for number, first in enumerate(self._firsts):
            bounds = self.corpus.tokens(number, self.column)[2].astype(np.int64)
            before = self._ends[number - 1] if number else 0
            counts = np.maximum(np.diff(bounds) - 1, 0)
            pieces = -(-counts // self.length)
            places = np.arange(int(pieces.sum())) - np.repeat(np.cumsum(pieces) - pieces, pieces)
            starts.append(np.repeat(bounds[:-1] - first + before, pieces) + places * self.length)
            predicted.append(np.minimum(np.repeat(counts, pieces) - places * self.length, self.length))
        if not sum(map(len, starts)):
            raise DataError(f"{self.corpus.name}: none of its documents has two tokens")
        return np.concatenate(starts), np.concatenate(predicted)


def best_fit(sizes: NDArray[np.int64], room: int, seed: int = 0) -> NDArray[np.int64]:
    """Packs pieces into bins by best fit, the largest first: returns each piece's bin, int64 (n,).

    Pieces of one size are taken together, in an order that the seed chooses: Krell et al., "Efficient sequence packing
    without cross-contamination", 2021. So it takes steps by sizes and not by pieces.

    Args:
        sizes: 1 to `room`, int64 (n,).
    """
    by_size = np.argsort(sizes, kind="stable")
    bounds = np.searchsorted(sizes[by_size], np.arange(room + 2))
    bins = np.empty(len(sizes), np.int64)
    free: dict[int, list[NDArray[np.int64]]] = {}  # bins by the room that they have
    has = np.zeros(room + 1, bool)
    opened = 0
    for size in range(room, 0, -1):
        pieces = by_size[bounds[size] : bounds[size + 1]]
        if len(pieces):
            pieces = pieces[permute(np.arange(len(pieces)), key=mix(seed, size), length=len(pieces))]
        while len(pieces):
            fits = np.flatnonzero(has[size:])
            if fits.size:
                space = size + int(fits[0])
                candidates = np.concatenate(free.pop(space))
                has[space] = False
            else:
                space, count = room, -(-len(pieces) // (room // size))
                candidates, opened = np.arange(opened, opened + count), opened + count
            each = space // size
            used = min(len(candidates), -(-len(pieces) // each))
            taken = min(len(pieces), used * each)
            bins[pieces[:taken]] = np.repeat(candidates[:used], each)[:taken]
            pieces = pieces[taken:]
            last = taken - (used - 1) * each  # in the last bin that was used
            left = ((candidates[used:], space), (candidates[: used - 1], space - each * size))
            for some, rest in (*left, (candidates[used - 1 : used], space - last * size)):
                if len(some) and rest:
                    free.setdefault(rest, []).append(some)
                    has[rest] = True
    return bins


def document_mask(documents: Tensor, *, causal: bool = True, dtype: torch.dtype | None = None) -> Tensor:
    """Returns which tokens a token of a packed sample may attend to: those of its own document, up to itself.

    Args:
        documents: int64 [B, L], of `Packed`.
        causal: whether later tokens are hidden.
        dtype: None: bool [B, 1, L, L], True where it may, as `scaled_dot_product_attention` takes it. Else numbers to
            add to the scores, 0 or the smallest.
    """
    mask = documents[:, None, :, None] == documents[:, None, None, :]
    if causal:
        mask = mask & torch.ones(mask.shape[-2:], dtype=torch.bool, device=mask.device).tril()
    if dtype is None:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, torch.finfo(dtype).min)


def check_packed_data(task: Task, dataset: Any, model: torch.nn.Module) -> None:
    """Checks by `check_packing` the model of a training whose data, or a source of it, is `Packed`.

    Raises:
        TaskError: the model does not keep packed documents apart.
    """
    for packed in (each for each in getattr(dataset, "sources", [dataset]) if isinstance(each, Packed)):
        several = np.flatnonzero(np.diff(packed._pack_ends.astype(np.int64), prepend=0) > 1)
        if not len(several):
            continue
        inputs, _ = packed[int(several[0])]
        border = int((inputs["documents"] > 1).int().argmax())
        few = {name: leaf[None, max(0, border - 4) : border + 4] for name, leaf in inputs.items()}  # quick
        try:
            check_packing(model, few, task.forward)
        except TaskError:
            raise
        except Exception as error:
            complain(f"grappe: whether packed documents see each other could not be checked: {error}")
        return


@torch.no_grad()
def check_packing(
    model: torch.nn.Module,
    inputs: Mapping[str, Tensor],
    forward: Callable[[Any, Any], Any] = lambda model, inputs: model(**inputs),
) -> None:
    """Checks that a model keeps packed documents apart: the first document's tokens change no other's output.

    A training does it by itself, before its first step.

    Args:
        inputs: a batch of `Packed`'s, int64 [B, L] each, whose first sample has two documents or more.
        forward: calls the model with a batch; default: by the names of the inputs.

    Raises:
        TaskError: it does not; the message names the first module of which an output changes.
    """
    documents = inputs["documents"][0]
    others = documents > 1
    if not others.any():
        raise TaskError("check_packing: the first sample has one document: give one with several")
    seen: list[tuple[str, Tensor]] = []

    def note(_module: torch.nn.Module, _inputs: Any, output: Any, name: str) -> None:
        leaf = output[0] if isinstance(output, tuple) and output else output
        if isinstance(leaf, Tensor) and leaf.dim() > 1 and leaf.shape[:2] == inputs["documents"].shape:
            seen.append((name, leaf[0, others].clone()))

    training = model.training
    hooks = [
        module.register_forward_hook(functools.partial(note, name=f"{name or 'the model'} ({type(module).__name__})"))
        for name, module in model.named_modules()
    ]
    try:
        model.eval()
        forward(model, inputs)
        before, seen = seen, []
        ids = inputs["input_ids"].clone()
        first = documents == 1
        ids[0, first] = ids[0, first].flip(0) ^ (ids[0, first] == ids[0, first].flip(0)).long()
        forward(model, {**inputs, "input_ids": ids})
    finally:
        model.train(training)
        for hook in hooks:
            hook.remove()
    for (name, earlier), (_, now) in zip(before, seen, strict=True):
        if not torch.allclose(earlier, now, rtol=1e-5, atol=1e-6):
            raise TaskError(
                f"packed documents see each other in {name}: give its attention document_mask(documents); a "
                "recurrent layer cannot be told where a document begins: use Windows, or batches of single documents"
            )
