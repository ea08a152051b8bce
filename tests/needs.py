"""Skips a test where this machine lacks what its plan needs, and says how to get it."""

from __future__ import annotations

import importlib.util

import pytest

from tests import operators

DISK = "AsyncIOBuilder"  # DeepSpeed's operator that reads and writes disks


def need(plan: str) -> None:
    """Skips the test unless this machine has what a plan needs."""
    if "engine=horovod" in plan and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not built: make horovod")
    if "engine=deepspeed" in plan and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'grappe[deepspeed]'")
    if "offload=nvme" in plan and not operators.build([DISK])[DISK]:
        pytest.skip("DeepSpeed's disk needs libaio and a C++ compiler: apt-get install libaio-dev g++")
