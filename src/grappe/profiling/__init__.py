"""Measures time, memory and energy."""
