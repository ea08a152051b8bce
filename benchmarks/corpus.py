"""Measures corpora: indexing beside the formats' own libraries, rows beside other loaders, windows beside a memmap.

python -m benchmarks.corpus FOLDER [--rows 10000000] [--only index,rows,tokens] prints JSON; the best of three turns.
Rows are texts of this project's own files. mosaicml-streaming and litdata are measured where they can be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import gzip
import io
import itertools
import json
import resource
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
import zstandard

from grappe.data import Corpus, Windows
from grappe.data.corpus.formats import RowOptions
from grappe.data.corpus.index import find, scan
from grappe.data.draw import permute

SHARDS = 8
MEAN = 100  # bytes of a row's text


def texts(ids: range) -> list[str]:
    """Cuts rows out of this project's own texts: they compress as text does."""
    project = Path(__file__).parents[1]
    files = [*sorted(project.glob("docs/**/*.md")), *sorted(project.glob("src/**/*.py"))]
    everything = " ".join(" ".join(file.read_text(errors="ignore").split()) for file in files)
    everything = everything.encode("ascii", "ignore").decode()
    places = np.random.default_rng(ids.start).integers(0, len(everything) - 2 * MEAN, (len(ids), 2))
    return [everything[start : start + MEAN // 2 + end % MEAN] for start, end in places.tolist()]


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
            table = pa.table({"id": ids, "text": texts(ids)})
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
                for number, text in zip(ids, texts(ids), strict=True):
                    member = tarfile.TarInfo(f"{number:09d}.txt")
                    member.size = len(text)
                    archive.addfile(member, io.BytesIO(text.encode()))
        else:
            pairs = zip(ids, texts(ids), strict=True)
            lines = "".join(json.dumps({"id": number, "text": text}) + "\n" for number, text in pairs).encode()
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


def own_scan(file: Path) -> int:
    """Counts a file's rows by the library that reads its format."""
    match "".join(file.suffixes):
        case ".parquet":
            return pq.ParquetFile(file).metadata.num_rows
        case ".arrow":
            return sum(batch.num_rows for batch in pa.ipc.open_stream(pa.memory_map(str(file))))
        case ".bin":
            return int((np.memmap(file, "<u2", mode="r") == 0).sum())
        case ".tar":
            with tarfile.open(file) as archive:
                return len(archive.getmembers())
        case ".jsonl":
            with file.open("rb") as lines:
                return sum(1 for _ in lines)
        case ".jsonl.gz":
            with gzip.open(file) as lines:
                return sum(1 for _ in lines)
        case _:
            with io.BufferedReader(zstandard.ZstdDecompressor().stream_reader(file.open("rb"))) as lines:
                return sum(1 for _ in lines)


def indexing(folder: Path, rows: int, endings: list[str]) -> dict[str, dict[str, float]]:
    """CPU seconds to index each format, and bytes a row."""
    result = {}
    for ending in endings:
        options = RowOptions(None, "uint16" if ending == ".bin" else None, 0 if ending == ".bin" else None)
        shards = find(made(folder, ending, rows), options)
        began = cpu()
        index = scan(shards, skip_damaged=False, report=lambda words: None)
        took = cpu() - began
        began, count = cpu(), sum(own_scan(shards.root / name) for name in shards.names)
        assert count == rows, f"{ending}: {count}"
        size = index.blocks.nbytes + index.places.nbytes
        result[ending] = {
            "rows": rows,
            "cpu_seconds": round(took, 2),
            "own_library": round(cpu() - began, 2),
            "bytes_per_row": round(size / rows, 2),
        }
        print(json.dumps({ending: result[ending]}), flush=True)
    return result


def endlessly(stream: Any) -> Callable[[int], object]:
    """Returns a function that gives the next row of a stream, whatever index it is asked for."""
    rows = (row for _ in itertools.count() for row in stream)
    return lambda _: next(rows)


def others(folder: Path, rows: Any) -> dict[str, Any]:
    """Writes the rows as mosaicml-streaming and litdata have them, where these are installed; opens them shuffled."""
    streams: dict[str, Any] = {}
    with contextlib.suppress(ImportError):
        from streaming import MDSWriter, StreamingDataset

        place = folder / "mosaic"
        if not place.exists():
            with MDSWriter(out=str(place), columns={"id": "int", "text": "str"}) as writer:
                for row in rows:
                    writer.write(row)
        streams["mosaicml-streaming, shuffled"] = StreamingDataset(local=str(place), shuffle=True, batch_size=1)
    with contextlib.suppress(ImportError):
        import litdata

        place = folder / "litdata"
        if not place.exists():
            litdata.optimize(rows.__getitem__, list(range(len(rows))), str(place), num_workers=1, chunk_bytes="64MB")
        streams["litdata, shuffled"] = litdata.StreamingDataset(str(place), shuffle=True)
    return streams


def random_rows(folder: Path, rows: int, seconds: float) -> dict[str, float]:
    """Rows a CPU second in a random order, beside `datasets` on the same mapped Arrow files."""
    import datasets

    ids = permute(np.arange(min(rows, 200_000)), key=1, length=rows)
    arrow = made(folder, ".arrow", rows)
    files = [str(file) for file in sorted(arrow.glob("*.arrow"))]
    theirs = datasets.concatenate_datasets([datasets.Dataset.from_file(file) for file in files])
    result = {"datasets, mapped": rate(theirs.__getitem__, ids, seconds)}
    streamed = datasets.load_dataset("arrow", data_files=files, split="train", streaming=True)
    shuffled = {"datasets, streaming, shuffled": streamed.shuffle(seed=0, buffer_size=1000), **others(folder, theirs)}
    for name, stream in shuffled.items():
        result[name] = rate(endlessly(stream), ids, seconds)
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
