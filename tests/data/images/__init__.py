"""Tests of images in folders, archives and shards."""
