"""Ablations: switch off possible causes of a difference, one at a time, to see whether the difference disappears."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from grappe import engines
from grappe.plan import Plan
from grappe.verbs.verify.compare import BOUND, FACTOR
from grappe.verbs.verify.instrument import Instrumentation
from grappe.verbs.verify.runner import TrialRunner
from grappe.verbs.verify.trained_by_hand import Reference

KEPT = frozenset(
    {
        "engine", "device", "backend", "replicate", "shard", "pipeline", "tensor",
        "per_device", "threads", "workers", "loading", "prefetch", "exact",
    }
)  # fmt: skip
"""Keys of a plan without which it would be another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ablation:
    """A possible cause that can be switched off."""

    word: str
    plan: Plan
    instrumentation: Callable[[], Instrumentation]
    buffers: bool = True
    """Whether buffers are compared."""


def ablations(
    runner: TrialRunner, plan: Plan, instrumentation: Instrumentation, reference: Reference
) -> list[str]:
    """Lists the ablations of a plan: changes that may make it learn what one plain process learns."""
    causes = []
    for ablation in _candidates(runner, plan, instrumentation, reference):
        less = ablation.instrumentation()
        base = runner.reference(ablation.plan, less)
        steps = runner.trial(ablation.plan, less, base)
        if runner.compare(base, steps, without=() if ablation.buffers else base.buffers).agrees:
            causes.append(ablation.word)
    return causes


def causes_of_drift(
    runner: TrialRunner, plan: Plan, instrumentation: Instrumentation, reference: Reference
) -> list[str]:
    """Names each thing without which one plain process no longer drifts when its samples change their places."""
    causes = []
    rows: tuple[str, dict[str, Any]] = (
        "a loss in which rows meet, or that depends on their places",
        {"loss_row_by_row": True},
    )
    switches: list[tuple[str, dict[str, Any]]] = [
        *([] if reference.whole_batch else [rows]),
        *(
            [("augmentation that draws outside grappe.draw", {"without_augmentation": True})]
            if reference.augments
            else []
        ),
        *([("clipping", {"without_clipping": True})] if reference.clips else []),
    ]
    for word, off in switches:
        steps = runner.reference(plan, dataclasses.replace(instrumentation, **off)).steps
        if FACTOR * max(max(step.loss_noise, step.norm_noise) for step in steps) <= BOUND:
            causes.append(f"{word}: without it the drift disappears")
    return causes


def _candidates(
    runner: TrialRunner, plan: Plan, instrumentation: Instrumentation, reference: Reference
) -> Iterator[Ablation]:
    def changed(**off: Any) -> Callable[[], Instrumentation]:
        return lambda: dataclasses.replace(instrumentation, **off)

    fewer = dataclasses.replace(plan, microbatches=1)
    # A pipeline's schedule needs as many as it has stages.
    if plan.microbatches > 1 and engines.supported(fewer):
        word = f"accumulation: with microbatches=1, and not {plan.microbatches}, the difference disappears"
        yield Ablation(word=word, plan=fewer, instrumentation=changed())
    if not reference.whole_batch:
        yield Ablation(
            word="a loss that averages: computed row by row, each row by itself, the difference disappears",
            plan=plan,
            instrumentation=changed(loss_row_by_row=True),
        )
    even = 2 * plan.data_parallel * plan.microbatches * max(1, plan.exact)
    yield Ablation(
        word="means of slices are averaged, whatever the slices' sizes: with equal slices the difference disappears",
        plan=plan,
        instrumentation=changed(batch_multiple=even),
    )
    yield Ablation(
        word="a dataset that draws random numbers outside the keyed generators: with samples that were loaded once "
        "the difference disappears",
        plan=plan,
        instrumentation=lambda: dataclasses.replace(
            instrumentation, loaded_samples=runner.samples(plan, instrumentation)
        ),
    )
    if reference.augments:
        word = (
            "augmentation that draws random numbers outside grappe.draw: without it the difference disappears"
        )
        yield Ablation(word=word, plan=plan, instrumentation=changed(without_augmentation=True))
    if reference.buffers:
        word = (
            f"a buffer that is not synchronised ({_some(reference)}): "
            "with constant buffers the difference disappears"
        )
        yield Ablation(word=word, plan=plan, instrumentation=changed(constant_buffers=True), buffers=False)
    yield Ablation(
        word="a lower precision than asked for: with the forward in float32 the difference disappears",
        plan=plan,
        instrumentation=changed(in_float32=True),
    )
    if reference.clips:
        yield Ablation(
            word="clipping: without it the difference disappears",
            plan=plan,
            instrumentation=changed(without_clipping=True),
        )
    yield from _keys(plan, instrumentation)


def _keys(plan: Plan, instrumentation: Instrumentation) -> Iterator[Ablation]:
    """Yields the plan with one of its other keys at the default, key by key."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Plan)}
    for key in sorted(plan.changed_keys() - KEPT - {"microbatches"}):
        word = f"{key}: with {key}={defaults[key]} the difference disappears"
        other = dataclasses.replace(plan, **{key: defaults[key]})
        if engines.supported(other):
            yield Ablation(word=word, plan=other, instrumentation=lambda: instrumentation)


def _some(reference: Reference) -> str:
    names = [name for name in reference.buffers if name.rpartition(".")[0] not in reference.coupled]
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
