"""grappe tune: a search over a task's fields; the study is a folder of ordinary runs."""
