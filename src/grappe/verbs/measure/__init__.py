"""grappe measure: speed, memory, energy and scaling of plans."""
