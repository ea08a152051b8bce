"""grappe predict: a run's predictions."""
