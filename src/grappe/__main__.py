"""`python -m grappe`: what torchrun starts."""

from __future__ import annotations

from grappe.cli import main

main()
