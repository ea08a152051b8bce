"""grappe verify: decides whether plans learn what one plain process learns; else finds the causes by ablation."""

from __future__ import annotations

import dataclasses
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from grappe import engines
from grappe.errors import GrappeError, UsageError
from grappe.launch.rank import rank_from_environment
from grappe.launch.start import start
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.table import Table, Tabular
from grappe.task import Task
from grappe.training.memory_choice import memory_chosen
from grappe.training.request import data_folder
from grappe.training.short_run import StartProcesses
from grappe.training.task_reference import TaskReference
from grappe.verbs.verify.instrument import Instrumentation
from grappe.verbs.verify.runner import BOUND, FACTOR, Difference, TrialRunner, compare
from grappe.verbs.verify.trained_by_hand import LOSS, NORM, Reference, TrialStep
from grappe.words import and_more, plan_name

VerdictWord = Literal["same", "same but for these", "different", "cannot be judged", "failed"]
SHOWN = 3
STEPS = 8  # two epochs of a trial; longer trainings of correct code drift apart
STATISTICS, DROPOUT, PRECISION = "statistics", "dropout", "precision"
PIECES = "one process that takes the plan's pieces one after the other learns the same"
KEPT = frozenset(
    {
        "engine", "device", "backend", "replicate", "shard", "pipeline", "domain", "cut", "tensor",
        "per_device", "threads", "workers", "loading", "prefetch", "exact",
    }
)  # fmt: skip
"""Keys of a plan without which it would be another."""


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class PlanVerdict:
    """The verdict on a plan."""

    plan: str
    processes: int
    verdict: VerdictWord
    difference: Difference | None
    """The difference from one plain process, with nothing switched off; None where the plan did not train."""
    causes: tuple[str, ...] = ()
    """The causes without which the difference disappears, in words."""
    notes: tuple[str, ...] = ()

    @property
    def learns_the_same(self) -> bool:
        """Returns whether the plan differs only as its user requested."""
        return self.verdict in ("same", "same but for these")

    def __repr__(self) -> str:
        why = "; ".join([*self.causes, *self.notes])
        return f"PlanVerdict({plan_name(self.plan)}: {self.verdict}{f' ({why})' if why else ''})"


class Verdicts(list[PlanVerdict], Tabular):
    """The verdicts on several plans."""

    def table(self) -> Table:
        """Returns a row for each plan: the verdict, the relative differences, and why."""
        names = ("first", "loss", "norm", "weights", "tolerance")
        return Table(
            {"plan": plan_name(verdict.plan), "verdict": verdict.verdict}
            | {name: getattr(verdict.difference, name, None) for name in names}
            | {"why": "; ".join([*verdict.causes, *verdict.notes])}
            for verdict in self
        )


def verify(
    task: Task | type[Task] | str,
    plans: Sequence[AnyPlan],
    *,
    fields: Mapping[str, object] | None = None,
    data: Path | str | None = None,
    steps: int = STEPS,
    run: StartProcesses = start,
    note: Callable[[str], None] = lambda line: None,
    complain: Callable[[str], None] = lambda line: None,
) -> Verdicts:
    """Compares each plan with one plain process: the same weights, the same global batches, `steps` steps.

    Args:
        run: the function that starts processes; for tests.
        note: callback, called with a short description of the next trial.
        complain: callback, called with a difference before its cause is looked for.

    Raises:
        GrappeError: a plan is not supported, or the task does not train.
    """
    if rank_from_environment() is not None:
        raise UsageError("grappe verify starts its own processes: run it without torchrun or srun")
    if steps < 1:
        raise UsageError(f"--steps={steps}: it must be at least 1")
    parsed = [as_plan(plan) for plan in plans]
    for plan in parsed:
        engines.check(plan)
    reference = TaskReference.of(task, fields)
    parsed = [memory_chosen(reference, plan, data_folder(data))[0] for plan in parsed]
    with tempfile.TemporaryDirectory(prefix="grappe-verify-") as folder:
        runner = TrialRunner(
            task=reference,
            data=data_folder(data),
            steps=steps,
            folder=Path(folder),
            run=run,
            note=note,
            complain=complain,
        )
        return Verdicts(judge(runner, plan) for plan in parsed)


