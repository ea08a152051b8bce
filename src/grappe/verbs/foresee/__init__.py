"""grappe foresee: what plans need in memory, before any process of them starts."""
