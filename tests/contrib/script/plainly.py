"""Runs a script without grappe, in this process."""

import contextlib
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch


def as_it_is(script: str, folder: Path, *arguments: str) -> str:
    """Runs train.py in `folder`; returns what it prints."""
    threads = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        Path("train.py").write_text(script)
        patched.setattr(sys, "argv", ["train.py", *arguments])
        torch.set_num_threads(1)
        with contextlib.redirect_stdout(io.StringIO()) as lines:
            runpy.run_path("train.py", run_name="__main__")
        torch.set_num_threads(threads)
    return lines.getvalue()