def judge(runner: TrialRunner, plan: Plan) -> PlanVerdict:
    """Judges a plan by trials: of the whole plan, and if it differs, of the plan without possible causes.

    Raises:
        GrappeError: the plain process does not train.
    """
    base = runner.reference(plan, Instrumentation())
    start = Instrumentation()
    normalised = plan.pipeline > 1 and any("BatchNorm" in kind for kind in base.coupled.values())
    if normalised or base.carries_rows:
        # Pipelines refuse steps that do not divide evenly then: padding rows would enter the statistics.
        start = Instrumentation(batch_multiple=2 * plan.data_parallel * plan.microbatches)
        base = runner.reference(plan, start)
    try:
        return _Judgement(runner, plan, base, start).finding()
    except GrappeError as error:  # the other plans are still to be judged
        return PlanVerdict(
            plan=str(plan),
            processes=plan.processes,
            verdict="failed",
            difference=None,
            causes=(" ".join(str(error).split()),),  # a table cell has one line
        )


class _Judgement:
    """The judgement of one plan."""

    def __init__(self, runner: TrialRunner, plan: Plan, base: Reference, start: Instrumentation) -> None:
        self._runner, self._plan, self._base, self._start = runner, plan, base, start
        self._steps = runner.trial(plan, start, base)
        self._difference = runner.compare(base, self._steps, plan)

    def finding(self) -> PlanVerdict:
        """Returns the verdict, and its evidence."""
        wrong = wrong_samples(self._base, self._steps)
        if wrong:
            return self._of_samples(wrong)
        if self._plan.exact:
            return self._of_exact()
        if not self._difference.agrees:
            return self._of_difference()
        if self._difference.tolerated <= BOUND:
            return self._finding("same")
        # Agreement means nothing: the reference itself drifts when its samples are reordered.
        reasons = causes_of_drift(self._runner, *self._without(self._asked_for()), self._base)
        return self._finding(
            "cannot be judged",
            [
                f"one process that adds up in another order is {self._difference.tolerated / FACTOR:.1%} away from "
                f"itself, and more than {BOUND / FACTOR:.1%} would hide a fault",
                *(reasons or ["a smaller learning rate or fewer --steps may keep them together"]),
            ],
        )

    def _finding(self, verdict: VerdictWord, causes: Sequence[str] = (), notes: Sequence[str] = ()) -> PlanVerdict:
        base, tensors, notes = self._base, self._difference.drifting, list(notes)
        if base.written:
            several = "are" if len(base.written) > 1 else "is"
            notes.append(
                f"{and_more(base.written, SHOWN)} {several} written in forward: put it in after_step(), or in a buffer"
            )
        if base.attributes:
            notes.append(f"forward keeps {and_more(base.attributes, SHOWN)} for the next batch")
        if verdict in ("same", "same but for these") and tensors:
            notes.append(
                f"not judged: {and_more(tensors, SHOWN)}: rounding alone, which Adam scales up where gradients are "
                f"small, moves them by more than {BOUND / FACTOR:.1%}"
            )
        return PlanVerdict(
            plan=str(self._plan),
            processes=self._plan.processes,
            verdict=verdict,
            difference=self._difference,
            causes=tuple(causes),
            notes=tuple(notes),
        )

    def _of_samples(self, wrong: str) -> PlanVerdict:
        """Trains one process on the wrong samples, to see whether it learns as the plan does."""
        self._complain()
        plan, instrumentation = self._without(self._asked_for())
        base = self._runner.reference(plan, instrumentation)
        steps = self._runner.trial(plan, instrumentation, base)
        fed = self._runner.reference(plan, instrumentation, recorded=steps)
        again = self._runner.trial(plan, instrumentation, fed)
        if compare(fed, again, tolerance=base).agrees:
            return self._finding("different", [wrong], ["one process that is given the same samples learns the same"])
        return self._finding("different", [wrong, *ablations(self._runner, plan, instrumentation, base)])

    def _of_exact(self) -> PlanVerdict:
        """Compares bits with the same exact plan on one process, and numbers with the plain process."""
        alone = dataclasses.replace(self._plan, replicate=1, shard=1, zero=3)
        if alone != self._plan:
            steps = self._runner.trial(alone, self._start, self._base)
            odd = next((n for n, (a, b) in enumerate(zip(steps, self._steps, strict=True)) if a.bits != b.bits), None)
            if odd is not None:
                return self._finding("different", [f"other bits than {alone} on one process, from step {odd + 1}"])
        note = f"bit-identical to exact={self._plan.exact} on one process"
        if self._difference.agrees:
            return self._finding("same", notes=[note])
        if self._difference_from_pieces(self._plan, self._start, precision=True).agrees:
            kinds = [*self._coupled_names(), *(["dropout"] if self._base.draws else [])]
            by_piece = f"{' and '.join(kinds) or 'the model'} of each piece by itself, on one process too"
            return self._finding("same", notes=[note, by_piece])
        return self._of_difference([note])

    def _of_difference(self, notes: Sequence[str] = ()) -> PlanVerdict:
        """Switches off requested features; if the difference disappears, finds the fewest that explain it."""
        self._complain()
        asked_for = self._asked_for()
        if DROPOUT in asked_for and self._draws_as_one_process():
            asked_for = tuple(feature for feature in asked_for if feature != DROPOUT)
            notes = [*notes, "the model's random draws are those of one process"]
        if asked_for and self._agrees(asked_for):
            fewest = asked_for
            for feature in asked_for:
                fewer = tuple(other for other in fewest if other != feature)
                if fewer and self._agrees(fewer):
                    fewest = fewer
            faults = self._faults(fewest)
            if faults:
                return self._finding("different", faults, notes)
            fp16 = PRECISION in fewest and self._plan.precision == "fp16"
            if not fp16 and self._difference_from_pieces(self._plan, self._start, precision=True).agrees:
                notes = [*notes, PIECES]
            return self._finding("same but for these", [self._name(feature) for feature in fewest], notes)
        others = [feature for feature in asked_for if feature != STATISTICS]
        # Some modules couple samples in evaluation, too: what they do cannot be switched off.
        if STATISTICS in asked_for and self._difference_from_pieces(*self._without(others)).agrees:
            return self._finding("same but for these", [self._name(feature) for feature in asked_for], [*notes, PIECES])
        plan, instrumentation = self._without(asked_for)
        causes = ablations(self._runner, plan, instrumentation, self._runner.reference(plan, instrumentation))
        if not causes:
            where = self._difference
            tensor = f", first of all in {where.tensor}" if "weights" in where.what else ""
            causes = [f"not found: it remains whatever is switched off{tensor}"]
        return self._finding("different", causes, notes)

    def _complain(self) -> None:
        gap = self._difference
        self._runner.complain(
            f"{plan_name(self._plan)} differs from one process in step {(gap.first or 0) + 1} (loss {gap.loss:.1e}, "
            f"weights {gap.weights:.1e}); looking for the cause"
        )

    def _draws_as_one_process(self) -> bool:
        """Returns whether the recorded draws of each step and slice are those of one process for the whole batch."""
        plan = self._plan
        if not plan.draws_whole_batches and plan.data_parallel * plan.microbatches * max(1, plan.exact) > 1:
            return False
        base = self._runner.reference(plan, self._start, slices=plan.data_parallel, pieces=plan.microbatches)
        pairs = zip(base.steps, self._steps, strict=False)
        return all(plain.draws == step.draws and all(step.draws) for plain, step in pairs)

    def _asked_for(self) -> tuple[str, ...]:
        """Lists the plan's features that may make it differ from one plain process without a fault."""
        features = [PRECISION] if self._plan.precision not in ("fp32", "fp64") else []
        features += [STATISTICS] if self._base.coupled else []
        return (*features, *([DROPOUT] if self._base.draws else []))

    def _without(self, off: Sequence[str]) -> tuple[Plan, Instrumentation]:
        plan = dataclasses.replace(self._plan, precision="fp32") if PRECISION in off else self._plan
        evaluated = tuple(self._batchnorms()) if STATISTICS in off else ()
        return plan, dataclasses.replace(self._start, without_randomness=DROPOUT in off, evaluated_modules=evaluated)

    def _agrees(self, off: Sequence[str]) -> bool:
        plan, instrumentation = self._without(off)
        base = self._runner.reference(plan, instrumentation)
        return self._runner.compare(base, self._runner.trial(plan, instrumentation, base), plan).agrees

    def _faults(self, explained: Sequence[str]) -> list[str]:
        """Names faults of the features that explain a difference; empty if each works as the plan says."""
        faults = []
        if DROPOUT in explained:
            again = self._runner.trial(self._plan, self._start, self._base)
            faults += _stream_faults(self._steps, again)
        if STATISTICS in explained and self._plan.synchronises and self._batchnorms():
            faults.append(f"{self._coupled_names()[0]} with per-process statistics, though they are to be the batch's")
        elif STATISTICS in explained and not self._base.whole_batch:
            plan, instrumentation = self._without([feature for feature in self._asked_for() if feature != STATISTICS])
            gap = self._difference_from_pieces(plan, instrumentation)
            if not gap.agrees:
                faults.append(
                    f"{' and '.join(self._coupled_names())}: neither that of the whole batch nor that of each "
                    f"process's slice (step {(gap.first or 0) + 1}, {gap.tensor})"
                )
        return faults

    def _difference_from_pieces(
        self, plan: Plan, instrumentation: Instrumentation, precision: bool = False
    ) -> Difference:
        """Compares with a second reference: one process that takes the plan's own pieces one after the other."""
        slices, pieces = self._plan.data_parallel, self._plan.microbatches
        if self._plan.exact:
            slices, pieces = 1, self._plan.exact
        elif self._base.whole_batch:  # its pieces have no losses of their own
            slices = pieces = 1
        base = self._runner.reference(self._plan, instrumentation, slices=slices, pieces=pieces, precision=precision)
        return self._runner.compare(base, self._runner.trial(plan, instrumentation, base), plan)

    def _name(self, feature: str) -> str:
        if feature == PRECISION:
            return f"precision ({self._plan.precision})"
        if feature == DROPOUT:
            words = f"dropout's random streams ({', '.join(self._base.draws)})"
            of_whole = dataclasses.replace(self._plan, dropout="whole")
            if of_whole.draws_whole_batches and not self._plan.draws_whole_batches:
                return f"{words}; dropout=whole would draw the same"
            like = sorted({"rand_like", "randn_like"}.intersection(self._base.draws))
            instead = " and ".join(f"grappe.{name}" for name in like)
            return f"{words}; {instead} would draw the same under every plan" if like else words
        return " and ".join(self._coupled_names())

    def _coupled_names(self) -> list[str]:
        """Describes what computes over a batch's samples in words."""
        batchnorms = self._batchnorms()
        others = [
            f"{name or 'the model'} ({kind})" for name, kind in self._base.coupled.items() if name not in batchnorms
        ]
        words = [f"batch normalisation ({', '.join(batchnorms)})"] if batchnorms else []
        return [*words, *([f"statistics of the batch in {', '.join(others)}"] if others else [])]

    def _batchnorms(self) -> list[str]:
        return [name for name in self._base.coupled if name and ":" not in name]  # others are lines


