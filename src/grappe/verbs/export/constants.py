"""Weights of a compiled package: which of them can be replaced without compiling again, and by what."""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor
from torch.export.graph_signature import InputKind

from grappe.errors import TaskError
from grappe.launch import files
from grappe.verbs.export.samples import Samples

FILE = "weights.safetensors"
INSIDE = "model."
"""Begin of the names of the model's own tensors; what else a package holds are constants of its code."""
KINDS = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def graph_hash(traced: torch.export.ExportedProgram, samples: Samples) -> str:
    """Hashes all of a traced program but its tensors' values: programs of one hash differ in nothing else."""
    graphs = [one for one in traced.graph_module.modules() if isinstance(one, torch.fx.GraphModule)]
    tensors = sorted(
        (name, str(one.dtype), tuple(one.shape), one.stride()) for name, one in values(traced).items()
    )
    told = [
        torch.__version__,
        *(str(one.graph) for one in graphs),
        str(traced.graph_signature.input_specs),
        str(traced.graph_signature.output_specs),
        str(tensors),
        str(
            [(tuple(shape), str(dtype)) for shape, dtype in zip(samples.shapes, samples.dtypes, strict=True)]
        ),
    ]
    return hashlib.sha256("\n".join(told).encode()).hexdigest()


def values(traced: torch.export.ExportedProgram) -> dict[str, Tensor]:
    """Returns the tensors that a traced program computes with, by name; those that it never reads are left out."""
    read = {node.name for node in traced.graph.nodes if node.op == "placeholder" and node.users}
    every: dict[str, Any] = {**traced.state_dict, **traced.constants}
    specs = [one for one in traced.graph_signature.input_specs if one.kind in KINDS and one.arg.name in read]
    found = {str(one.target): every.get(str(one.target)) for one in specs}
    return {name: one.detach() for name, one in found.items() if isinstance(one, Tensor)}


def describe(
    traced: torch.export.ExportedProgram, samples: Samples, compiled: Iterable[str]
) -> dict[str, Any]:
    """Describes what of a package can be replaced.

    Args:
        compiled: the names of the tensors that the package keeps as such; others have become part of its code.

    Returns:
        graph: the hash of the program without its tensors' values.
        replaceable: names of the weights that other weights can take the place of.
        fixed: of each other tensor the hash of its values, which other weights must have too.
    """
    kept, found = set(compiled), values(traced)
    replaceable = sorted(name for name in found if name in kept and name.startswith(INSIDE))
    fixed = {name: _hash(one) for name, one in found.items() if name not in replaceable}
    return {"graph": graph_hash(traced, samples), "replaceable": replaceable, "fixed": fixed}


def matching(
    traced: torch.export.ExportedProgram, samples: Samples, known: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Returns the weights of a traced program by which those of a package can be replaced.

    Args:
        known: what `describe` said of the package.

    Raises:
        TaskError: the program differs from that of the package in more than its weights.
    """
    if graph_hash(traced, samples) != known["graph"]:
        raise TaskError(
            "--weights-for: the model computes something else than the program's, or takes other samples: another "
            "network, other fields or another torch. Export a program of its own, without --weights-for"
        )
    found = values(traced)
    changed = [name for name, value in known["fixed"].items() if _hash(found[name]) != value]
    if changed:
        raise TaskError(
            f"--weights-for: {', '.join(changed)} has become part of the program's code, and has other values in this "
            "run: export a program of its own, without --weights-for"
        )
    return {name: found[name] for name in known["replaceable"]}


def write_weights(file: Path, weights: Mapping[str, Tensor], graph: str) -> None:
    """Writes weights for the exported program, which knows them by the graph's hash and refuses damaged ones."""
    plain = {name: one.clone().contiguous() for name, one in weights.items()}
    content = save(plain)
    data = memoryview(content)[8 + int.from_bytes(content[:8], "little") :]
    known = {"graph": graph, "crc32": str(zlib.crc32(data))}
    del content, data  # memory for the second copy
    files.replace(file, save(plain, metadata=known), durable=True)


def _hash(value: Tensor) -> str:
    plain = value.contiguous()
    about = json.dumps([str(plain.dtype), list(plain.shape)]).encode()
    return hashlib.sha256(about + save({"": plain.clone()})).hexdigest()
