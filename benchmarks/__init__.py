"""Benchmarks against what users would take instead, interleaved in one run. See README.md."""
