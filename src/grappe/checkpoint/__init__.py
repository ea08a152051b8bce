"""Writes and reads checkpoints, each committed whole in one rename."""
