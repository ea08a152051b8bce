"""grappe measure --proposal: the proof of scaling that a site asks for before it gives many nodes."""
