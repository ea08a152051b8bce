"""Runs one training: workers, the run's folder, watchers (callbacks), the watchdog, the step of a script or a Loop."""
