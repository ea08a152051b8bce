"""Predicts a training's memory: traces the plain model on fake tensors, and composes the plan in arithmetic."""
