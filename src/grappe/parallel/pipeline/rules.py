"""Rules for pipelines of a plan: the requirements of each schedule, without importing torch."""

from __future__ import annotations

import dataclasses

from grappe.plan import Plan


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rule:
    """The requirements of a schedule."""

    torch_name: str
    """The schedule's class in torch.distributed.pipelining."""
    stages: tuple[int, int | None]
    """The lowest and the highest number of stages per process; None: any number."""
    rounds: bool
    """Whether microbatches go in rounds of one per process; their number must then be a multiple of the processes'."""
    splits_backward: bool = False
    """Whether gradients of inputs and of weights are computed separately."""


RULES = {
    "gpipe": Rule(torch_name="ScheduleGPipe", stages=(1, 1), rounds=False),
    "1f1b": Rule(torch_name="Schedule1F1B", stages=(1, 1), rounds=False),
    "interleaved": Rule(torch_name="ScheduleInterleaved1F1B", stages=(2, None), rounds=True),
    "zero_bubble": Rule(
        torch_name="ScheduleInterleavedZeroBubble", stages=(1, None), rounds=True, splits_backward=True
    ),
}


def stages_each(plan: Plan) -> int:
    """Returns the number of stages per process."""
    return plan.stages or RULES[plan.schedule].stages[0]


def unsupported_reason(plan: Plan) -> str | None:
    """Returns the reason why this pipeline is not possible; None if it is possible."""
    rule, each, request = RULES[plan.schedule], stages_each(plan), f"pipeline={plan.pipeline}"
    least, most = rule.stages
    if each < least:
        return f"schedule={plan.schedule} with stages={each}: it needs {least} stages a process, or more; or use 1f1b"
    if most is not None and each > most:
        return f"schedule={plan.schedule} with stages={each}: it has one stage a process; use schedule=interleaved"
    if plan.schedule == "1f1b" and plan.microbatches < plan.pipeline:
        return (
            f"{request},schedule=1f1b needs at least microbatches={plan.pipeline}, not {plan.microbatches}: of M "
            f"microbatches' time a share of (p-1)/(M+p-1) is idle, so try microbatches={4 * plan.pipeline}"
        )
    rounds = max(1, plan.microbatches // plan.pipeline)
    if rule.rounds and plan.microbatches % rounds:
        return (
            f"{request},schedule={plan.schedule} with microbatches={plan.microbatches}: they go in {rounds} "
            f"rounds, which must be alike; use microbatches={plan.microbatches - plan.microbatches % plan.pipeline}"
        )
    if not rule.splits_backward:
        return None
    name = f"schedule={plan.schedule}"
    if plan.compile:
        return f"{name} splits each backward in two, which compile cannot do: use schedule=1f1b or interleaved"
    if plan.recompute or plan.memory != "none":
        key = "recompute" if plan.recompute else "memory"
        return f"{name} would recompute each unit twice: use schedule=1f1b or interleaved, or leave {key} out"
    if plan.shard > 1 and plan.zero != 1:
        return (
            f"{name} keeps a stage's parameters and gradients whole during a step: "
            f"use zero=1, or schedule=1f1b or interleaved with zero={plan.zero}"
        )
    if plan.offload != "none":
        return f"{name} keeps a stage's parameters on the device: use schedule=1f1b with offload={plan.offload}"
    return None
