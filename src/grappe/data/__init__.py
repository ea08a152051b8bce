"""Chooses each step's samples, the same for any number of processes, and loads them."""
