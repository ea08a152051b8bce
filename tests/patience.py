"""Time limits of tests that wait for an event."""

PATIENCE_SECONDS = 600.0
"""Only what hangs takes so long: forty other programs may use this machine's cores."""
