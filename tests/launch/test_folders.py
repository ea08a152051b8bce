"""Folders of the user's own: nobody else writes in them, whatever the umask is."""

import os
from pathlib import Path

import pytest

from grappe.launch.files import own_folder, state_folder


def test_a_folder_above_one_of_the_users_own_is_as_well(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many systems let the group write: what the user's state lies in was then taken for somebody else's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = os.umask(0o002)
    try:
        assert own_folder(tmp_path / "state" / "grappe" / "images") is not None
        assert state_folder("tasks", make=True) == tmp_path / "state" / "grappe" / "tasks"
    finally:
        os.umask(before)
    assert (tmp_path / "state" / "grappe").stat().st_mode & 0o777 == 0o700
