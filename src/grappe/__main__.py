"""Runs the command line: `python -m grappe`, which torchrun starts."""

from __future__ import annotations

from grappe.cli.commands import main

main()
