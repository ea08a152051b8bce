"""DeepSpeed's settings: the plan's and the task's take precedence over the user's own ds_config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from grappe.errors import PlanError, RunError, UsageError, nearest
from grappe.fields import with_variables
from grappe.launch import files
from grappe.plan import Plan
from grappe.task import Task

Settings = dict[str, Any]
NVME = "nvme:"
LEAST_NUMBERS = 1 << 20
"""Least numbers in a piece of the optimizer's state on disk, and in a bucket of gradients."""
BUFFERS = 5  # DeepSpeed's buffer_count, left as it is

# Settings that a user's file may add to the plan's: how DeepSpeed moves and reports data, which changes no weights.
FREE = {
    "": {
        "aio", "comms_logger", "flops_profiler", "wall_clock_breakdown", "memory_breakdown", "dump_state",
        "steps_per_print", "tensorboard", "wandb", "csv_monitor", "comet",
    },
    "zero_optimization": {
        "contiguous_gradients", "reduce_scatter", "reduce_bucket_size", "use_multi_rank_bucket_allreduce",
        "allgather_partitions", "allgather_bucket_size", "overlap_comm", "round_robin_gradients",
        "parameter_alignment", "sub_group_size", "stage3_max_live_parameters", "stage3_max_reuse_distance",
        "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
        "stage3_model_persistence_threshold", "stage3_module_granularity_threshold",
        "stage3_use_all_reduce_for_fetch_params", "stage3_allgather_sequential",
        "stage3_gather_16bit_weights_on_model_save", "memory_efficient_linear", "log_trace_cache_warnings",
        "ignore_unused_parameters",
    },
    "zero_optimization.offload_optimizer": {
        "pin_memory", "buffer_count", "fast_init", "pipeline_read", "pipeline_write",
    },
    "zero_optimization.offload_param": {"pin_memory", "buffer_count", "buffer_size", "max_in_cpu"},
}  # fmt: skip
OURS = {
    "optimizer": "the task's optimizer() sets it",
    "scheduler": "the task's schedule() sets it",
    "amp": "precision=fp16 or bf16 in the plan sets it, as autocast",
    "torch_autocast": "precision=fp16 or bf16 in the plan sets it, as autocast",
    "communication_data_type": "reductions are in fp32, in every precision",
    "data_types": "parameters and gradients are in fp32, in every precision",
    "gradient_predivide_factor": "gradients are divided once, by the global count",
    "prescale_gradients": "gradients are divided once, by the global count",
    "activation_checkpointing": "recompute in the plan sets it",
    "tensor_parallel": "tensor=N in the plan, with engine=native, sets it",
    "checkpoint": "checkpoints are grappe's own",
}


class Requirement(NamedTuple):
    """A setting's value according to plan and task."""

    value: Any
    where: str


def stage(plan: Plan) -> int:
    """Returns the ZeRO stage: 0 for replicas."""
    return plan.zero if plan.shard > 1 or plan.offload != "none" else 0


def offload_device(plan: Plan) -> str:
    """Returns the kind of offload: none, cpu or nvme."""
    return plan.offload.partition(":")[0]


def nvme_folder(plan: Plan) -> Path:
    """Returns the folder of offload=nvme:FOLDER, with variables expanded.

    Raises:
        PlanError: a variable in it is empty on this machine.
    """
    try:
        return Path(with_variables(plan.offload.removeprefix(NVME))).expanduser()
    except UsageError as error:
        raise PlanError(f"offload={plan.offload}: {error}") from None


