"""Judges a plan's precision by a GPU's generation: NVIDIA's compute capability, or AMD."""

from __future__ import annotations

from typing import NamedTuple

AMPERE, VOLTA = (8, 0), (7, 0)


class UnfitPrecision(NamedTuple):
    """A precision that a GPU has no units for."""

    what: str
    why: str
    do: str


def unfit_precision(precision: str, gpu: str, capability: tuple[int, int] | None) -> UnfitPrecision | None:
    """Returns why a precision brings nothing on a GPU, or costs time; None if it fits.

    Args:
        gpu: the GPU's name, for the message.
        capability: NVIDIA's compute capability; None: unknown, or AMD's.
    """
    if capability is None or precision == "fp32":
        return None
    name = f"precision={precision} on {gpu} (compute capability {capability[0]}.{capability[1]})"
    if precision == "bf16" and capability < AMPERE:
        slow = "bf16 arithmetic came with Ampere (8.0): here it is emulated, and slower than fp32"
        return UnfitPrecision(
            name, slow, "use precision=fp16, with loss scaling" if capability >= VOLTA else "use fp32"
        )
    if precision == "tf32" and capability < AMPERE:
        return UnfitPrecision(
            name, "TF32 came with Ampere (8.0): here matrix products stay in fp32", "use precision=fp16"
        )
    if precision == "fp16" and capability < VOLTA:
        return UnfitPrecision(
            name, "tensor cores came with Volta (7.0): fp16 saves memory and hardly any time", "use fp32"
        )
    return None
