"""Implements each command as a Python function: one file or folder for each."""