def required_by(plan: Plan, task: Task | None) -> dict[str, Requirement]:
    """Maps a setting's path in a ds_config.json to its value according to the plan, and to the task if it is known."""
    device = offload_device(plan)
    replicas = f"replicate={plan.replicate}" if plan.replicate > 1 else "no shard"
    required = {
        "zero_optimization.stage": Requirement(stage(plan), f"zero={plan.zero}" if stage(plan) else replicas),
        "zero_optimization.offload_optimizer.device": Requirement(device, f"offload={plan.offload}"),
        "zero_optimization.offload_param.device": Requirement(
            device if stage(plan) == 3 else "none", f"offload={plan.offload}"
        ),
        "gradient_accumulation_steps": Requirement(plan.microbatches, f"microbatches={plan.microbatches}"),
        "bf16.enabled": Requirement(plan.precision == "bf16", f"precision={plan.precision}"),
        "fp16.enabled": Requirement(plan.precision == "fp16", f"precision={plan.precision}"),
    }
    if device == "nvme":
        folder = Requirement(str(nvme_folder(plan)), f"offload={plan.offload}")
        required["zero_optimization.offload_optimizer.nvme_path"] = folder
        required["zero_optimization.offload_param.nvme_path"] = folder
    if task is not None:
        pieces = plan.data_parallel * plan.microbatches
        each = -(-task.batch_size // pieces)
        required["train_batch_size"] = Requirement(task.batch_size, f"the task's batch_size={task.batch_size}")
        required["train_micro_batch_size_per_gpu"] = Requirement(
            each, f"the task's batch_size={task.batch_size} over {pieces} x {each}"
        )
        clip = "none" if task.clip is None else task.clip
        required["gradient_clipping"] = Requirement(task.clip or 0.0, f"the task's clip={clip}")
    return required


def read(plan: Plan) -> Settings:
    """Reads the user's own file; empty without one.

    Raises:
        PlanError: the file is missing, or is not a JSON object.
    """
    if plan.config == "none":
        return {}
    file = Path(plan.config).expanduser()
    try:
        config = json.loads(files.read_bytes(file.resolve(), levels=1).decode())
    except (OSError, RunError, UnicodeDecodeError) as error:
        raise PlanError(f"config={plan.config} cannot be read: {error}") from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"config={plan.config} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise PlanError(f"config={plan.config} holds no JSON object: write {{…}}, as DeepSpeed documents it")
    return config


def allowed(plan: Plan, task: Task | None) -> Settings:
    """Returns the settings of the user's file that DeepSpeed gets beyond the plan.

    Raises:
        PlanError: a setting contradicts the plan or the task, or is not allowed; the message names all of them.
    """
    problems: list[str] = []
    kept = _walk(read(plan), "", required_by(plan, task), task is None, problems)
    if problems:
        reasons = "; ".join(problems)
        raise PlanError(f"config={plan.config} does not fit: {reasons}. Remove it there, or change the other")
    return kept


def _walk(
    config: Mapping[str, Any], at: str, required: Mapping[str, Requirement], early: bool, problems: list[str]
) -> Settings:
    kept: Settings = {}
    for name, value in config.items():
        path = f"{at}.{name}" if at else name
        if value == "auto":  # in Transformers' files: the program that trains fills it in
            continue
        if path in required:
            if value != required[path].value:
                problems.append(f"{path} is {json.dumps(value)}, but {required[path].where}")
        elif name in FREE.get(at, ()):
            kept[name] = value
        elif isinstance(value, dict) and any(other.startswith(f"{path}.") for other in (*required, *FREE)):
            below = _walk(value, path, required, early, problems)
            kept |= {name: below} if below else {}
        elif not (early and path in _TASK_SAYS):
            problems.append(_refused(path, at, required))
    return kept


_TASK_SAYS = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_clipping")


def _refused(path: str, at: str, required: Mapping[str, Requirement]) -> str:
    if path in OURS:
        return f"{path}: {OURS[path]}"
    name = path.rpartition(".")[2]
    right = {*FREE.get(at, ()), *(p[len(at) + bool(at) :] for p in required if p.startswith(at))}
    there = {setting for setting in right if "." not in setting}
    return f"{path} is not a setting that keeps the training the same ({nearest(name, there)})"


def settings(plan: Plan, task: Task, numbers: int, largest: int, cuda: bool) -> Settings:
    """Returns all settings for `deepspeed.initialize`.

    Args:
        numbers: the model's number of parameters.
        largest: the number of elements of its largest parameter.

    Raises:
        PlanError: the user's file contradicts the plan or the task.
    """
    zero: Settings = {"stage": stage(plan), "overlap_comm": cuda and stage(plan) == 3}
    # DeepSpeed takes memory for its defaults, hundreds of millions of numbers, whatever the model's size.
    zero |= {"reduce_bucket_size": min(5 * 10**8, max(numbers, 1))}
    if stage(plan) == 3:
        zero |= {"stage3_prefetch_bucket_size": min(5 * 10**7, numbers)}
    zero |= _offload(plan, numbers, largest, cuda)
    base: Settings = {
        "train_micro_batch_size_per_gpu": 1,  # for its own reports alone
        "gradient_accumulation_steps": plan.microbatches,
        # Its default is 1 and not none. Without ZeRO it is done here.
        "gradient_clipping": (task.clip or 0.0) if stage(plan) else 0.0,
        "zero_optimization": zero,
        # Whether it may be used is known here: see check_elementwise.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    return _over(base, allowed(plan, task))


def _offload(plan: Plan, numbers: int, largest: int, cuda: bool) -> Settings:
    device = offload_device(plan)
    if device == "none":
        return {}
    optimizer: Settings = {"device": device, "pin_memory": cuda}
    parameters: Settings = {"device": device, "pin_memory": cuda}
    zero: Settings = {}
    if device == "nvme":
        share = -(-largest // plan.shard)
        optimizer["nvme_path"] = parameters["nvme_path"] = str(nvme_folder(plan))
        # Buffers for the largest parameter, and one sub-group in memory at a time.
        parameters |= {"buffer_size": max(share, 1024), "max_in_cpu": 0}
        zero["sub_group_size"] = max(share, LEAST_NUMBERS)
        # What is kept for a later use holds one of the few buffers; and what its prefetching finds twice in the
        # order of use, at the turn from forward to backward, it reads twice, and fails.
        zero["stage3_max_reuse_distance"] = 0
        zero["stage3_prefetch_bucket_size"] = 0
        zero["reduce_bucket_size"] = min(numbers, max(largest, LEAST_NUMBERS))
    zero["offload_optimizer"] = optimizer
    if stage(plan) == 3:
        zero["offload_param"] = parameters
    return zero


def _over(base: Settings, changes: Settings) -> Settings:
    """Merges the user's settings over `base`."""
    merged = dict(base)
    for name, value in changes.items():
        before = merged.get(name)
        merged[name] = _over(before, value) if isinstance(before, dict) and isinstance(value, dict) else value
    return merged
