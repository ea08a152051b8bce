"""The loops that are compared: one file each, found by name, each with `run(seat, pacer)`."""
