"""How long tests wait for what must happen."""

PATIENCE_SECONDS = 600.0
"""Only what hangs takes so long: forty other programs may use this machine's cores."""
