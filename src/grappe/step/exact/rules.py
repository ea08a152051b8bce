"""Rules for exact plans, checked before any process starts."""

from __future__ import annotations

from grappe.plan import Plan


def unsupported_reason(plan: Plan) -> str | None:
    """Returns the reason why another key of an exact plan excludes `exact`; None if no key does."""
    if plan.pipeline > 1:
        others = plan.data_parallel * plan.pipeline
        return (
            f"exact={plan.exact} with pipeline={plan.pipeline}: a stage adds up its microbatches one after another, "
            f"not in a tree: use shard={others} or replicate={others}, or leave exact out"
        )
    if plan.microbatches > 1:
        return (
            f"exact={plan.exact} cuts each batch into {plan.exact} pieces, which are its microbatches: "
            "leave microbatches out"
        )
    if plan.batchnorm == "sync":
        return f"exact={plan.exact} normalises each of its pieces by itself: leave batchnorm=sync out"
    if plan.compile:
        return "exact and compile: a compiled unit chooses its code by the shapes it has seen: leave compile out"
    if plan.tensor > 1 or plan.offload != "none":
        return f"exact={plan.exact} replicates or shards: leave tensor and offload out"
    if plan.shard > 1 and plan.replicate > 1:
        return (
            f"exact={plan.exact} with shard and replicate: replicas are summed in their own order: "
            f"use shard={plan.data_parallel}, or replicate={plan.data_parallel}"
        )
    if plan.shard > 1 and plan.channels_last:
        return "exact and channels_last: sharded parameters are not laid out so: leave channels_last or shard out"
    return None
