"""The test cluster itself: it starts on other ports where another program was first at one of its own."""

import shutil
import socket
import tempfile
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing


@pytest.mark.skipif(bool(missing()), reason="this machine lacks Slurm (.ci/run installs it)")
def test_a_port_that_is_taken() -> None:
    folder = Path(tempfile.mkdtemp(prefix="gsl-", dir="/tmp"))
    made = Cluster(folder / "c")
    with socket.socket() as other:
        other.bind(("0.0.0.0", made._ports["n1"]))
        other.listen()
        try:
            made.up()
            assert made._ports["n1"] != other.getsockname()[1]
            assert made.run("sinfo", "-h", "-p", "gpu", "-o", "%T").split() == ["idle"]
        finally:
            made.down()
            shutil.rmtree(folder, ignore_errors=True)
