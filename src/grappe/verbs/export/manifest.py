"""Describes an export for those who receive it: manifest.json, SHA256SUMS and README.md."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from grappe.launch import files

MANIFEST = "manifest.json"
SUMS = "SHA256SUMS"
README = "README.md"
PART = 1 << 20  # bytes that are read at a time


def sha256(file: Path) -> str:
    """Hashes a file; no link is followed."""
    with files.reader(file) as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def crc32(file: Path) -> int:
    """Computes a file's CRC-32, by which the C++ program knows its package."""
    found = 0
    with files.reader(file) as stream:
        while part := stream.read(PART):
            found = zlib.crc32(part, found)
    return found


def write_manifest(folder: Path, written: Iterable[str], known: Mapping[str, Any], readme: str) -> None:
    """Writes the README, the manifest with the hash of each written file, and SHA256SUMS, for `sha256sum --check`."""
    files.replace(folder / README, readme.encode(), durable=True)
    names = sorted({*written, README})
    hashes = {name: sha256(folder / name) for name in names}
    text = json.dumps({**known, "files": hashes}, indent=1) + "\n"
    files.replace(folder / MANIFEST, text.encode(), durable=True)
    hashes[MANIFEST] = sha256(folder / MANIFEST)
    lines = "".join(f"{value}  {name}\n" for name, value in hashes.items())
    files.replace(folder / SUMS, lines.encode(), durable=True)


PROGRAM = """# {title}

A program in C++ from a trained model: no Python when it runs. It needs CMake 3.18, a compiler of C++17 and
LibTorch {torch}, which is in the torch wheel or in a module of your cluster.

```
cmake -S . -B build && cmake --build build
build/predict model.pt2 {tests}
```

The second prints what `test/expected.jsonl` has, to {tolerance:g} of each row. LibTorch is found in the torch wheel of
`python3`, if its environment is active; another one by `-DCMAKE_PREFIX_PATH=FOLDER`. On a cluster load the modules of
your torch first (gcc, cmake; and cuda where the wheel is for GPUs, as LibTorch's CMake files ask for it).

| file | what it is |
|---|---|
| `model.pt2` | {what}, compiled, with its weights, for {instructions} |
| `main.cpp` | the program, to read and to change |
| `npy.h`, `json.h`, `checksum.h` | read the samples, print the predictions, refuse a damaged package |
| `weights.h` | puts other weights into the package |
| `model.h` | what the model takes and gives |
{operators}| `CMakeLists.txt` | builds it; finds LibTorch by `CMAKE_PREFIX_PATH`, or in the wheel of `python3` |
| `test/` | samples, and the predictions that they should have |
| `manifest.json`, `SHA256SUMS` | its origin, its proof, each file's hash: `sha256sum --check SHA256SUMS` |

It takes, in this order: {inputs}. It gives: {outputs}.
`--batch N` computes N samples at a time; the predictions are the same. `--weights FILE` computes with other weights, as
`grappe export RUN --to NEW --weights-for THIS` writes them for a model that differs in nothing else.

{proof}

**`model.pt2` is native code.** Open it only if you trust who made it, and check the hashes first.
"""


OPERATORS = "| `operators/` | the operators {}, which LibTorch has not: compiled into the program |\n"


def program_readme(known: Mapping[str, Any], *, what: str, tests: str, tolerance: float) -> str:
    """Formats the README of an exported program."""
    return PROGRAM.format(
        title=f"{known['class']}, {known['checkpoint']}",
        torch=known["torch"].partition("+")[0],
        tests=tests,
        tolerance=tolerance,
        what=what,
        instructions=known["instruction_set"],
        operators=OPERATORS.format(", ".join(f"`{one}`" for one in known["operators"]))
        if known["operators"]
        else "",
        inputs=", ".join(field(one) for one in known["inputs"]),
        outputs=", ".join(f"`{one['name']}`" for one in known["outputs"]),
        proof=_proof(known["proof"]),
    )


def _proof(proof: Mapping[str, Any], built: str = "built from its folder alone") -> str:
    where = f"in Python and by the C++ program, {built}" if proof["cpp"] is True else "in Python"
    lacks = "" if proof["cpp"] is True else f" The C++ program was not built: {proof['cpp']}."
    return (
        f"Proven before it was written: all {proof['samples']:,} samples of {proof['split']}, "
        f"{', '.join(map(str, proof['batch_sizes']))} at a time, {where}, against `grappe predict`; the largest "
        f"difference was {proof['largest_difference']:.1e} of a row.{lacks}"
    )


def field(one: Mapping[str, Any]) -> str:
    """Describes an input: its name, NumPy's name of its numbers, its shape."""
    return f"`{one['name']}` {one['dtype']} {['N', *one['shape']]}".replace("'", "")


WEIGHTS = """# {title}

The weights of a trained model, without any code: `model.safetensors`, and `config.json` with the task's fields.

```python
from safetensors.torch import load_file

model.load_state_dict(load_file("model.safetensors"))
```

where `model` is what the task's `model()` makes with these fields.
`grappe train TASK --from model.safetensors` begins with them.
`manifest.json` and `SHA256SUMS` have the hash of each file: `sha256sum --check SHA256SUMS`.
"""


def weights_readme(known: Mapping[str, Any]) -> str:
    """Formats the README of exported weights."""
    return WEIGHTS.format(title=f"{known['class']}, {known['checkpoint']}")


REPLACEMENT = """# {title}

`weights.safetensors`: weights for an exported C++ program, which takes them without being compiled again. It is the
program whose `model.pt2` has the SHA-256 `{package}`.

```
PROGRAM/build/predict PROGRAM/model.pt2 {tests} --weights weights.safetensors
```

with PROGRAM for its folder, prints what `test/expected.jsonl` has. The program refuses weights of another model, and
a damaged file.

{proof}

`manifest.json` and `SHA256SUMS` have the hash of each file: `sha256sum --check SHA256SUMS`.
"""


def replacement_readme(known: Mapping[str, Any], *, tests: str) -> str:
    """Formats the README of weights for a program."""
    title = f"{known['class']}, {known['checkpoint']}"
    return REPLACEMENT.format(
        title=title, package=known["package"], tests=tests, proof=_proof(known["proof"], "built anew for it")
    )
