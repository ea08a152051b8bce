"""Short runs: the limits of their processes."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow


def test_a_limit_of_the_users_own_is_kept() -> None:
    code = (
        "import resource\n"
        "from types import SimpleNamespace\n"
        "from grappe.training import short_run, worker\n"
        f"resource.setrlimit(resource.RLIMIT_DATA, ({1 << 30}, {1 << 30}))\n"
        "worker.worker = lambda *_: print(resource.getrlimit(resource.RLIMIT_DATA))\n"
        f"short_run.train(None, None, {1 << 34}, SimpleNamespace(rank=1), None)\n"
    )
    said = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert said.split() == [f"({1 << 30},", f"{1 << 30})"]
