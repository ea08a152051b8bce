"""Tensors that look like all rows of a batch, of which each process holds its own: a rule for each operator of torch."""
