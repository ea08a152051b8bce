"""Private names of torch, DeepSpeed, Lightning and torchmetrics that grappe uses: one file per library, and no other.

Each file lists its private names in USED; tests/private_api fails by name when a library no longer has one of them.
"""
