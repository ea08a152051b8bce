"""engine=horovod."""
