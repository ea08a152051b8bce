"""Sums with the same bits on any number of processes: plan key exact."""
