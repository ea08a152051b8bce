"""A state folder of one's own for each test of corpora: indexes are kept in it."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def own_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
