"""Sums with the same bits on any number of processes, for the plan key exact."""