def _stream_faults(steps: Sequence[TrialStep], again: Sequence[TrialStep]) -> list[str]:
    """Names random streams of a trial that are shared, repeated or irreproducible."""
    word = "dropout's random streams"
    for number, step in enumerate(steps):
        drawn = [hash_ for hash_ in step.draws if hash_]
        if len(set(drawn)) < len(drawn):
            return [f"{word}: in step {number + 1} several slices draw the same numbers"]
        if number and any(
            hash_ and hash_ == before for hash_, before in zip(step.draws, steps[number - 1].draws, strict=True)
        ):
            return [f"{word}: step {number + 1} draws the numbers of the step before it"]
    odd = next((n for n, (a, b) in enumerate(zip(steps, again, strict=False)) if a.draws != b.draws), None)
    if odd is not None:
        return [f"{word}: the same plan draws other numbers when it is started again (step {odd + 1})"]
    return []


def used(step: TrialStep) -> list[int]:
    """Returns the ids of a step's samples, over all slices."""
    return [i for ids in step.slices for i in ids]


def wrong_samples(reference: Reference, steps: Sequence[TrialStep]) -> str:
    """Describes the error in a trial's samples; "" if there is none."""
    for number, (plain, step) in enumerate(zip(reference.steps, steps, strict=False)):
        if Counter(plain.ids) != Counter(used(step)):
            return _sample_fault(reference, steps, number)
    return ""


