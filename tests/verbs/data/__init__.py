"""Tests of grappe data."""
