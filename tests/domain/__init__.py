"""Tests of parts of samples."""
