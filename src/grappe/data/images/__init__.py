"""Reads labelled images from folders, archives and shards, indexed once, and decodes crops of them."""
