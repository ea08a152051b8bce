"""Tests of examples/extension: an operator in C++, built as its guide says."""
