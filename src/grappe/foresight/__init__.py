"""Predicts a training's memory and time: traces the plain model on fake tensors, and composes plans in arithmetic."""
