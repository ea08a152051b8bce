"""Runs the command line: `python -m grappe`, which torchrun starts."""

from __future__ import annotations

import sys
from pathlib import Path

# `python -m` puts the working folder first, whose files could pass for packages that grappe needs: a run that
# somebody sent may be the working folder. The command `grappe` does not have it either.
sys.path[:] = [entry for entry in sys.path if entry not in ("", str(Path.cwd()))]

from grappe.cli.commands import main  # noqa: E402

main()
