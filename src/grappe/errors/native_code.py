"""Refuses packages of native code, which run when they are opened."""

from __future__ import annotations

from pathlib import Path

from grappe.errors import UsageError

PACKAGE = ".pt2"


def refuse_package(file: Path) -> None:
    """Raises UsageError where `file` is named as a package of torch.export or AOTInductor."""
    if file.suffix.lower() == PACKAGE:
        raise UsageError(
            f"{file}: grappe opens no {PACKAGE} file. It is native code (or a pickle), and opening it runs what is in "
            "it. Give the run that it was exported from, or weights alone: grappe export RUN --to FOLDER --format "
            "safetensors"
        )
