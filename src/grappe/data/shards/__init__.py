"""Shards: files of many rows or images, read where they are: walks archives, keeps indexes."""
