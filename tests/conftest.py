"""Fixtures that all tests share."""

from __future__ import annotations

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