def _sample_fault(reference: Reference, steps: Sequence[TrialStep], number: int) -> str:
    """Describes the error in the samples of step `number`."""
    plain, step = reference.steps[number], steps[number]
    expected, actual = Counter(plain.ids), Counter(used(step))
    missing, extra = expected - actual, actual - expected
    at = f"in step {number + 1}"
    if not set(expected) & set(actual) or step.epoch > number // reference.per_epoch:
        if (number + 1) % reference.per_epoch == 0:
            return f"a dropped last batch: {at}, the epoch's last, the plan uses none of the {len(plain.ids)} samples"
        return f"another order: {at} the plan uses none of its samples"
    shift = _shift(reference, number, step)
    if shift:
        return f"a sampler that is off by {shift}: {at} it begins {'after' if shift > 0 else 'before'} its position"
    doubled = [sample for sample in extra if sample in expected]
    words = []
    if doubled:
        words.append(f"a doubled sample: {at} {_listed(doubled)} more than once")
    foreign = [sample for sample in extra if sample not in expected]
    if foreign:
        words.append(f"samples of another step: {at} {_listed(foreign)}")
    if missing:
        words.append(f"{'and ' if words else 'a skipped sample: ' + at + ' '}{_listed(missing)} not at all")
    return ", ".join(words)


