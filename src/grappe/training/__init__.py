"""Runs one training: the worker that each process runs, the run's folder, watchers (callbacks), the watchdog."""
