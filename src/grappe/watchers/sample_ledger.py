"""Sample ledger: writes which samples each step and each evaluation of this process really took."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from grappe.data.batch import Batch


class SampleLedger:
    """Taken from the batches themselves, so that a reader can check the ledger's promises from outside."""

    def __init__(self, folder: Path, rank: int) -> None:
        folder.mkdir(exist_ok=True)
        self._path = folder / f"rank-{rank}.jsonl"
        self._file = self._path.open("a")

    def cut_back(self, step: int) -> None:
        """Drops what lies beyond `step`: the training goes on from there."""
        kept = [line for line in self._path.read_text().splitlines() if json.loads(line)["step"] <= step]
        self._file.close()
        self._file = self._path.open("w")
        self._file.write("".join(line + "\n" for line in kept))

    def noted(self, batches: Iterator[Batch], kind: str, step: int | None = None) -> Iterator[Batch]:
        """The same batches, each written down: {"kind", "step", "ids"}."""
        for batch in batches:
            at = batch.step + 1 if step is None else step
            self._file.write(json.dumps({"kind": kind, "step": at, "ids": batch.ids.tolist()}) + "\n")
            yield batch

    def flush(self) -> None:
        """Everything so far is in the file."""
        self._file.flush()
