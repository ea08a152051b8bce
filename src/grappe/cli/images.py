"""Defines grappe data and its commands: index, check, pack, tokenize, stage, bench."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any

from cyclopts import App, Parameter

from grappe.cli.application import OUT_NAMES, DryRun, Json, app
from grappe.cli.exit import show, show_answer, show_json
from grappe.data.shards.selection import counts
from grappe.errors import UsageError
from grappe.launch.terminal import progress, say, waiting
from grappe.words import count_of, plain_table

Source = Annotated[
    Path,
    Parameter(help="Images: class folders, a .tar archive, tar shards. Or a corpus: .parquet, .arrow, .jsonl, .bin."),
]
Labels = Annotated[
    Path | None,
    Parameter(help="The file of an archive's labels, where its images are in no class: ImageNet's validation."),
]
Numbering = Annotated[Path | None, Parameter(help="The file with the class of each number in --labels.")]
Dtype = Annotated[str | None, Parameter(help="The type of the tokens in .bin files: uint16.")]
End = Annotated[int | None, Parameter(help="The token that ends a document in .bin files.")]
LOADING = "loading torch …"
_SHOWN = 20  # bad files that are listed; all are in the quarantine
_UNITS = ("B", "KB", "MB", "GB", "TB")


data = App(
    name="data",
    help="Index, check, pack, tokenize, stage and time images, and corpora of rows.",
    help_format="plaintext",
)
app.command(data)


@data.command
def index(
    source: Source,
    /,
    *,
    labels: Labels = None,
    numbering: Numbering = None,
    again: Annotated[bool, Parameter(help="Make it again, even if there is one.")] = False,
    dtype: Dtype = None,
    end: End = None,
    json: Json = False,
) -> None:
    """Read where the images or rows of a source are, once, so that a training starts at once."""
    waiting(LOADING)
    from grappe.verbs.data import walk

    if walk.is_corpus(source):
        _show_corpus("data-index", source, walk.index_corpus(source, dtype=dtype, end=end, again=again), json)
        return
    done = walk.index(source, labels=labels, numbering=numbering, again=again)
    progress("")
    facts = [("source", f"{source} ({done.kind})"), ("images", f"{done.images:,} of {done.classes:,} classes")]
    if done.left_out:
        facts.append(("left out", counts(done.left_out)))
    if done.quarantined:
        facts.append(("in quarantine", f"{done.quarantined:,}, left out"))
    facts += [("index", f"{done.file} ({_size(done.size)})"), ("took", f"{done.seconds:.1f} s")]
    content = dict(vars(done))
    show_answer(json, "data-index", facts, source=content.pop("kind"), **content)


def _show_corpus(kind: str, source: Path, done: dict[str, Any], json: bool) -> None:
    progress("")
    if not json:
        for reason in done["damaged"][:_SHOWN]:
            say(reason)
    read = (
        "row by row"
        if done["direct"]
        else f"in {count_of(done['blocks'], 'block')}, {_size(done['memory'])} in memory at most"
    )
    facts = [
        ("source", f"{source} ({done['format']}, {count_of(done['files'], 'file')})"),
        ("rows", f"{done['rows']:,}, read {read}"),
        ("index", f"{done['file']} ({_size(done['size'])}, {done['size'] / max(1, done['rows']):.1f} bytes a row)"),
        ("took", f"{done['seconds']:.1f} s"),
    ]
    if done["left_out"]:
        facts.insert(2, ("left out", counts(done["left_out"])))
    if kind == "data-check":
        left = ": leave them out with Corpus(…, skip_damaged=True)" if done["damaged"] else ""
        facts.insert(2, ("damaged", f"{len(done['damaged']):,}{left}"))
    show_answer(json, kind, facts, source=done.pop("format"), **done)


@data.command
def check(
    source: Source,
    /,
    *,
    labels: Labels = None,
    numbering: Numbering = None,
    dtype: Dtype = None,
    end: End = None,
    json: Json = False,
) -> None:
    """Read every image or row completely, and list those that cannot be read."""
    waiting(LOADING)
    from grappe.verbs.data import walk

    if walk.is_corpus(source):
        _show_corpus("data-check", source, walk.index_corpus(source, dtype=dtype, end=end, check=True), json)
        return
    done = walk.check(source, labels=labels, numbering=numbering)
    if not json:
        for name, reason in done.bad[:_SHOWN]:
            say(f"{name}: {reason}")
        if len(done.bad) > _SHOWN:
            say(f"… and {len(done.bad) - _SHOWN:,} more")
    facts = [("images", f"{done.images:,}"), ("bad", f"{len(done.bad):,}")]
    if done.left_out:
        facts.append(("left out", counts(done.left_out)))
    if done.turned:
        facts.append(("turned by EXIF", f"{done.turned:,}: datasets take the pixels as they are stored"))
    if done.quarantine is not None:
        facts.append(("quarantine", f"{done.quarantine}: datasets leave these out"))
    if not done.sees_all:
        pillow = "Pillow, which passes over some damage: pip install simplejpeg, or 'grappe[images]'"
        facts.append(("decoder", pillow))
    show_answer(json, "data-check", facts, **vars(done))


@data.command
def pack(
    source: Source,
    /,
    *,
    out: Annotated[Path, Parameter(name=OUT_NAMES, help="A folder for the shards: new, or not yet complete.")],
    short: Annotated[int, Parameter(help="Pixels of the short side; smaller pictures stay as they are.")] = 256,
    quality: Annotated[int, Parameter(help="Quality of the JPEG files: 1 to 100.")] = 90,
    per_shard: Annotated[int, Parameter(help="Images in each shard.")] = 4096,
    labels: Labels = None,
    numbering: Numbering = None,
    dry_run: Annotated[DryRun, Parameter(help="Show what would be written; write only the index.")] = False,
    json: Json = False,
) -> None:
    """Write smaller JPEG files into tar shards, which load several times as fast.

    Samples keep their numbers, so orders and runs stay what they are. Killed at any
    moment, it is continued by the same command.
    """
    waiting(LOADING)
    from grappe.verbs.data import pack as verb

    form = verb.Packing(short=short, quality=quality, per_shard=per_shard)
    done = verb.pack(source, out, form, labels=labels, numbering=numbering, dry_run=dry_run)
    there = f", {done.were_there:,} of them by an earlier start" if done.were_there else ""
    shards = count_of(math.ceil(done.images / per_shard), "shard")
    facts = [
        ("would be written" if dry_run else "written", f"{done.folder}: {shards}{there}"),
        ("images", f"{done.images:,}, short side at most {short}"),
        ("size", _size(done.source_bytes) if dry_run else f"{_size(done.bytes)} of {_size(done.source_bytes)}"),
    ]
    show_answer(json, "data-pack", facts, **vars(done), dry_run=dry_run)


@data.command
def tokenize(
    source: Annotated[Path, Parameter(help="A corpus of text: .parquet, .arrow, .jsonl, .jsonl.gz, .jsonl.zst.")],
    /,
    *,
    out: Annotated[Path, Parameter(name=OUT_NAMES, help="A folder for the tokens: new, or not yet complete.")],
    tokenizer: Annotated[Path, Parameter(help="A tokenizer.json, or a folder that has one.")],
    column: Annotated[str, Parameter(help="The column of the text.")] = "text",
    end: Annotated[
        int | None, Parameter(help="A token that ends each document; it is added where it is missing.")
    ] = None,
    json: Json = False,
) -> None:
    """Write the tokens of a corpus of text once, as Arrow files that trainings map.

    Killed at any moment, it is continued by the same command; several processes
    that run it at once share the work.
    """
    waiting(LOADING)
    from grappe.data.corpus import tokenizing as verb
    from grappe.data.corpus.corpus import Corpus
    from grappe.verbs.data.walk import ProgressMeter

    encode, name = verb.tokenizer_of(tokenizer)
    corpus = Corpus(source)
    meter = ProgressMeter("tokenizing", len(corpus), unit="rows")
    done = verb.tokenize(corpus, out, encode, column=column, end=end, name=name, report=meter.at)
    meter.end()
    there = f", {done.were_there:,} of them by another start or process" if done.were_there else ""
    facts = [
        ("written", f"{done.folder}: {count_of(done.parts, 'part')}{there}"),
        ("tokens", f"{done.tokens:,} of {done.rows:,} rows, now"),
    ]
    if own := encode([""])[0]:
        facts.append(("special tokens", f"{' '.join(map(str, own))} in each document, by the tokenizer's own template"))
    show_answer(json, "data-tokenize", facts, **vars(done))


@data.command
def stage(
    source: Annotated[Path, Parameter(help="A file or folder, of images or of anything else.")],
    /,
    *,
    out: Annotated[Path, Parameter(name=OUT_NAMES, help="A folder on a disk of the node, such as $SLURM_TMPDIR.")],
    dry_run: Annotated[DryRun, Parameter(help="Show what would be copied; copy nothing.")] = False,
    json: Json = False,
) -> None:
    """Copy data to a disk of the node, once for all processes that ask for it.

    Every copied file is read again and compared. Files that are there already stay:
    after a kill, the same command copies the rest.
    """
    from grappe.data.staging import copied, planned
    from grappe.verbs.data.walk import ProgressMeter

    meters: list[ProgressMeter] = []

    def report(done: int, total: int) -> None:
        if not meters:
            meters.append(ProgressMeter("copying", max(1, total), unit="bytes"))
        meters[0].at(done)

    done = planned(source, out) if dry_run else copied(source, out, report)
    for meter in meters:
        meter.end()
    files = f"{done.files:,} ({_size(done.bytes)}), {done.copied:,} {'to copy' if dry_run else 'copied now'}"
    facts = [("would be staged" if dry_run else "staged", done.place), ("files", files)]
    show_answer(json, "data-stage", facts, **vars(done), dry_run=dry_run)


@data.command
def bench(
    source: Source,
    /,
    *,
    size: Annotated[int, Parameter(help="Pixels of a sample's side.")] = 224,
    images: Annotated[int, Parameter(help="Images that are measured.")] = 512,
    seconds: Annotated[float, Parameter(help="For each of the measurements.")] = 1.0,
    on: Annotated[
        Path | None, Parameter(help="A folder for temporary copies. Default: the system's temporary folder.")
    ] = None,
    labels: Labels = None,
    numbering: Numbering = None,
    json: Json = False,
) -> None:
    """Time the reading of images, as they are, as an archive, as shards, packed and in memory, and recommend."""
    waiting(LOADING)
    from grappe.verbs.data.bench import bench as verb

    if images < 1 or seconds <= 0:
        raise UsageError("--images and --seconds must be above 0")
    done = verb(source, size=size, images=images, seconds=seconds, on=on, labels=labels, numbering=numbering)
    if json:
        show_json("data-bench", **vars(done))
        return
    table = plain_table(
        "images/s", "an image", "read, cold", "read", "workers=0", f"{done.cores} threads", f"{done.cores} processes"
    )
    for row in done.rows:
        rates = (row.cold, row.read, row.alone, row.threads, row.processes)
        table.add_row(row.place, _size(row.bytes), *("" if rate is None else f"{rate:,.0f}" for rate in rates))
    show(table)
    for sentence in done.advice:
        say(sentence)


def _size(count: int) -> str:
    value, unit = float(count), 0
    while value >= 1000 and unit < len(_UNITS) - 1:
        value, unit = value / 1000, unit + 1
    return f"{value:.0f} {_UNITS[unit]}" if unit == 0 else f"{value:.1f} {_UNITS[unit]}"
