"""Measures corpora: indexing, random rows beside `datasets`, and windows of tokens beside a plain memmap.

python -m benchmarks.corpus FOLDER [--rows 10000000] [--only index,rows,tokens] prints JSON; the best of three turns.
"""

from __future__ import annotations

import argparse
import gzip
import io
import json
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard

from grappe.data import Corpus, Windows
from grappe.data.corpus.formats import RowOptions
from grappe.data.corpus.index import find, scan
from grappe.data.draw import permute

TEXT = "a sentence of ordinary length, about a hundred bytes with its number and its braces, 12345"
SHARDS = 8


def made(folder: Path, ending: str, rows: int) -> Path:
    """Writes `rows` rows of a hundred bytes as eight shards, unless they are there."""
    place = folder / f"rows{rows}{ending}"
    if place.exists():
        return place
    place.mkdir(parents=True)
    for shard in range(SHARDS):
        first, last = rows * shard // SHARDS, rows * (shard + 1) // SHARDS
        file = place / f"{shard:03d}{ending}"
        ids = range(first, last)
        if ending in (".parquet", ".arrow"):
            table = pa.table({"id": ids, "text": [TEXT] * len(ids)})
            if ending == ".parquet":
                pq.write_table(table, file, row_group_size=10_000)
            else:
                with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
                    writer.write_table(table, max_chunksize=1000)
        elif ending == ".bin":
            tokens = np.random.default_rng(shard).integers(1, 50_000, 64 * len(ids)).astype("<u2")
            tokens[63::64] = 0
            tokens.tofile(file)
        elif ending == ".tar":
            with tarfile.open(file, "w") as archive:
                for number in ids:
                    member = tarfile.TarInfo(f"{number:09d}.txt")
                    member.size = len(TEXT)
                    archive.addfile(member, io.BytesIO(TEXT.encode()))
        else:
            lines = "".join(f'{{"id": {number}, "text": "{TEXT}"}}\n' for number in ids).encode()
            pack = {".gz": lambda text: gzip.compress(text, 1), ".zst": zstandard.ZstdCompressor().compress}
            file.write_bytes(pack.get(file.suffix, bytes)(lines))
    return place


def cpu() -> float:
    """CPU seconds of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rate(read: Callable[[int], object], ids: np.ndarray, seconds: float) -> float:
    """Reads a CPU second by `read`, the best of three turns."""
    read(0)
    best = 0.0
    for _ in range(3):
        began, done = cpu(), 0
        while cpu() - began < seconds:
            for place in ids[done % len(ids) : done % len(ids) + 200].tolist():
                read(place)
            done += 200
        best = max(best, done / (cpu() - began))
    return best


def indexing(folder: Path, rows: int, endings: list[str]) -> dict[str, dict[str, float]]:
    """CPU seconds to index each format, and bytes a row."""
    result = {}
    for ending in endings:
        options = RowOptions(None, "uint16" if ending == ".bin" else None, 0 if ending == ".bin" else None)
        shards = find(made(folder, ending, rows), options)
        began = cpu()
        index = scan(shards, skip_damaged=False, report=lambda words: None)
        took = cpu() - began
        size = index.blocks.nbytes + index.places.nbytes
        result[ending] = {"rows": rows, "cpu_seconds": round(took, 2), "bytes_per_row": round(size / rows, 2)}
        print(json.dumps({ending: result[ending]}), flush=True)
    return result


def random_rows(folder: Path, rows: int, seconds: float) -> dict[str, float]:
    """Rows a CPU second in a random order, beside `datasets` on the same mapped Arrow files."""
    import datasets

    ids = permute(np.arange(min(rows, 200_000)), key=1, length=rows)
    arrow = made(folder, ".arrow", rows)
    files = [str(file) for file in sorted(arrow.glob("*.arrow"))]
    theirs = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
    result = {"datasets, mapped": rate(theirs.__getitem__, ids, seconds)}
    for ending in (".arrow", ".jsonl", ".parquet", ".jsonl.zst", ".bin"):
        options = {"dtype": "uint16", "end": 0} if ending == ".bin" else {}
        corpus = Corpus(made(folder, ending, rows), **options)
        order = corpus.epoch_order()
        chosen = ids if order is None else order.order(0, 0, 0, len(ids), 1)
        result[f"Corpus {ending}"] = rate(corpus.__getitem__, chosen, seconds)
    return result


def windows(folder: Path, rows: int, seconds: float, length: int = 1024) -> dict[str, float]:
    """Windows a CPU second, beside the class `Tokens` of docs/data-formats.md on one memmap."""
    place = made(folder, ".bin", rows)
    one = place.parent / f"one{rows}.bin"
    if not one.exists():
        one.write_bytes(b"".join(file.read_bytes() for file in sorted(place.glob("*.bin"))))
    tokens = np.memmap(one, "<u2", mode="r")

    def plain(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        window = torch.from_numpy(tokens[index * length : index * length + length + 1].astype(np.int64))
        return window[:-1], window[1:]

    ours = Windows(Corpus(one, dtype="uint16"), length)
    shards = Windows(Corpus(place, dtype="uint16"), length)
    count = min(len(ours), len(shards))
    ids = permute(np.arange(count), key=1, length=count)
    result: dict[str, float] = {}
    for _ in range(3):  # by turns, since the machine is shared
        for name, read in (("memmap", plain), ("Windows", ours.__getitem__), ("Windows, 8 shards", shards.__getitem__)):
            result[name] = max(result.get(name, 0.0), rate(read, ids, seconds / 3))
    return result


def main() -> None:
    """Prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--only", default="index,rows,tokens")
    parser.add_argument("--endings", default=".parquet,.arrow,.jsonl,.jsonl.gz,.jsonl.zst,.bin,.tar")
    asked = parser.parse_args()
    if "index" in asked.only:
        indexing(asked.folder, asked.rows, asked.endings.split(","))
    if "rows" in asked.only:
        print(json.dumps(random_rows(asked.folder, asked.rows // 10, asked.seconds)))
    if "tokens" in asked.only:
        print(json.dumps(windows(asked.folder, asked.rows // 10, asked.seconds)))


if __name__ == "__main__":
    main()
