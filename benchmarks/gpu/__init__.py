"""Tests of grappe's promises on a GPU: `python -m benchmarks.gpu --help`."""
