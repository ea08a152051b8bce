"""A plan's precision against the GPU's generation."""

from __future__ import annotations

import pytest

from grappe import sites
from grappe.sites.generations import unfit_precision


@pytest.mark.parametrize(
    ("precision", "capability", "remedy"),
    [
        ("bf16", (7, 0), "use precision=fp16, with loss scaling"),
        ("bf16", (6, 0), "use fp32"),
        ("tf32", (7, 5), "use precision=fp16"),
        ("fp16", (6, 0), "use fp32"),
        ("fp16", (7, 0), None),
        ("bf16", (8, 0), None),
        ("fp32", (6, 0), None),
        ("bf16", None, None),
    ],
)
def test_precision(precision: str, capability: tuple[int, int] | None, remedy: str | None) -> None:
    found = unfit_precision(precision, "GPU", capability)
    assert (found.do if found else None) == remedy


def test_every_site_with_gpus_of_nvidia_says_their_generation() -> None:
    for name in sites.files():
        site = sites.find(name)
        if site.node is not None and site.node.gpus:
            assert (site.node.capability is None) == (site.node.vendor == "amd"), name
