"""Checkpoints: committed whole, or not there."""
