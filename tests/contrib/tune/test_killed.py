"""The kill drill: coordinator and trials killed, again and again; the study is the undisturbed one."""

from pathlib import Path

import pytest

from tests.faults.study_life import Drill, compared


@pytest.mark.parametrize(("halving", "trials", "parallel"), [(None, 3, 2), (2, 4, 1)])
def test_a_study_survives_kills(halving: int | None, trials: int, parallel: int, tmp_path: Path) -> None:
    drill = Drill(kills=3, trials=trials, parallel=parallel, halving=halving)
    assert compared(drill, tmp_path).kills > 0
