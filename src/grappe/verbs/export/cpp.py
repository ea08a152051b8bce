"""Writes the C++ program of an export, builds it from its folder alone, and runs it."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from grappe.errors import UsageError
from grappe.errors.foreign_text import printable
from grappe.launch import command, files
from grappe.verbs.export.manifest import crc32
from grappe.verbs.export.package import compiler, instruction_set
from grappe.verbs.export.samples import TYPES, Samples

SOURCES = ("CMakeLists.txt", "main.cpp", "npy.h", "json.h", "checksum.h", "weights.h")
BUILD_SECONDS = 1800.0  # a busy machine; LibTorch's headers are large
RUN_SECONDS = 3600.0
SCALARS = {
    "f2": "Half", "f4": "Float", "f8": "Double", "u1": "Byte", "i1": "Char", "i2": "Short", "i4": "Int", "i8": "Long",
    "b1": "Bool",
}  # fmt: skip
MODEL_H = """// What model.pt2 takes and gives; written by grappe export, together with model.pt2.
#pragma once
#include <ATen/ATen.h>
#include <cstdint>
#include <string>
#include <vector>

struct Input {{
  std::string name;
  std::string type;  // NumPy's name of its numbers
  at::ScalarType dtype;
  std::vector<int64_t> shape;  // of one sample
  std::string shape_text;
  int64_t bytes;  // of one sample
}};

inline const std::vector<Input> kInputs = {{
{inputs}
}};
inline const std::vector<const char*> kOutputs = {{{outputs}}};
inline const std::string kInstructionSet = "{instructions}";
inline const std::string kGraph = "{graph}";  // of all but the weights: those of a model of the same hash fit
constexpr int kTorchMajor = {major}, kTorchMinor = {minor};
constexpr int64_t kPackageBytes = {bytes};
constexpr uint32_t kPackageCrc32 = {crc}u;
"""


def write_sources(
    package: Path, samples: Samples, inputs: Sequence[str], outputs: Sequence[str], *, graph: str
) -> list[str]:
    """Writes the sources beside the package; returns their names.

    Args:
        graph: the hash of the model without its weights' values.
    """
    folder = package.parent
    here = resources.files(__package__ or __name__)
    for name in SOURCES:
        files.replace(folder / name, here.joinpath(name).read_bytes(), durable=True)
    major, minor = torch.__version__.split(".")[:2]
    text = MODEL_H.format(
        inputs=",\n".join(_input(*one) for one in zip(inputs, samples.shapes, samples.dtypes, strict=True)),
        outputs=", ".join(f'"{name}"' for name in outputs),
        instructions=instruction_set(),
        graph=graph,
        major=major,
        minor=minor,
        bytes=package.stat().st_size,
        crc=crc32(package),
    )
    files.replace(folder / "model.h", text.encode(), durable=True)
    return [*SOURCES, "model.h"]


def _input(name: str, shape: torch.Size, dtype: torch.dtype) -> str:
    kind = TYPES[dtype]
    text = "".join(f", {length}" for length in shape)
    size = shape.numel() * dtype.itemsize
    numbers = ", ".join(map(str, shape))
    return f'    {{"{name}", "{kind}", at::k{SCALARS[kind]}, {{{numbers}}}, "{text}", {size}}}'


def cannot_build() -> str | None:
    """Returns why no C++ program can be built here; None if it can."""
    if shutil.which("cmake") is None:
        return "there is no cmake on the PATH"
    if compiler() is None:
        return "there is no C++ compiler on the PATH"
    return None


def build(folder: Path, into: Path) -> Path:
    """Builds the program of an exported folder, outside of the folder; returns the program.

    Raises:
        UsageError: it cannot be built; with the compiler's own words.
    """
    prefix = f"-DCMAKE_PREFIX_PATH={torch.utils.cmake_prefix_path}"
    try:
        command.run("cmake", "-S", str(folder), "-B", str(into), prefix, seconds=BUILD_SECONDS)
        command.run("cmake", "--build", str(into), seconds=BUILD_SECONDS)
    except command.Failed as error:
        raise UsageError(
            f"the exported program cannot be built here: {printable(str(error)[-1500:])}. With --no-build "
            "it is written without; its predictions are compared in Python then"
        ) from error
    return into / "predict"


def runner(
    program: Path, package: Path, names: Sequence[str], options: Sequence[str] = ()
) -> Callable[[list[Tensor], int], list[Tensor]]:
    """Returns what runs the built program on samples [N, ...], a batch size at a time, and reads its lines.

    Args:
        options: more words for the program.
    """

    def run(inputs: list[Tensor], size: int) -> list[Tensor]:
        with tempfile.TemporaryDirectory(prefix="grappe-samples-") as folder:
            files = write_samples(Path(folder), [str(number) for number in range(len(inputs))], inputs)
            environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
            words = (str(program), str(package), *files, "--batch", str(size), *options)
            text = command.run(*words, seconds=RUN_SECONDS, environment=environment)
        rows = [json.loads(line) for line in text.splitlines()]
        return [torch.from_numpy(np.array([row[name] for row in rows], np.float64)) for name in names]

    return run


def write_samples(folder: Path, names: Sequence[str], inputs: Sequence[Tensor]) -> list[str]:
    """Writes tensors to .npy files; returns the files."""
    arrays = [folder / f"{name}.npy" for name in names]
    for file, leaf in zip(arrays, inputs, strict=True):
        with files.new_file(file) as stream:
            np.save(stream, leaf.numpy(), allow_pickle=False)
    return [str(file) for file in arrays]
