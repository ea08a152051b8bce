"""Writes a model for another runtime, ONNX or TorchScript, and runs what was written."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from grappe.errors import TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.private_api.torch_inductor import quiet
from grappe.verbs.export.manifest import sha256
from grappe.verbs.export.operators import custom_operators
from grappe.verbs.export.package import check_made

Exchange = Literal["onnx", "torchscript"]
FILES: dict[Exchange, str] = {"onnx": "model.onnx", "torchscript": "model.pt"}
RUNTIMES: dict[Exchange, str] = {"onnx": "in onnxruntime", "torchscript": "in TorchScript"}
PACKAGES = ("onnx", "onnxscript", "onnxruntime")
DEPRECATED = (
    "TorchScript is deprecated since torch 2.11, and may be gone from the next: --format program replaces it"
)
README = """# {title}

{what}

It takes, in this order: {inputs}. It gives: {outputs}. N is any number of samples.

{use}

Proven before it was written: all {samples:,} samples of {split}, {sizes} at a time, {where}, against `grappe predict`;
the largest difference was {largest:.1e} of a row. `test/` has samples, and the predictions that they should have.
`manifest.json` and `SHA256SUMS` have the hash of each file: `sha256sum --check SHA256SUMS`.
"""
USE: dict[Exchange, tuple[str, str]] = {
    "onnx": (
        "`model.onnx`: preprocessing, model and prediction, with the weights, for any runtime of ONNX.",
        """```python
import numpy, onnxruntime

session = onnxruntime.InferenceSession("model.onnx")
feed = {{{feed}}}
print(session.run(None, feed))
```""",
    ),
    "torchscript": (
        f"`model.pt`: preprocessing, model and prediction, with the weights, in TorchScript. {DEPRECATED}.",
        """```cpp
torch::jit::Module model = torch::jit::load("model.pt");  // #include <torch/script.h>
auto predictions = model.forward({{{feed}}}).toTuple();
```

**Loading `model.pt` runs what is in it.** Load it only if you trust who made it, and check the hashes first.""",
    ),
}


def check_packages(kind: Exchange) -> None:
    """Raises UsageError where a package that the format needs is not installed."""
    missing = [name for name in PACKAGES if kind == "onnx" and importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(f"--format onnx needs {', '.join(missing)}: pip install 'grappe[onnx]'")


def versions(kind: Exchange) -> dict[str, str]:
    """Returns the versions of the packages that wrote and ran the file."""
    return {name: importlib.metadata.version(name) for name in PACKAGES} if kind == "onnx" else {}


def write(
    kind: Exchange,
    file: Path,
    program: nn.Module,
    traced: torch.export.ExportedProgram,
    example: list[Tensor],
    inputs: Sequence[str],
    outputs: Sequence[str],
) -> str:
    """Writes the program to `file`; returns the file's SHA-256.

    Args:
        traced: the trace by torch.export, which refuses what any trace would get wrong.
        example: a batch of its inputs.

    Raises:
        TaskError: the format cannot express the model.
    """
    if custom := custom_operators(traced):
        raise TaskError(
            f"--format {kind} has not the operators {', '.join(custom)}: --format program compiles them"
        )
    try:
        with quiet(), torch.no_grad():
            if kind == "onnx":
                names = {"input_names": list(inputs), "output_names": list(outputs)}
                made = torch.onnx.export(traced, tuple(example), **names, dynamo=True, verbose=False)
                assert made is not None
                made.save(str(file), external_data=False)
            else:
                script = torch.jit.trace(program, tuple(example), check_trace=False)
                torch.jit.save(script, str(file))
    except Exception as error:  # of the exporter, which has many kinds
        text = printable(" ".join(str(error).split()), 500)
        raise TaskError(
            f"--format {kind} cannot express the model: {type(error).__name__}: {text}. Take --format program"
        ) from error
    return sha256(file)


def opened(kind: Exchange, file: Path, made: str) -> Callable[..., tuple[Tensor, ...]]:
    """Opens the file that `write` has just written; returns what maps tensors [B, ...] to tensors [B, ...].

    Args:
        made: its SHA-256, as `write` returned it: opening TorchScript runs what is in it.
    """
    check_made(file, made)
    if kind == "torchscript":
        with quiet():
            return torch.jit.load(str(file)).eval()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
    names = [one.name for one in session.get_inputs()]

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        feed = {name: leaf.numpy() for name, leaf in zip(names, leaves, strict=True)}
        return tuple(torch.from_numpy(one) for one in session.run(None, feed))

    return run


def readme(kind: Exchange, about: dict[str, Any], inputs: str, outputs: str) -> str:
    """Formats the README of the folder."""
    proof, (what, use) = about["proof"], USE[kind]
    names = [one["name"] for one in about["inputs"]]
    loads = [f'"{name}": numpy.load("test/{name}.npy")' for name in names]
    feed = ", ".join(loads if kind == "onnx" else [name.replace("-", "_") for name in names])
    return README.format(
        title=f"{about['class']}, {about['checkpoint']}",
        what=what,
        use=use.format(feed=feed),
        inputs=inputs,
        outputs=outputs,
        samples=proof["samples"],
        split=proof["split"],
        sizes=", ".join(map(str, proof["batch_sizes"])),
        where=RUNTIMES[kind],
        largest=proof["largest_difference"],
    )
