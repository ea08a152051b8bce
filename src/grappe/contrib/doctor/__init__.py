"""grappe doctor: checks of this machine and this allocation."""
