"""grappe submit, queue, wait, cancel: what a job needs, its script and packages, its place in the queue."""
