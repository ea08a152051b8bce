"""grappe fetch: downloads the files that a task names."""
