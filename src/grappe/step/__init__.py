"""Computes the parts of one optimizer step: losses, clipping, mixed precision, loss scaling, reductions."""
