"""Judge: whether a plan learns the same as one plain process, the same but for something it was asked for, or else."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

from grappe.parity.bench import Bench
from grappe.parity.changes import Changes
from grappe.parity.compare import Difference, compare
from grappe.parity.plain import Reference
from grappe.parity.samples import as_given, wrong_samples
from grappe.parity.suspects import suspects
from grappe.parity.trial import Step
from grappe.plan import Plan

Verdict = Literal["same", "same but for these", "different"]
STATISTICS, DROPOUT, PRECISION = "statistics", "dropout", "precision"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """What came of a plan."""

    plan: str
    processes: int
    verdict: Verdict
    difference: Difference
    """From one plain process, with nothing switched off."""
    causes: tuple[str, ...] = ()
    """What the difference goes away with, in words."""
    notes: tuple[str, ...] = ()

    @property
    def learns_the_same(self) -> bool:
        """Whether the plan learns nothing that its user did not ask for."""
        return self.verdict != "different"


def judge(bench: Bench, plan: Plan) -> Finding:
    """Tries a plan, and finds out by trying why it differs if it does."""
    return _Case(bench, plan).finding()


class _Case:
    """A plan under judgement."""

    def __init__(self, bench: Bench, plan: Plan) -> None:
        self._bench, self._plan = bench, plan
        self._base = bench.reference(plan, Changes())
        self._steps = bench.trial(plan, Changes(), self._base)
        self._difference = compare(self._base, self._steps)

    def finding(self) -> Finding:
        """The verdict, and what it rests on."""
        wrong = wrong_samples(self._base, self._steps)
        if wrong:
            return self._of_samples(wrong)
        if self._plan.exact:
            return self._of_exact()
        if self._difference.agrees:
            return self._told("same")
        return self._of_difference()

    def _told(self, verdict: Verdict, causes: Sequence[str] = (), notes: Sequence[str] = ()) -> Finding:
        return Finding(
            plan=str(self._plan),
            processes=self._plan.processes,
            verdict=verdict,
            difference=self._difference,
            causes=tuple(causes),
            notes=tuple(notes),
        )

    # ---- Samples ---------------------------------------------------------------------------------------

    def _of_samples(self, wrong: str) -> Finding:
        """Wrong samples: give them to one process, and see whether it learns as the plan does."""
        plan, changes = self._without(self._asked_for())
        base = self._bench.reference(plan, changes)
        steps = self._bench.trial(plan, changes, base)
        fed = self._bench.reference(plan, changes, given=as_given(steps))
        again = self._bench.trial(plan, changes, fed)
        if compare(fed, again, tolerance=base).agrees:
            return self._told(
                "different", [wrong], ["one process that is given the same samples learns the same"]
            )
        return self._told("different", [wrong, *suspects(self._bench, plan, changes, base)])

    # ---- Exact plans -----------------------------------------------------------------------------------

    def _of_exact(self) -> Finding:
        """An exact plan promises the bits of the same plan on one process; and that is to be right too."""
        alone = dataclasses.replace(self._plan, replicate=1, shard=1, zero=3)
        if alone != self._plan:
            steps = self._bench.trial(alone, Changes(), self._base)
            odd = next(
                (n for n, (a, b) in enumerate(zip(steps, self._steps, strict=True)) if a.bits != b.bits), None
            )
            if odd is not None:
                return self._told(
                    "different", [f"other bits than {alone} on one process, from step {odd + 1}"]
                )
        note = f"to the bit what exact={self._plan.exact} is on one process"
        if self._difference.agrees:
            return self._told("same", notes=[note])
        pieces = self._pieces(Changes(), precision=True)
        steps = self._bench.trial(self._plan, Changes(), pieces)
        if compare(pieces, steps).agrees:
            return self._told("same", notes=[note, self._per_piece()])
        return self._of_difference([note])

    def _per_piece(self) -> str:
        kinds = [*self._names_of_mixing(), *(["dropout"] if self._base.draws else [])]
        return f"{' and '.join(kinds) or 'the model'} of each piece by itself, on one process too"

    # ---- A difference ----------------------------------------------------------------------------------

    def _of_difference(self, notes: Sequence[str] = ()) -> Finding:
        """What was asked for is switched off; if the difference goes, the fewest such things that explain it."""
        asked_for = self._asked_for()
        if asked_for and self._agrees(asked_for):
            fewest = self._fewest(asked_for)
            faults = self._faults_of(fewest)
            if faults:
                return self._told("different", faults, notes)
            return self._told(
                "same but for these", [self._word(one) for one in fewest], [*notes, *self._second(fewest)]
            )
        plan, changes = self._without(asked_for)
        causes = suspects(self._bench, plan, changes, self._bench.reference(plan, changes))
        if not causes:
            where = self._difference
            tensor = f", first of all in {where.tensor}" if "weights" in where.what else ""
            causes = [f"not found: nothing that was switched off made it go{tensor}"]
        return self._told("different", causes, notes)

    def _asked_for(self) -> tuple[str, ...]:
        """What may make a plan differ from one plain process without any fault."""
        found = [PRECISION] if self._plan.precision != "fp32" else []
        found += [STATISTICS] if self._base.mixing else []
        return (*found, *([DROPOUT] if self._base.draws else []))

    def _without(self, off: Sequence[str]) -> tuple[Plan, Changes]:
        plan = dataclasses.replace(self._plan, precision="fp32") if PRECISION in off else self._plan
        found = self._base.mixing if STATISTICS in off else ()
        company = self._base.always if STATISTICS in off else ()
        kept = {one.name for one in company}
        return plan, Changes(
            draws=DROPOUT in off, mixing=tuple(name for name in found if name not in kept), company=company
        )

    def _agrees(self, off: Sequence[str]) -> bool:
        plan, changes = self._without(off)
        base = self._bench.reference(plan, changes)
        return compare(base, self._bench.trial(plan, changes, base)).agrees

    def _fewest(self, off: tuple[str, ...]) -> tuple[str, ...]:
        kept = off
        for one in off:
            fewer = tuple(other for other in kept if other != one)
            if fewer and self._agrees(fewer):
                kept = fewer
        return kept

    def _faults_of(self, explained: Sequence[str]) -> list[str]:
        """What is wrong with the things that explain a difference; nothing, where each is what the plan says."""
        faults = _stream_faults(self._steps, self._again()) if DROPOUT in explained else []
        if STATISTICS in explained and self._plan.batchnorm == "sync" and self._normal():
            faults.append(f"{self._names_of_mixing()[0]} with per-process statistics, though batchnorm=sync")
        elif STATISTICS in explained:
            plan, changes = self._without([one for one in self._asked_for() if one != STATISTICS])
            pieces = self._pieces(changes)
            gap = compare(pieces, self._bench.trial(plan, changes, pieces))
            if not gap.agrees:
                faults.append(
                    f"{' and '.join(self._names_of_mixing())}: neither that of the whole batch nor that of each "
                    f"process's slice (step {(gap.first or 0) + 1}, {gap.tensor})"
                )
        return faults

    def _again(self) -> tuple[Step, ...]:
        return self._bench.trial(self._plan, Changes(), self._base)

    def _pieces(self, changes: Changes, precision: bool = False) -> Reference:
        """The second reference: one process that takes the plan's own pieces one after the other."""
        plan = self._plan
        if plan.exact:
            return self._bench.reference(plan, changes, pieces=plan.exact, precision=precision)
        return self._bench.reference(
            plan, changes, ways=plan.data_parallel, pieces=plan.microbatches, precision=precision
        )

    def _second(self, explained: Sequence[str]) -> list[str]:
        """What the second reference says of the plan as it is."""
        if PRECISION in explained and self._plan.precision == "fp16":
            return []
        pieces = self._pieces(Changes(), precision=True)
        if compare(pieces, self._bench.trial(self._plan, Changes(), pieces)).agrees:
            return ["one process that takes the plan's pieces one after the other learns the same"]
        return []

    def _word(self, one: str) -> str:
        if one == PRECISION:
            return f"precision ({self._plan.precision})"
        if one == DROPOUT:
            return f"dropout's random streams ({', '.join(self._base.draws)})"
        return " and ".join(self._names_of_mixing())

    def _names_of_mixing(self) -> list[str]:
        """The modules that mix samples were found by trying; a word for them comes from their classes."""
        normal = self._normal()
        others = [
            f"{name or 'the model'} ({kind})"
            for name, kind in self._base.mixing.items()
            if name not in normal
        ]
        words = [f"batch normalisation ({', '.join(normal)})"] if normal else []
        return [*words, *([f"statistics of the batch in {', '.join(others)}"] if others else [])]

    def _normal(self) -> list[str]:
        return [name for name, kind in self._base.mixing.items() if "BatchNorm" in kind]


def _stream_faults(steps: Sequence[Step], again: Sequence[Step]) -> list[str]:
    """What is wrong with the random numbers of a trial: streams that are shared, repeated or irreproducible."""
    word = "dropout's random streams"
    for number, step in enumerate(steps):
        told = [one for one in step.draws if one]
        if len(set(told)) < len(told):
            return [f"{word}: in step {number + 1} several slices draw the same numbers"]
        if number and any(
            one and one == before for one, before in zip(step.draws, steps[number - 1].draws, strict=True)
        ):
            return [f"{word}: step {number + 1} draws the numbers of the step before it"]
    odd = next((n for n, (a, b) in enumerate(zip(steps, again, strict=False)) if a.draws != b.draws), None)
    if odd is not None:
        return [f"{word}: the same plan draws other numbers when it is started again (step {odd + 1})"]
    return []