def _shift(reference: Reference, number: int, step: TrialStep) -> int:
    """Computes the positions by which the whole step, or each slice, is shifted in the order; 0: another error."""
    epoch = number // reference.per_epoch
    steps_of_epoch = reference.steps[epoch * reference.per_epoch : (epoch + 1) * reference.per_epoch]
    order = [sample for step_of_epoch in steps_of_epoch for sample in step_of_epoch.ids]
    place = {sample: index for index, sample in enumerate(order)}
    begins = (number % reference.per_epoch) * len(reference.steps[0].ids)
    shifts = {place[sample] - begins - row for row, sample in enumerate(used(step)) if sample in place}
    return shifts.pop() if len(shifts) == 1 else 0


def _listed(ids: Sequence[int] | Counter[int]) -> str:
    return f"sample{'s' if len(ids) > 1 else ''} {and_more(list(ids), SHOWN)}"


def ablations(runner: TrialRunner, plan: Plan, instrumentation: Instrumentation, reference: Reference) -> list[str]:
    """Switches off possible causes of a difference, one at a time; lists the ones without which it disappears."""
    causes: list[str] = []

    def ablate(word: str, *, other: Plan = plan, buffers: bool = True, **off: Any) -> None:
        less = dataclasses.replace(instrumentation, **off)
        base = runner.reference(other, less)
        steps = runner.trial(other, less, base)
        if runner.compare(base, steps, other, without=() if buffers else base.buffers).agrees:
            causes.append(f"{word} the difference disappears")

    fewer = dataclasses.replace(plan, microbatches=1)
    # A pipeline's schedule needs as many microbatches as it has stages.
    if plan.microbatches > 1 and engines.supported(fewer):
        ablate(f"accumulation: with microbatches=1, and not {plan.microbatches},", other=fewer)
    if not reference.whole_batch:
        ablate("a loss that averages: computed row by row, each row by itself,", loss_row_by_row=True)
    ablate(
        "means of slices are averaged, whatever the slices' sizes: with equal slices",
        batch_multiple=2 * plan.data_parallel * plan.microbatches * max(1, plan.exact),
    )
    ablate(
        "a dataset that draws random numbers outside the keyed generators: with samples that were loaded once",
        loaded_samples=runner.samples(plan, instrumentation),
    )
    if reference.augments:
        ablate("augmentation that draws random numbers outside grappe.draw: without it", without_augmentation=True)
    if reference.buffers:
        names = [name for name in reference.buffers if name.rpartition(".")[0] not in reference.coupled]
        some = ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")
        ablate(
            f"a buffer that is not synchronised ({some}): with constant buffers", constant_buffers=True, buffers=False
        )
    ablate("a lower precision than asked for: with the forward in float32", in_float32=True)
    if reference.clips:
        ablate("clipping: without it", without_clipping=True)
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(Plan)}
    for key in sorted(plan.changed_keys() - KEPT - {"microbatches"}):
        other = dataclasses.replace(plan, **{key: defaults[key]})
        if engines.supported(other):
            ablate(f"{key}: with {key}={defaults[key]}", other=other)
    return causes


def causes_of_drift(
    runner: TrialRunner, plan: Plan, instrumentation: Instrumentation, reference: Reference
) -> list[str]:
    """Names each cause without which the plain process no longer drifts when its samples are reordered."""

    def drifts(other: Plan = plan, **off: Any) -> bool:
        base = runner.reference(other, dataclasses.replace(instrumentation, **off))
        return FACTOR * max(max(step.noise[LOSS], step.noise[NORM]) for step in base.steps) > BOUND

    if plan.channels_last and not drifts(dataclasses.replace(plan, channels_last=False)):
        return ["channels_last: its kernels add up in an order of their own, and a last bit decides ties (max pooling)"]
    words = []
    if not reference.whole_batch and not drifts(loss_row_by_row=True):
        words.append("a loss in which rows meet, or that depends on their places")
    if reference.augments and not drifts(without_augmentation=True):
        words.append("augmentation that draws outside grappe.draw")
    if reference.clips and not drifts(without_clipping=True):
        words.append("clipping")
    return [f"{word}: without it the drift disappears" for word in words]
