"""grappe drill: fault injection into a small training."""
