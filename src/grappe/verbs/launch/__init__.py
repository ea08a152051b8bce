"""Runs people's own training scripts on the processes of a plan."""
