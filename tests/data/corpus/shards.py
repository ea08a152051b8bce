"""Writes the same rows as shards of every format, for the tests of corpora."""

import gzip
import io
import json
import tarfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

ENDINGS = (".parquet", ".arrow", ".jsonl", ".jsonl.gz", ".jsonl.zst", ".tar", ".bin")
SEQUENTIAL = (".jsonl.gz", ".jsonl.zst")


def row(number: int) -> dict:
    """Makes row `number`: an identity, a text, and tokens."""
    return {"id": number, "text": f"text {number} " * (1 + number % 3), "tokens": [number % 50 + 1] * (number % 7 + 1)}


def _table(rows: list[dict]) -> pa.Table:
    return pa.Table.from_pylist(rows or [row(0)]).slice(0, len(rows))


def write(file: Path, numbers: range | list[dict]) -> None:
    """Writes rows, by their numbers or as they are, as one shard; in blocks of 10 rows where the format has such."""
    rows = [row(each) if isinstance(each, int) else each for each in numbers]
    lines = "".join(json.dumps(each) + "\n" for each in rows).encode()
    if file.name.endswith(".parquet"):
        pq.write_table(_table(rows), file, row_group_size=10)
    elif file.name.endswith(".arrow"):
        table = _table(rows)
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=10)
    elif file.name.endswith(".gz"):
        file.write_bytes(gzip.compress(lines))
    elif file.name.endswith(".zst"):
        file.write_bytes(zstandard.ZstdCompressor(write_checksum=True).compress(lines))
    elif file.name.endswith(".tar"):
        with tarfile.open(file, "w") as archive:
            for each in rows:
                for ending, content in (("id", str(each["id"])), ("txt", each["text"])):
                    member = tarfile.TarInfo(f"{each['id']:06d}.{ending}")
                    member.size = len(content)
                    archive.addfile(member, io.BytesIO(content.encode()))
    elif file.name.endswith(".bin"):
        np.array([token for each in rows for token in (*each["tokens"], 0)]).astype("<u2").tofile(file)
    else:
        file.write_bytes(lines)


def corpus_folder(folder: Path, ending: str, rows: int = 95, shards: int = 3) -> Path:
    """Writes `rows` rows as `shards` shards."""
    folder.mkdir(parents=True, exist_ok=True)
    cuts = [rows * shard // shards for shard in range(shards + 1)]
    for shard in range(shards):
        write(folder / f"part-{shard:03d}{ending}", range(cuts[shard], cuts[shard + 1]))
    return folder


def options(ending: str) -> dict:
    """Returns what a Corpus of this format needs."""
    return {"dtype": "uint16", "end": 0} if ending == ".bin" else {}


def identity(ending: str, content: object) -> int:
    """Returns the number of a row; of tokens what is known of it."""
    if ending == ".bin":
        return (len(content) - 1) * 100 + int(content[0])  # type: ignore[arg-type, index]
    return int(content["id"])  # type: ignore[index]


def expected(ending: str, number: int) -> int:
    """Returns what `identity` gives for row `number`."""
    return (number % 7 + 1) * 100 + number % 50 + 1 if ending == ".bin" else number
