"""Custom operators of an exported model: which LibTorch lacks, and the C++ sources that the program compiles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from grappe.errors import UsageError
from grappe.launch import files

FOLDER = "operators"
SUFFIXES = (".cpp", ".cc", ".cxx")
LIBTORCH = frozenset({"aten", "prim", "prims", "higher_order", "mkldnn", "onednn", "quantized"})
"""Namespaces of the operators that LibTorch registers itself."""


def custom_operators(program: torch.export.ExportedProgram) -> tuple[str, ...]:
    """Lists the operators of a traced program that LibTorch does not have, as `namespace::name`."""
    graphs = [one for one in program.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    targets = [node.target for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    names = {one.name() for one in targets if getattr(one, "namespace", "aten") not in LIBTORCH}  # type: ignore[union-attr]
    return tuple(sorted(name.partition(".")[0] for name in names))


def check_sources(sources: Sequence[Path], names: Sequence[str]) -> None:
    """Raises UsageError unless `sources` are C++ files, given if and only if the model uses the operators `names`."""
    if names and not sources:
        raise UsageError(
            f"the model uses operators that LibTorch has not: {', '.join(names)}. Give the C++ source that registers "
            "them, which the program compiles: --operators FILE.cpp (one that is written in Python cannot leave it); "
            "or take the weights alone: --format safetensors"
        )
    if sources and not names:
        raise UsageError("--operators: the model uses no operator but LibTorch's own: leave the option out")
    for file in sources:
        if file.suffix not in SUFFIXES or not file.is_file():
            raise UsageError(f"--operators {file}: give a file of C++ ({', '.join(SUFFIXES)}) that is there")
    if len({file.name for file in sources}) < len(sources):
        raise UsageError("--operators: two files have one name: rename one")


def write_sources(folder: Path, sources: Sequence[Path]) -> list[str]:
    """Copies the sources into an exported folder; returns their names relative to it."""
    if not sources:
        return []
    files.make_folder(folder / FOLDER)
    for file in sources:
        files.replace(folder / FOLDER / file.name, file.read_bytes(), durable=True)
    return [f"{FOLDER}/{file.name}" for file in sources]
