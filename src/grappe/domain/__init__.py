"""Domain parallelism: each process of a group holds a part of one dimension of every sample."""
