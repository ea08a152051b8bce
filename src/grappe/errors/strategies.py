"""Says which plan a strategy of Lightning's is, for those who type its name where a plan is expected."""

from __future__ import annotations

HERE = {
    "auto": "leave it out: grappe starts the processes that the plan says",
    "ddp": "use replicate=2 (the number of processes), with engine=lightning for its Trainer",
    "ddp2": "it is gone from Lightning; use replicate=N",
    "ddp_spawn": "use replicate=N: grappe starts the processes",
    "ddp_fork": "use replicate=N: grappe starts the processes",
    "ddp_notebook": "use replicate=N: it works in notebooks, too",
    "ddp_find_unused_parameters_true": "use replicate=N: unused parameters are looked for where there are any",
    "ddp_find_unused_parameters_false": "use replicate=N: unused parameters are looked for where there are any",
    "ddp_sharded": "FairScale's optimizer sharding is shard=N,zero=1 here",
    "dp": "one process for all GPUs is slower and gone from Lightning; use replicate=N",
    "fairscale": "FairScale's sharding is shard=N here, with zero=1 to 3",
    "fsdp": "use shard=N (FSDP2; zero=1 to 3), with replicate=M beside it for hybrid sharding",
    "fsdp_cpu_offload": "use shard=N,offload=cpu",
    "fsdp_native": "use shard=N",
    "modelparallelstrategy": "use shard=N, tensor=M",
    "deepspeed": "use engine=deepspeed,shard=N,zero=2 (zero=3 by default)",
    "deepspeed_stage_1": "use engine=deepspeed,shard=N,zero=1",
    "deepspeed_stage_1_offload": "use engine=deepspeed,shard=N,zero=1,offload=cpu",
    "deepspeed_stage_2": "use engine=deepspeed,shard=N,zero=2",
    "deepspeed_stage_2_offload": "use engine=deepspeed,shard=N,zero=2,offload=cpu",
    "deepspeed_stage_3": "use engine=deepspeed,shard=N",
    "deepspeed_stage_3_offload": "use engine=deepspeed,shard=N,offload=cpu, or engine=lightning for its Trainer",
    "deepspeed_stage_3_offload_nvme": "use engine=deepspeed,shard=N,offload=nvme:FOLDER",
    "horovod": "it is gone from Lightning; use engine=horovod,replicate=N",
    "bagua": "it is gone from Lightning; use replicate=N",
    "colossalai": "it is gone from Lightning; use shard=N",
    "single_device": "leave it out: one process is the default",
}

FAMILIES = ("ddp_spawn", "ddp_fork", "ddp_notebook", "ddp", "fsdp", "deepspeed")
"""Beginnings of names with further words, as in ddp_find_unused_parameters_false."""


def here(part: str) -> str | None:
    """Returns what takes a strategy's place in a plan; None for what is no strategy's name.

    Args:
        part: a part of a plan's text: `ddp`, or `strategy=ddp`.
    """
    key, equals, value = part.strip().lower().partition("=")
    if equals and key != "strategy":
        return None
    name = value if equals else key
    family = next((prefix for prefix in FAMILIES if name.startswith(f"{prefix}_")), "")
    remedy = HERE.get(name, HERE.get(family))
    if remedy is None and equals:
        return "the plan says how a step is spread, as in replicate=2 or shard=2 (see: grappe engines)"
    return remedy
