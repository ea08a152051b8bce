"""Fixtures that all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from tests.processes import Pool

torch.set_num_threads(1)  # the same bits and no fights for two cores


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four processes, started when the first test asks for them."""
    made = Pool(4)
    yield made
    made.close()


@pytest.fixture(scope="session")
def operators() -> None:
    """DeepSpeed's operators, compiled before a pool is asked for what needs them: its calls may take two minutes."""
    pytest.importorskip("deepspeed")
    os.environ["DS_ACCELERATOR"] = "cpu"
    from grappe.engines.deepspeed import library

    for name in ("CPUAdamBuilder", "AsyncIOBuilder"):
        library.builds(name)
