"""Fixtures that all tests share."""

from __future__ import annotations

import os
import subprocess
import sys
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

    compile_other = "from grappe.engines.deepspeed import library; library.builds('AsyncIOBuilder')"
    other = subprocess.Popen([sys.executable, "-c", compile_other], stdout=subprocess.DEVNULL)
    library.builds("CPUAdamBuilder")
    other.wait()
    library.builds("AsyncIOBuilder")
