"""Files as a script's processes see them, where contexts are left in another order than they were entered."""

# ruff: noqa: PTH102, PTH123  # these functions are what is tested

import builtins
import io
import os
from pathlib import Path

import pytest
import torch

from grappe.contrib.script.surroundings import writing_nothing
from grappe.training.interception import replaced


def test_what_waits_for_process_0_still_does_once_a_script_has_come_back_to_its_checkpoint(
    here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    functions = ((builtins, "open"), (io, "open"), (os, "mkdir"), (torch, "save"))
    for owner, name in functions:  # which the script's process would end with
        monkeypatch.setattr(owner, name, getattr(owner, name))

    def noting(plain):
        def noted(*arguments, **options):
            calls.append(arguments[0])
            return plain(*arguments, **options)

        return noted

    replay = writing_nothing()
    replay.__enter__()
    with replaced(*((owner, name, noting) for owner, name in functions)):
        with open("a", "w") as stream:
            stream.write("text")
        os.mkdir("folder")
        os.mkdir("folder")
        assert not Path("a").exists()
        replay.__exit__(None, None, None)
        calls.clear()
        with open("a", "w") as stream:
            stream.write("text")
        Path("a").read_text()
        with pytest.raises(FileExistsError):
            os.mkdir("folder")
        assert calls == ["a", Path("a"), "folder"]
    assert Path("a").read_text() == "text"
