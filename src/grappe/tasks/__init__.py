"""Shipped tasks, one a file: to add a task, add a file."""
