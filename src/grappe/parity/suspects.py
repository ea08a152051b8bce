"""Suspects: what may make a plan differ; each is switched off, to see whether the difference goes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from grappe.parity.bench import Bench
from grappe.parity.changes import Changes
from grappe.parity.compare import compare
from grappe.parity.plain import Reference
from grappe.plan import Plan

KEPT = frozenset(
    {
        "engine", "device", "backend", "replicate", "shard", "pipeline", "tensor",
        "per_device", "threads", "workers", "exact",
    }
)  # fmt: skip
"""Keys of a plan without which it would be another."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Suspect:
    """One thing that can be switched off."""

    word: str
    plan: Plan
    changes: Callable[[], Changes]
    buffers: bool = True
    """Whether buffers are compared."""


def suspects(bench: Bench, plan: Plan, changes: Changes, known: Reference) -> list[str]:
    """Each thing without which the plan learns what one plain process learns, in words."""
    guilty = []
    for one in _line_up(bench, plan, changes, known):
        less = one.changes()
        base = bench.reference(one.plan, less)
        steps = bench.trial(one.plan, less, base)
        if compare(base, steps, without=() if one.buffers else base.buffers).agrees:
            guilty.append(one.word)
    return guilty


def _line_up(bench: Bench, plan: Plan, changes: Changes, known: Reference) -> Iterator[Suspect]:
    def changed(**off: Any) -> Callable[[], Changes]:
        return lambda: dataclasses.replace(changes, **off)

    if plan.microbatches > 1:
        word = f"accumulation: with microbatches=1, and not {plan.microbatches}, the difference goes"
        yield Suspect(word=word, plan=dataclasses.replace(plan, microbatches=1), changes=changed())
    yield Suspect(
        word="a loss that averages: computed row by row, each row by itself, the difference goes",
        plan=plan,
        changes=changed(loss=True),
    )
    even = 2 * plan.data_parallel * plan.microbatches * max(1, plan.exact)
    yield Suspect(
        word="means of slices are averaged, however large the slices are: with slices of one size the difference goes",
        plan=plan,
        changes=changed(even=even),
    )
    yield Suspect(
        word="a dataset that draws random numbers outside the keyed generators: with samples that were loaded once "
        "the difference goes",
        plan=plan,
        changes=lambda: dataclasses.replace(changes, samples=bench.samples(plan, changes)),
    )
    if known.augments:
        word = "augmentation that draws random numbers outside grappe.draw: without it the difference goes"
        yield Suspect(word=word, plan=plan, changes=changed(augment=True))
    if known.buffers:
        word = (
            f"a buffer that is not synchronised ({_some(known)}): with buffers held still the difference goes"
        )
        yield Suspect(word=word, plan=plan, changes=changed(buffers=True), buffers=False)
    yield Suspect(
        word="a lower precision than asked for: with the forward held in float32 the difference goes",
        plan=plan,
        changes=changed(precision=True),
    )
    if known.clips:
        yield Suspect(word="clipping: without it the difference goes", plan=plan, changes=changed(clip=True))
    yield from _keys(plan, changes)


def _keys(plan: Plan, changes: Changes) -> Iterator[Suspect]:
    """What else the plan asks for, one key at a time."""
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Plan)}
    for key in sorted(plan.asked() - KEPT - {"microbatches"}):
        word = f"{key}: with {key}={defaults[key]} the difference goes"
        yield Suspect(
            word=word, plan=dataclasses.replace(plan, **{key: defaults[key]}), changes=lambda: changes
        )


def _some(known: Reference) -> str:
    names = [name for name in known.buffers if name.rpartition(".")[0] not in known.mixing]
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")
