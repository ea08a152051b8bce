"""Starts processes, locally or under torchrun and srun, and connects them: ranks, rendezvous, signals."""
