"""What grappe promises, tried on a GPU: `python -m benchmarks.gpu --help`."""
