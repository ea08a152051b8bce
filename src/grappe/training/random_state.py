"""Reads and sets the state of random generators, as tensors and as JSON in tensors, for checkpoints and replays."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from grappe.errors import TaskError


def random_state(generator: torch.Generator | None = None) -> dict[str, Tensor]:
    """Returns the state of torch's, Python's and NumPy's generators, and that of a loader's own, as tensors."""
    version, internal, gauss = random.getstate()
    numpys = np.random.get_state(legacy=False)
    state = {"torch": torch.get_rng_state(), "others": as_tensor([[version, list(internal), gauss], numpys])}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    if generator is not None:
        state["generator"] = generator.get_state()
    return state


def set_random_state(state: Mapping[str, Tensor], generator: torch.Generator | None = None) -> None:
    """Puts back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    (version, internal, gauss), numpys = from_tensor(state["others"])
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(numpys)
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
    if generator is not None:
        generator.set_state(state["generator"])


def state_of(generator: torch.Generator | np.random.Generator) -> Tensor:
    """Returns the state of a generator of the user's own.

    Raises:
        TaskError: it is of a kind whose state is not known.
    """
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    try:
        return as_tensor(generator.bit_generator.state)
    except TypeError as error:
        raise TaskError(f"it draws from a generator of NumPy's of another kind than {np.random.PCG64}") from error


def set_state_of(generator: torch.Generator | np.random.Generator, state: Tensor) -> None:
    """Puts back what `state_of` returned."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.bit_generator.state = from_tensor(state)


def as_tensor(value: Any) -> Tensor:
    """Returns JSON as bytes."""
    text = json.dumps(value, default=lambda array: {"array": array.tolist(), "type": array.dtype.str})
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def from_tensor(tensor: Tensor) -> Any:
    """Returns the value of `as_tensor`."""
    unpacked = lambda value: np.array(value["array"], value["type"]) if "array" in value else value  # noqa: E731
    return json.loads(bytes(tensor.tolist()), object_hook=unpacked)
