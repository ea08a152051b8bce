"""Private names of DeepSpeed, which is imported only when a function needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grappe.private_api import private_names

if TYPE_CHECKING:
    from torch import Tensor, nn

SEEN = "0.19.8"
_STAGE3 = "deepspeed.runtime.zero.stage3.DeepSpeedZeroOptimizer_Stage3"

USED = private_names(
    SEEN,
    {
        "deepspeed.runtime.zero.parameter_offload.DeepSpeedZeRoOffload": "_register_deepspeed_module",
        _STAGE3: (
            "_get_fp32_opt_state_partition _optimizer_states_and_gradient_swap_in "
            "_optimizer_states_and_gradient_swap_out _swappable_optimizer_subgroup"
        ),
        "deepspeed.runtime.zero.stage_1_and_2.DeepSpeedZeroOptimizer": (
            "_hp_optimizer_states_linked _lazy_init_hp_params_optimizer_state"
        ),
        "deepspeed.utils.groups": "_DATA_PARALLEL_GROUP _WORLD_GROUP _ZERO_PARAM_INTRA_PARALLEL_GROUP",
    },
)


def forget_previous_trainings() -> None:
    """Resets DeepSpeed's counters and groups.

    Processes compare their numbers of modules and parameters, which must not depend on earlier trainings.
    """
    from deepspeed.comm import comm as module
    from deepspeed.runtime.zero import Init
    from deepspeed.runtime.zero.parameter_offload import DeepSpeedZeRoOffload
    from deepspeed.utils import groups

    module.cdb = None
    Init.param_id = 0
    for counter in DeepSpeedZeRoOffload._register_deepspeed_module.__defaults__ or ():
        counter[0] = 0
    groups._WORLD_GROUP = None
    groups._DATA_PARALLEL_GROUP = None
    groups._ZERO_PARAM_INTRA_PARALLEL_GROUP = None


def is_swapped(optimizer: Any, group: int) -> bool:
    """Returns whether ZeRO 3's optimizer keeps the state of its parameter group `group` on a disk."""
    return optimizer._swappable_optimizer_subgroup(group)


def swap_in(optimizer: Any, group: int) -> None:
    """Reads a group's state from the disk."""
    optimizer._optimizer_states_and_gradient_swap_in(group)


def swap_out(optimizer: Any, group: int) -> None:
    """Writes a group's state to the disk."""
    optimizer._optimizer_states_and_gradient_swap_out(group)


def state_partition(optimizer: Any, parameter: nn.Parameter, key: str | None) -> tuple[Tensor, int]:
    """Returns this process's part of a parameter's swapped-in state `key` (None: its weights), and its group."""
    return optimizer._get_fp32_opt_state_partition(parameter, release_swap_buffers=False, optim_state_key=key)


def link_states(optimizer: Any) -> None:
    """Links each parameter's state to the flat state of ZeRO 1 and 2 again, although DeepSpeed has linked it."""
    optimizer._hp_optimizer_states_linked = False
    optimizer._lazy_init_hp_params_optimizer_state()
