"""The verbs: one file each, a Python function and what its processes do."""
