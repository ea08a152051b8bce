"""Samples: checks that every step used the samples of the sample order, each once; describes an error in a sentence."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from grappe.verbs.verify.reference import Reference
from grappe.verbs.verify.reference_batches import RecordedBatch
from grappe.verbs.verify.trial import TrialStep

SHOWN = 3


def used(step: TrialStep) -> list[int]:
    """Returns the ids of a step's samples, over all slices."""
    return [i for ids in step.slices for i in ids]


def recorded_batches(steps: Sequence[TrialStep]) -> tuple[RecordedBatch, ...]:
    """Returns the samples that a trial's steps used, on which one process can train."""
    return tuple(
        RecordedBatch(epoch=step.epoch, ids=tuple(used(step)), count=step.count, total=step.total)
        for step in steps
    )


def wrong_samples(reference: Reference, steps: Sequence[TrialStep]) -> str:
    """Describes the error in a trial's samples; "" if there is none."""
    for number, (plain, step) in enumerate(zip(reference.steps, steps, strict=False)):
        if Counter(plain.ids) != Counter(used(step)):
            return _words(reference, steps, number)
    return ""


def _words(reference: Reference, steps: Sequence[TrialStep], number: int) -> str:
    """Describes the error in the samples of step `number`."""
    plain, step = reference.steps[number], steps[number]
    wanted, found = Counter(plain.ids), Counter(used(step))
    missing, extra = wanted - found, found - wanted
    at = f"in step {number + 1}"
    if not set(wanted) & set(found) or step.epoch > number // reference.per_epoch:
        if (number + 1) % reference.per_epoch == 0:
            return f"a dropped last batch: {at}, the last of its epoch, none of its {len(plain.ids)} samples is seen"
        return f"another order: {at} none of its samples is seen"
    shift = _shift(reference, number, step)
    if shift:
        return f"a sampler that is off by {shift}: {at} it begins {'after' if shift > 0 else 'before'} its position"
    doubled = [one for one in extra if one in wanted]
    words = []
    if doubled:
        words.append(f"a doubled sample: {at} {_some(doubled)} more than once")
    foreign = [one for one in extra if one not in wanted]
    if foreign:
        words.append(f"samples of another step: {at} {_some(foreign)}")
    if missing:
        words.append(f"{'and ' if words else 'a skipped sample: ' + at + ' '}{_some(missing)} not at all")
    return ", ".join(words)


def _shift(reference: Reference, number: int, step: TrialStep) -> int:
    """Computes the positions by which the whole step, or each slice, is shifted in the order; 0: another error."""
    epoch = number // reference.per_epoch
    order = [
        i
        for one in reference.steps[epoch * reference.per_epoch : (epoch + 1) * reference.per_epoch]
        for i in one.ids
    ]
    place = {one: index for index, one in enumerate(order)}
    begins = (number % reference.per_epoch) * len(reference.steps[0].ids)
    shifts = {place[one] - begins - row for row, one in enumerate(used(step)) if one in place}
    return shifts.pop() if len(shifts) == 1 else 0


def _some(ids: Sequence[int] | Counter[int]) -> str:
    shown = [str(one) for one in list(ids)[:SHOWN]]
    more = f" and {len(ids) - SHOWN} more" if len(ids) > SHOWN else ""
    return f"sample{'s' if len(ids) > 1 else ''} {', '.join(shown)}{more}"
