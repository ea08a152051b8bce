"""grappe data bench: a row for each place, nothing left behind, and advice that follows from the rates."""

from pathlib import Path

import pytest

from grappe.cli.commands import app
from grappe.data import CentreCrop, Images
from grappe.errors import DataError, UsageError
from grappe.verbs.data.bench import Row, advice, bench
from tests.data.images.pictures import archive, files

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return archive(tmp_path_factory.mktemp("bench") / "train.tar", files())


def test_every_place_is_measured_and_nothing_is_left(source: Path, tmp_path: Path) -> None:
    done = bench(source, size=16, images=20, seconds=0.01, on=tmp_path)
    named = ["as it is", "one archive", "shards", "packed, short side 256", "decoded, in memory"]
    assert [row.place for row in done.rows] == named
    for row in done.rows[:-1]:
        assert min(row.cold or 0, row.read or 0, row.alone or 0, row.threads or 0, row.processes or 0) > 0
        assert row.bytes > 0
    assert done.rows[-1].best > 0
    assert done.advice[0].startswith("as it is: ")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_said(source: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="--on"):
        bench(source, size=16, images=4, seconds=0.01, on=tmp_path / "nothing")
    with pytest.raises(UsageError, match="--images"):
        app(["data", "bench", str(source), "--images", "0"], exit_on_error=False, print_error=False)


def test_advice_follows_from_the_rates(source: Path) -> None:
    data = Images(source, CentreCrop(size=16))
    here = Row(place="as it is", bytes=100_000, cold=5.0, read=9e4, alone=300.0, threads=700.0, processes=500.0)
    packed = Row(place="packed", bytes=20_000, cold=5e4, read=9e4, alone=900.0, threads=2100.0, processes=1500.0)
    memory = Row(place="memory", bytes=768, alone=1e5)
    said = list(advice((here, packed, memory), data, 16))
    assert said[0].startswith("as it is: loading=threads is the quickest, 700 images/s")
    assert "grappe data stage" in said[1]
    assert said[2].startswith("packed, samples are made 3.0 times as fast, of 20% of the bytes: grappe data pack")
    assert "grappe.Arrays" in said[3]
    assert len(list(advice((packed, packed, packed), data, 16))) == 1
