"""Tensors that look like all rows of a batch, of which each process has its own: rules for torch's operators."""
