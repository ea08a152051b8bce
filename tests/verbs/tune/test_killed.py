"""The kill drill: coordinator and trials killed, again and again; the study is the undisturbed one."""

from pathlib import Path

import pytest

from tests.faults.study_life import Drill, compared


@pytest.mark.parametrize(("halving", "trials", "kills"), [(None, 3, 3), (2, 4, 3)])
def test_a_study_survives_kills(halving: int | None, trials: int, kills: int, tmp_path: Path) -> None:
    drill = Drill(kills=kills, trials=trials, parallel=2, halving=halving)
    assert compared(drill, tmp_path).kills > 0
