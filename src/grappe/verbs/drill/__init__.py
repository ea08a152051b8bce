"""grappe drill: faults on purpose."""
