"""Makes an exported folder, which appears complete or not at all, with manifest.json, SHA256SUMS and README.md."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import mmap
import secrets
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from grappe.errors import UsageError
from grappe.launch import files
from grappe.plan import Rounding

Format = Literal["program", "safetensors", "transformers", "onnx"]
MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
README = "README.md"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """The form of an export; needs no torch.

    `grappe export` has an option for each field, with the docstring under the field as its help.
    """

    format: Format = "program"
    """A C++ program with the compiled model; the weights alone with the task's fields; a folder for from_pretrained of
    transformers; or ONNX (needs grappe[onnx])."""
    weights: Rounding = "fp32"
    """Form of matrices in a program or ONNX: int8 takes a quarter of the bytes. It computes in float32; the scores of
    the rounded weights are measured and shown."""
    no_build: bool = False
    """Prove the compiled model in Python only; do not build the C++ program."""
    operators: tuple[Path, ...] = ()
    """A C++ file that registers operators of the model's own; once for each file."""
    trained: bool = False
    """Take the trained weights, where the run keeps a moving average of them (ema)."""

    def __post_init__(self) -> None:
        if self.operators and self.format != "program":
            raise UsageError(f"--operators: --format {self.format} compiles nothing: leave the option out")
        if self.weights != "fp32" and self.format not in ("program", "onnx"):
            raise UsageError(
                f"--weights {self.weights}: --format {self.format} writes the weights as they are: take --format "
                "program or onnx"
            )


def check_target(folder: Path) -> None:
    """Raises UsageError where `folder` cannot become an exported folder: only what is new or empty can."""
    kind = files.kind(folder)
    if kind not in ("", "folder") or (kind and files.names(folder)):
        what = "holds something" if kind == "folder" else "is not a folder"
        raise UsageError(f"--out {folder}: it {what}, and grappe overwrites nothing: give a new folder")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"--out {folder}: there is no folder {folder.absolute().parent}")


@contextlib.contextmanager
def complete_or_nothing(folder: Path) -> Iterator[Path]:
    """Yields a new folder next to `folder`, renamed to it at the end, and removed if anything fails.

    Raises:
        UsageError: `folder` is there already, and is not an empty folder.
    """
    check_target(folder)
    target = folder.absolute()
    staged = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    files.make_folder(staged)
    try:
        yield staged
        try:
            files.rename(staged, target)  # replaces an empty folder, and no other
        except OSError as error:
            raise UsageError(f"--out {folder}: {error.strerror}: give a new folder") from error
        files.flush(target.parent)
    finally:
        files.remove_tree(staged)


def sha256(file: Path) -> str:
    """Hashes a file; no link is followed."""
    with files.reader(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def crc32(file: Path) -> int:
    """Computes a file's CRC-32, by which the C++ program recognises its package."""
    with files.reader(file) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return zlib.crc32(content)


def write_manifest(folder: Path, written: Iterable[str], facts: Mapping[str, Any], readme: str) -> None:
    """Writes the README, the manifest with the hash of each written file, and SHA256SUMS, for `sha256sum --check`."""
    files.replace(folder / README, readme.encode(), durable=True)
    names = sorted({*written, README})
    hashes = {name: sha256(folder / name) for name in names}
    text = json.dumps({**facts, "files": hashes}, indent=1) + "\n"
    files.replace(folder / MANIFEST, text.encode(), durable=True)
    hashes[MANIFEST] = sha256(folder / MANIFEST)
    lines = "".join(f"{digest}  {name}\n" for name, digest in hashes.items())
    files.replace(folder / SUMS, lines.encode(), durable=True)


def shipped_text(name: str) -> str:
    """Reads a file of this package that goes into exported folders, or its template."""
    return resources.files(__package__ or __name__).joinpath(name).read_text(encoding="utf-8")


def readme_text(facts: Mapping[str, Any], place: str, words: Mapping[str, Any]) -> str:
    """Fills the template of a format's README.

    Args:
        facts: the manifest's.
        place: where the proof's computations ran.
        words: the format's own texts, by their names in the template.
    """
    from grappe.verbs.runs import score_words

    proof = facts["proof"]
    against = "the model with the rounded weights" if proof["scores"] else "`grappe predict`"
    rounded = "".join(
        f" The scores on {proof['split']} with weights in {rounding}: {score_words(scores)}."
        for rounding, scores in proof["scores"].items()
    )
    proven = (
        f"Proven before it was written: all {proof['samples']:,} samples of {proof['split']}, "
        f"{', '.join(map(str, proof['batch_sizes']))} at a time, {place}, against {against}; the largest "
        f"difference was {proof['largest_difference']:.1e} of a row.{rounded}"
    )
    return shipped_text(f"README.{facts['kind']}.in").format(
        title=f"{facts['class']}, {facts['checkpoint']}",
        inputs=_interface(facts.get("inputs", ())),
        outputs=_interface(facts.get("outputs", ())),
        proof=proven,
        **words,
    )


def _interface(tensors: Iterable[Mapping[str, Any]]) -> str:
    """Formats the tensors that a program takes or gives, as the manifest describes them."""
    return ", ".join(
        f"`{tensor['name']}`"
        + (f" {tensor['dtype']} {['N', *tensor['shape']]}".replace("'", "") if "shape" in tensor else "")
        for tensor in tensors
    )
