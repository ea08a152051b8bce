"""grappe data: indexes, checks and packs sources of images."""
