"""Predicts a training's memory from the plain model, traced once on fake tensors; the plan is composed in arithmetic."""
