"""grappe verify: compares a plan's training with one plain process's, and finds the cause of a difference."""
