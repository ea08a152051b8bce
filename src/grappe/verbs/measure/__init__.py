"""grappe measure: what plans cost and how they scale."""
