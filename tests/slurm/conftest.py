"""The test cluster, started once by each worker that has tests for it; without its packages they are skipped."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.slurm.cluster import Cluster, missing
from tests.slurm.shapes import shapes


def _cluster(**options) -> Iterator[Cluster]:
    if lacks := missing(options.get("accounting", False)):
        why = f"this machine lacks {', '.join(lacks)} (.ci/run installs them)"
        pytest.skip(why)
    folder = Path(tempfile.mkdtemp(prefix="gsl-", dir="/tmp"))  # short, as names of sockets must be
    made = Cluster(folder / "c", **options)
    try:
        made.up()
        with pytest.MonkeyPatch.context() as patch:
            for name, value in made.environment.items():
                patch.setenv(name, value)
            yield made
    finally:
        made.down()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="package")
def cluster() -> Iterator[Cluster]:
    """Two nodes that run jobs, and every site's shape, without accounting."""
    yield from _cluster(shapes=shapes())


@pytest.fixture(scope="module")
def accounted() -> Iterator[Cluster]:
    """Two nodes with a database of jobs, where users have one account."""
    yield from _cluster(accounting=True)
