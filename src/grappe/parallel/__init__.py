"""Spreads a model over processes: replication (DDP), sharding (FSDP2), tensor and pipeline parallelism."""
