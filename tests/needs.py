"""Skips a test where this machine lacks what it needs, and says how to get it."""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

import pytest

from grappe.contrib.doctor.checks import cpp
from tests import operators

ADAM, DISK = operators.OPERATORS


def need(plan: str) -> None:
    """Skips the test unless this machine has what a plan needs."""
    if "engine=horovod" in plan and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not built: make horovod")
    if "engine=deepspeed" in plan and importlib.util.find_spec("deepspeed") is None:
        pytest.skip("DeepSpeed is not installed: pip install 'grappe[deepspeed]'")
    if "compile" in plan.split(","):
        compiler()
    if "engine=deepspeed" in plan and "offload=cpu" in plan and not operators.build([ADAM])[ADAM]:
        pytest.skip("DeepSpeed's optimizer on the CPU needs a C++ compiler: apt-get install g++ python3-dev")
    if "offload=nvme" in plan and not operators.build([DISK])[DISK]:
        pytest.skip("DeepSpeed's disk needs libaio and a C++ compiler: apt-get install libaio-dev g++")


def library(*names: str) -> None:
    """Skips the module unless libraries are installed, and imports none: each worker collects every module."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"there is no {name}: pip install {name}", allow_module_level=True)


def program(name: str) -> None:
    """Skips the test unless this machine has a program, which Debian's package of that name brings."""
    if shutil.which(name) is None:
        pytest.skip(f"there is no {name}: apt-get install {name}")


def compiler() -> None:
    """Skips the test unless this machine has a C++ compiler, with Python's headers."""
    if cpp.compiler_name(os.environ) is None:
        pytest.skip("there is no C++ compiler: apt-get install g++")
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        pytest.skip("there are no headers of Python: apt-get install python3-dev")
