"""Rehearses a script on one process: measures on its first batch how parts of a batch make up the whole.

The loop's body runs with the whole batch, then with two uneven parts of it; optimizers stand still, and random
numbers, buffers and gradients go back in between. What the parts' gradients are to the whole's tells whether the loss
is a mean over rows or a sum: nothing is guessed from the source. So it is for each value that a line reads.

Shapes: a batch of N rows; parts of k and N - k rows.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import traceback
import types
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence, ValuesView
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from grappe.data.batch import BatchRows
from grappe.data.sampling import cut
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.errors import TaskError
from grappe.private_api.torch import BatchNormBase, tree_leaves
from grappe.training.random_state import random_digest, random_state, set_random_state
from grappe.verbs.launch.interception import (
    INDEX,
    PLAIN_ITEM,
    SAVED,
    Begin,
    StepHandler,
    add_gradient,
    alive,
    buffers_alive,
    cut_rows,
    is_picture,
    modules_alive,
    norms_of,
    parameters_of,
    place_of,
    rows_of,
    saved_part,
    turned_rows,
)
from grappe.verbs.launch.passes import (
    NUMBER,
    TOLERATED,
    Pass,
    Reductions,
    _alike,
    _wide,
    as_rows_do,
    clearest,
    distance_of,
    fitting_rules,
    integers_of,
    loss_rule,
    may_be_chance,
    shares_of,
)
from grappe.verbs.launch.plan_keys import ROUNDING, TRIED, PlanKeys, gathered, names_called, wide
from grappe.verbs.launch.request import OR, USED, Rehearsed, Rule, line_of
from grappe.verbs.launch.variables import CONTAINERS, is_own_file, own_modules
from grappe.verbs.verify.random_ops import RandomOps
from grappe.words import first_line

T = TypeVar("T")
MOST_BACKWARDS = 50  # of the script, until a batch is measured
PLAIN = (bool, int, float, str)
LEAST_ROWS = 3  # of a batch that can be cut in two uneven parts
SMALL, MOST_SUMMED = 1e-6, 100_000  # a difference of sums of tensors, and the elements of each
LARGE = 2.0**1000  # Python's integers have no bound, and a float has one
OF_MODULES = ("__", "_parameters", "_buffers", "_modules")
"""Variables of any module, of Python or of torch."""
LOUDER = 2.0**10
"""Factor of a part's loss, whose gradient is divided by it: what clips within backward shows before it clips."""


class RehearsalOver(BaseException):
    """Ends the script, through whatever it catches of its own errors."""


class _Abandoned(Exception):
    """Ends the pass of a batch that the script has only looked at."""


class _StepState(NamedTuple):
    """State to which each pass goes back."""

    random: Mapping[str, Tensor]
    variables: list[tuple[dict[str, Any], dict[str, Any]]]
    """Of the script's modules, and its objects' attributes: where they are, and what they were. A counter, say."""
    buffers: list[tuple[Tensor, Tensor]]
    gradients: list[Tensor | None]


class Rehearsal(StepHandler):
    """Handles a script's steps until its first batch that trains is measured; then raises RehearsalOver.

    Args:
        synchronised: whether the plan has batch normalisation over all processes.
        structural: places whose length has ended an earlier rehearsal with an error when it was the whole batch's.
        keys: of the plan, each of which is tried with the whole batch; None: it has none that change a model.
        parts: into which the plan's processes cut a batch.
    """

    def __init__(
        self, *, synchronised: bool, structural: Sequence[str], keys: PlanKeys | None = None, parts: int = 2
    ) -> None:
        self._synchronised, self._structural = synchronised and parts > 1, set(structural)
        self._keys, self._parts = keys, parts
        self._models: list[str] = []
        """Names of the models that the whole batch goes through."""
        self._key = ""
        """The key under trial."""
        self._trials: list[PlanKeys] = []
        self._optimizers: list[Optimizer] = []
        self.backwards = 0
        """Of the script, so far, with whole batches."""
        self._pass: Pass | None = None
        self._whole: Pass | None = None
        """The pass with all rows, whose gradients a script reads after each part's backward, as it will in a run."""
        self._lengths: dict[str, list[int]] = {}
        """Of places under trial: what each of their readings is told."""
        self._answers: dict[str, list[NDArray[Any]]] | None = None
        """Of the pass that shows what a run's process keeps: what each place reads of the whole batch."""
        self._chosen: set[str] = set()
        """Places that count rows which numbers choose: by a mask, say."""
        self._lists: set[str] = set()
        """Places that count lists."""
        self._reductions = Reductions()
        self._factor = 1.0
        """Of the running pass's losses."""
        self._before: set[tuple[int, str]] = set()
        """Variables that the script had before the batch: others are the step's own, such as its loss."""
        self._batch: Any = None
        self._taken: list[weakref.ref[Generator[Any, None, None]]] = []
        """The iteration whose running batch the script has taken by `next`."""
        self._again = False
        """Whether the running batch has come before, in part or as a whole."""
        self._rows = (0, 0)
        """Of the running pass, and of the whole batch."""
        self.found = Rehearsed(
            refused="no loop over a torch.utils.data.DataLoader takes a step: write `for batch in loader` around it"
        )

    @property
    def in_part(self) -> bool:
        """Returns whether the script has what it would not have by itself: a part of a batch, or a plan's key."""
        return self._rows[0] < self._rows[1] or bool(self._key)

    def failed(self, error: Exception) -> Rehearsed:
        """Returns what an error of the script with a part of a batch means."""
        if self._lengths and self._answers is None:  # the number of rows makes a tensor there
            return Rehearsed(structural=next(iter(self._lengths)))
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if is_own_file(frame.filename)] or list(frames)
        where = f"{Path(own[-1].filename).name}, line {own[-1].lineno}"
        if self._key:
            fault = "" if isinstance(error, TaskError) else f"{where} ends in {type(error).__name__}: "
            return Rehearsed(refused=f"with {self._key} in the plan: {fault}{first_line(str(error))}")
        return Rehearsed(
            refused=f"with {self._rows[0]} of a batch's {self._rows[1]} rows, {where} ends in {type(error).__name__}: "
            f"{first_line(str(error))}: a number of rows that is written down, or a state that goes from batch to batch"
        )

    # ---- What the script does ------------------------------------------------------------------------------

    def batches(self, loader: DataLoader[Any], place: str, begin: Begin) -> Iterator[Any]:
        """Returns a loader's first batch several times, the others as they are where it trains nothing."""
        made: list[weakref.ref[Generator[Any, None, None]]] = []
        iteration = self._batches(place, begin(), made)
        made.append(weakref.ref(iteration))  # `next(iter(loader))` ends its iteration at once
        return cast("Iterator[Any]", iteration)

    def _batches(self, place: str, plain: Iterator[Any], made: list[weakref.ref[Generator[Any, None, None]]]) -> Any:
        is_for_loop = _is_for_loop(sys._getframe(1))
        taken = self._taken[0]() if self._taken else None
        if self._pass is not None and taken is not None and is_for_loop and not self._pass.gradients:
            # `images, labels = next(data)` has looked at a batch, before the loop that trains.
            taken.throw(_Abandoned)
        outer, self._pass = self._pass, None
        is_within = outer is not None
        if not is_within:
            self._taken = [] if is_for_loop else made
        try:
            for batch in plain:
                if is_within:  # a training step: an evaluation
                    yield batch
                    continue
                try:
                    trained = yield from self._measured(batch, place)
                except _Abandoned:
                    self._pass = None
                    yield
                    yield from plain
                    return
                if trained:
                    raise RehearsalOver
                self._again, self._rows = False, (0, 0)
                yield from plain
        finally:
            if is_within or self._taken is made or is_for_loop:
                self._pass = outer

    def backward(self, place: str, loss: Tensor, run: Callable[[float], None]) -> float:
        """Runs a backward, and keeps apart what it adds."""
        parameters = parameters_of(self._optimizers)
        before = [each.grad for each in parameters]
        for each in parameters:
            each.grad = None
        scaled = next((trial for trial in self._trials if trial.scale.is_dynamic), None)
        if scaled is None:
            run(self._factor)
        else:
            scaled.backward(self._optimizers, run, 1.0)
        self.backwards += self._whole is None
        if self.backwards > MOST_BACKWARDS:
            self._refuse(
                f"its first {MOST_BACKWARDS} backwards came from no loop over a torch.utils.data.DataLoader: write "
                "`for batch in loader`"
            )
        if self._pass is not None:
            added = self._pass.gradients[place]
            for number, each in enumerate(parameters):
                if each.grad is not None:
                    gradient = gathered(each.grad.detach()) / self._factor
                    for total in (added,) if self._pass.stepped else (added, self._pass.first):
                        add_gradient(total, number, gradient.to_dense() if gradient.is_sparse else gradient)
            if self._whole is not None:
                for number, each in enumerate(parameters):
                    all_rows = self._whole.gradients[place].get(number)
                    each.grad = None if all_rows is None else all_rows.clone()  # clipping changes it in place
        for each, gradient in zip(parameters, before, strict=True):
            if gradient is not None:
                each.grad = gradient if each.grad is None else gradient + each.grad
        return 1.0

    def read(self, tensor: Tensor, place: str, read: Callable[[Tensor], T]) -> T:
        """Reads a value, and notes it."""
        value = read(tensor)
        if self._pass is not None:
            self._pass.values[place].append(np.array(value))
            if isinstance(value, bool) or not (tensor.is_floating_point() or tensor.is_complex()):
                self._pass.integers.add(place)
            self._pass.reads_told |= tensor in self._reductions.told
            if tensor in self._reductions.of_rows:
                self._pass.of_rows.add(place)
            if tensor in self._reductions.rules:
                self._pass.reductions[place] = self._reductions.rules[tensor]
            answers = (self._answers or {}).get(place, ())
            if (number := len(self._pass.values[place])) <= len(answers):
                answer = answers[number - 1]
                return cast("T", answer if isinstance(value, np.ndarray) else answer.tolist())
        return value

    def length(self, value: int, tensor: object, place: str) -> int:
        """Returns what a place counts; at the places under trial what it counts of the whole batch."""
        if self._pass is None or not (tensor is None or isinstance(tensor, Tensor | list | tuple)):
            return value
        counted = self._pass.lengths[place]
        counted.append(value)
        if isinstance(tensor, list | tuple):
            self._lists.add(place)
        elif tensor is not None and tensor in self._reductions.chosen:
            self._chosen.add(place)
        of_whole = self._lengths.get(place, ())
        return of_whole[len(counted) - 1] if len(counted) <= len(of_whole) else value

    def counted(self, several: Iterable[T], start: int = 0) -> Iterator[tuple[int, T]]:
        """Counts as `enumerate` does, and a batch that comes again once."""
        number = start - 1
        for each in several:
            parts = each if type(each) is tuple else ()
            number += not (self._again and any(part is self._batch for part in (each, *parts)))
            yield number, each

    def count(self, counted: Tensor, of: int, *, special: bool) -> None:
        """Notes what a cross-entropy divides by, if it is not the number of its targets."""
        if self._pass is not None and (special or float(counted) != of):
            self._pass.counts.append(float(counted))

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Lets an optimizer stand still."""
        self._optimizers.append(optimizer)

        def stand_still(_: Optimizer, closure: Callable[[], Any] | None = None, **__: Any) -> None:
            if closure is not None:
                self._refuse("step(closure) runs the batch several times: take grappe.Loop, or a task")
            if self._pass is not None:
                self._pass.stepped = True

        optimizer.step = types.MethodType(stand_still, optimizer)  # type: ignore[method-assign]

    # ---- Passes --------------------------------------------------------------------------------------------

    def _measured(self, batch: Any, place: str) -> Iterator[Any]:
        """Runs the body for a batch and its parts; returns whether it trains."""
        rows = rows_of(batch)
        state, self._models, self._before = self._state(), [], {key[:2] for key in _sizes()}
        with names_called(self._optimizers, self._models):
            all_rows = yield from self._run(batch, state, 0, rows or 0, rows or 0)
        self._again = True
        if not all_rows.gradients:
            return False
        norms, drawn = self._norms(all_rows), all_rows.drawn
        if self._parts == 1:
            keys, norms = yield from self._try_keys(batch, state, rows or 1, all_rows, norms)
            self.found = Rehearsed(loader=place, norms=norms, models=self._models, keys=keys)
            return True
        if rows is None or rows < LEAST_ROWS:
            self._refuse(
                f"a batch of the loader ({line_of(place)}) is a {type(batch).__name__} whose tensors have no row for "
                f"each of {LEAST_ROWS} samples or more"
            )
        first = max(1, rows // 3)
        causes = {"": contextlib.nullcontext, "batch normalisation": _statistics_off, "random numbers": _draws_off}
        apart = 0.0
        for cause, context in causes.items():
            if self._synchronised and not cause:
                continue
            self._whole = None
            with context():
                if cause or self._synchronised:
                    all_rows = yield from self._run(batch, state, 0, rows, rows)
                self._whole = all_rows
                # A GradScaler's factor is as large already, and fp16 could not hold both.
                if not any(scaler.is_enabled() for scaler in alive(torch.amp.GradScaler)):
                    self._factor = LOUDER
                left = yield from self._run(batch, state, 0, first, rows)
                self._factor = 1.0
                right = yield from self._run(batch, state, first, rows, rows)
            shares = shares_of(all_rows, left, first / rows)
            rules = {line: loss_rule(line, all_rows, left, right, shares) for line in all_rows.gradients}
            losses = {line: rule for line, (rule, _) in rules.items()}
            apart = max(apart, *(distance for _, distance in rules.values()))
            if None not in losses.values():
                break
            if cause == "random numbers":
                if all_rows.draws_beside_torch:
                    self._refuse(
                        "numbers of Python's generator are in the loss, or of NumPy's for something else than rows: "
                        "draw them by torch, torch.rand(rows)"
                    )
                lines = ", ".join(line_of(line) for line, rule in losses.items() if rule is None)
                self._refuse(
                    f"the gradient of the loss ({lines}) is not that of its rows together, {apart:.0e} apart: a "
                    "loss of the whole batch, an average over something else than rows (tokens, pixels that count), a "
                    "state that goes from batch to batch, rows that meet in the model, or a hook that clips gradients"
                )
        if cause == "random numbers":
            self._refuse(
                "random numbers are in the loss that are not drawn for each row by torch's generator: a permutation of "
                "the rows, or a generator of its own"
            )
        if cause == "batch normalisation" and not self._synchronised:
            self._refuse(
                "batch normalisation uses the statistics of the rows of each process: with batchnorm=sync in the plan "
                "they are the whole batch's"
            )
        values = yield from self._value_rules(batch, state, (all_rows, left, right), shares)
        lengths = yield from self._lengths_of_the_whole(batch, state, first, (all_rows, left, right))
        of_whole = {at: all_rows.lengths[at] for at, rule in lengths.items() if rule in ("rows", "sum")}
        own_rows, alike = yield from self._rows_kept(batch, state, first, all_rows, of_whole)
        keys, norms = yield from self._try_keys(batch, state, rows, all_rows, norms)
        self.found = Rehearsed(
            loader=place,
            losses=_without_none(losses),
            values=_without_none(values | dict.fromkeys(alike & values.keys(), "same")),
            lengths=[at for at, rule in lengths.items() if rule == "rows"],
            counts=[at for at, rule in lengths.items() if rule == "sum"],
            own_counts=[at for at, rule in lengths.items() if rule == "own"],
            parts_counts=[at for at in all_rows.lengths if at not in lengths],
            own_rows=own_rows,
            norms=norms,
            drawn="" if keys else drawn,
            models=self._models,
            keys=keys,
        )
        return True

    def _value_rules(
        self, batch: Any, state: _StepState, passes: tuple[Pass, Pass, Pass], shares: Mapping[Rule, float]
    ) -> Iterator[Any]:
        """Returns how the parts make up what each line reads; further cuts of turned rows where it may be chance."""
        all_rows, rows = passes[0], self._rows[1]
        reached = [line for line in all_rows.values if all(line in each.values for each in passes)]
        fitting = {line: fitting_rules(line, *passes, shares) for line in reached}
        unclear = [line for line in reached if may_be_chance(line, fitting[line], *passes)]
        for line in unclear:
            fitting[line].extend(("first", "same"))  # the latter of a run's parts, which it checks
        first = cut(rows, self._parts, 0)[1]
        for turn in (0, rows // 2, rows // 4) if unclear else ():
            turned = turned_rows(batch, turn)
            with self._own_statistics_off():
                every_row = (yield from self._run(turned, state, 0, rows, rows)) if turn else all_rows
                begin = yield from self._run(turned, state, 0, first, rows)
                rest = yield from self._run(turned, state, first, rows, rows)
            shares = shares_of(every_row, begin, first / rows)
            for line in unclear:
                if any(len(each.values[line]) != len(all_rows.values[line]) for each in (every_row, begin, rest)):
                    continue  # a line that not all rows reach
                fit = fitting_rules(line, every_row, begin, rest, shares)
                fit += ["first"] if _alike(*_wide(line, begin, every_row)) else []
                fitting[line] = [rule for rule in fitting[line] if rule in fit]
        values = {line: clearest(fit, all_rows.reductions.get(line)) for line, fit in fitting.items()}
        unknown = [line for line, rule in values.items() if rule is None]
        unknown = [line for line in unknown if SAVED not in line and not line.endswith(INDEX)]  # a run decides
        if refused := [line for line in unknown if not any(is_picture(each, line) for each in all_rows.values[line])]:
            self._refuse(
                f"{line_of(refused[0])} reads a value of the batch that is neither a mean, a sum nor the largest or "
                "least over its rows, nor has a row for each: processes would read that of their own rows. Compute it "
                "from the rows in NumPy, which has all of them: tensor.detach().numpy().std()"
            )
        return values | dict.fromkeys(unknown, "own")

    def _try_keys(self, batch: Any, state: _StepState, rows: int, plain: Pass, norms: list[float]) -> Iterator[Any]:
        """Applies one key after the other; returns by how much each changes the gradient, and the last one's norms."""
        self._whole, distances, tolerated = None, dict[str, float](), 0.0
        keys = self._keys
        if keys is None:
            return {}, norms
        for key in keys.names:
            self._key = keys.text(key)
            if not self._models:
                self._refuse(f"{self._key} has no model: a step calls no torch.nn.Module whose parameters it trains")
            self._restore(state)
            self._trials.append(keys.of(key, self._models))
            self._trials[-1].apply(self._optimizers)
            batch, state = self._trials[-1].batch(batch), self._state()
            with self._own_statistics_off():
                tried = yield from self._run(batch, state, 0, rows, rows)
            apart = max(distance_of(gradient, tried.gradients[line]) for line, gradient in plain.gradients.items())
            if key == "precision":
                tolerated = ROUNDING[keys.plan.precision]
            if not apart <= max(tolerated, TRIED[key]):
                self._refuse(
                    f"{self._key} changes the first gradient by {apart:.0e} of itself, by more than another order of "
                    "its sums (compile draws dropout's numbers in another way, for instance): leave the key out"
                )
            distances[self._key], plain, norms = apart, tried, self._norms(tried)
        self._key = ""
        return distances, norms

    def _lengths_of_the_whole(
        self, batch: Any, state: _StepState, first: int, passes: tuple[Pass, Pass, Pass]
    ) -> Iterator[Any]:
        """Returns how parts' counts make up the whole's, where neither gradients nor values depend on being told it.

        "rows": it counts the batch's rows, "sum": others that add up, "own": others that do not.
        """
        rules: dict[str, Rule] = {}
        rows, right = self._rows[1], passes[2]
        for place in sorted(passes[0].lengths, key=lambda each: not each.endswith(USED)):  # names' uses last
            of_whole = passes[0].lengths[place]
            made_at = [at + USED for at in place.partition(USED)[0].split(OR)] if USED in place else []
            makers = [rules.get(at) in ("rows", "sum") for at in made_at if at in passes[0].lengths]
            if place in self._structural or (makers and all(makers)):
                continue
            parts = [each.lengths[place] for each in passes[1:]]
            chosen = not self._chosen.isdisjoint((place, *made_at))
            adds_up = (
                len(of_whole) == len(parts[0]) == len(parts[1]) and [*map(sum, zip(*parts, strict=True))] == of_whole
            )
            is_rows = adds_up and not chosen and {*of_whole} == {rows} and {*parts[0]} == {first}
            if not is_rows and (any(makers) or not adds_up or place in self._lists):
                if chosen:
                    rules[place] = "own"
                continue
            self._lengths, self._reductions.before = {place: of_whole}, right.numbers
            with self._own_statistics_off():
                tried = yield from self._run(batch, state, first, rows, rows)
            self._lengths, self._reductions.before = {}, []
            apart = (distance_of(right.gradients[line], tried.gradients[line]) for line in right.gradients)
            if not tried.reads_told and all(distance < TOLERATED for distance in apart):
                rules[place] = "rows" if is_rows else "sum"
        return rules

    def _rows_kept(
        self, batch: Any, state: _StepState, first: int, all_rows: Pass, of_whole: dict[str, list[int]]
    ) -> Iterator[Any]:
        """Runs a part that reads and is told the whole's: returns what differs, as the rows do, and what is alike.

        Returns:
            Lines that print and variables; places that read what is made of no row, but of numbers read before, say.
        """
        rows = self._rows[1]
        self._lengths = of_whole
        self._answers = {at: values for at, values in all_rows.values.items() if not at.endswith(INDEX)}
        with self._own_statistics_off():
            part = yield from self._run(batch, state, first, rows, rows)
        self._lengths, self._answers = {}, None
        grown = [
            (key, growth, part.grown[key])
            for key, growth in all_rows.grown.items()
            if key in part.grown and key[:2] in self._before
        ]
        names = [
            f"`{name}`"
            for (_, name, _), growth, of_part in grown
            if as_rows_do(growth[[0, 1, 3]], of_part[[0, 1, 3]], rows - first, rows)
            or not np.isclose(growth[2], of_part[2], TOLERATED, SMALL, equal_nan=True)
        ]
        printed = [(place, text, part.printed.get(place, text)) for place, text in all_rows.printed.items()]
        lines = [
            line_of(place)
            for place, text, of_part in printed
            if NUMBER.sub("", text) != NUMBER.sub("", of_part)
            or as_rows_do(integers_of(text), integers_of(of_part), rows - first, rows)
        ]
        alike = {
            line
            for line, values in all_rows.values.items()
            if line not in all_rows.of_rows & part.of_rows and all(map(np.array_equal, values, part.values[line]))
        }
        return [*dict.fromkeys([*lines, *names])], alike

    def _run(self, batch: Any, state: _StepState, first: int, last: int, rows: int) -> Iterator[Any]:
        """Runs the body of the loop with rows `first` to `last` - 1; returns what it did."""
        self._restore(state)
        record = self._pass = Pass()
        self._reductions.numbers = record.numbers
        self._rows = (last - first, rows)
        part = last - first < rows
        place = BatchRows(first, last - first, rows) if part or self._key else None
        is_noted = self._whole is None or self._answers is not None
        before = _sizes() if is_noted else {}
        with whole_batch_draws(place, others_alike=True), self._reductions, self._saves_noted(), self._prints_noted():
            self._batch = cut_rows(batch, first, last) if part else batch
            self._reductions.begin(tree_leaves(self._batch), last - first)
            yield self._batch
        self._pass = None
        after = _sizes() if is_noted else {}
        record.grown = {
            name: np.append(after[name] - size, after[name][0]) for name, size in before.items() if name in after
        }
        record.drawn = random_digest()
        record.draws_beside_torch = not torch.equal(random_state()["others"], state.random["others"])
        return record

    @contextlib.contextmanager
    def _saves_noted(self) -> Iterator[None]:
        """Context in which the tensors that the script saves are read, but for weights, which are all processes'."""
        plain = torch.save

        def save(saved: Any, *arguments: Any, **options: Any) -> None:
            weights = (each for module in modules_alive() for each in (*module.parameters(), *module.buffers()))
            weights_at, place = {each.data_ptr() for each in weights}, place_of(sys._getframe(1))
            for number, leaf in enumerate(tree_leaves(saved)):
                if isinstance(leaf, Tensor) and leaf.data_ptr() not in weights_at:
                    self.read(leaf, saved_part(place, number), wide)
            plain(saved, *arguments, **options)

        torch.save = save
        try:
            yield
        finally:
            torch.save = plain

    @contextlib.contextmanager
    def _prints_noted(self) -> Iterator[None]:
        """Context in which what the script prints is noted too."""
        stream = sys.stdout
        plain = stream.write

        def write(text: str) -> int:
            if self._pass is not None:
                self._pass.printed[place_of(sys._getframe(1))] += text
            return plain(text)

        stream.write = write  # type: ignore[method-assign]
        try:
            yield
        finally:
            stream.write = plain  # type: ignore[method-assign]

    def _state(self) -> _StepState:
        return _StepState(
            random=random_state(),
            variables=[
                (names, {name: value for name, value in names.items() if type(value) in PLAIN})
                for names in _namespaces()
            ],
            buffers=[(buffer, buffer.detach().clone()) for buffer in buffers_alive()],
            gradients=[each.grad for each in parameters_of(self._optimizers)],
        )

    def _restore(self, state: _StepState) -> None:
        set_random_state(state.random)
        for names, before in state.variables:
            names.update(before)
        with torch.no_grad():
            for buffer, before in state.buffers:
                buffer.copy_(before)
        for each, gradient in zip(parameters_of(self._optimizers), state.gradients, strict=False):
            each.grad = None if gradient is None else gradient.to(each.dtype, copy=True)

    def _norms(self, all_rows: Pass) -> list[float]:
        return norms_of(all_rows.first, len(parameters_of(self._optimizers)))

    def _own_statistics_off(self) -> AbstractContextManager[None]:
        return _statistics_off() if self._synchronised else contextlib.nullcontext()

    def _refuse(self, why: str) -> NoReturn:
        self.found = Rehearsed(refused=why)
        raise RehearsalOver


def _is_for_loop(frame: types.FrameType | None) -> bool:
    """Returns whether it is a loop of the script that asks for a batch."""
    while frame is not None and not is_own_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame is not None and dis.opname[frame.f_code.co_code[frame.f_lasti]] == "FOR_ITER"


def _namespaces() -> list[dict[str, Any]]:
    """Returns the variables of the script's modules, and the attributes of its classes' objects."""
    modules = own_modules()
    objects = [each for each in alive(object) if type(each).__module__ in modules and hasattr(each, "__dict__")]
    return [vars(each) for each in (*modules.values(), *objects) if isinstance(vars(each), dict)]


def _sizes() -> dict[tuple[Any, ...], NDArray[Any]]:
    """Returns of each variable of the script the sum of its numbers, the number of its values and its tensors' sum.

    By where the variable is, its name, and its shape or type.
    """
    spaces, frame = _namespaces(), sys._getframe(1)
    while frame is not None:
        if is_own_file(frame.f_code.co_filename) and frame.f_code.co_name != "<module>":
            spaces.append(frame.f_locals)
        frame = frame.f_back  # type: ignore[assignment]
    sizes: dict[tuple[Any, ...], NDArray[Any]] = {}
    for names in spaces:
        for name, value in list(names.items()):
            if not isinstance(value, (*PLAIN, Tensor, np.ndarray, *CONTAINERS, set)) or name.startswith(OF_MODULES):
                continue
            values = value.values() if isinstance(value, dict) else value
            leaves = tree_leaves([*values] if isinstance(values, (*CONTAINERS, set, ValuesView)) else [values])
            arrays = [each for each in leaves if isinstance(each, np.ndarray) and each.dtype.kind in "biuf"]
            numbers = [
                float(each) for each in leaves if isinstance(each, bool | int | float | np.number) and abs(each) < LARGE
            ]
            numbers += [float(each.sum()) for each in arrays] + [
                float(len(each)) for each in leaves if type(each) is str
            ]
            tensors = [each.detach() for each in leaves if isinstance(each, Tensor) and each.numel() <= MOST_SUMMED]
            total = sum(PLAIN_ITEM(each.double().sum()) for each in tensors if each.layout is torch.strided)
            count = len(leaves) + sum(each.size for each in arrays)
            kind = value.shape if isinstance(value, Tensor) else type(value)
            sizes[id(names), name, kind] = np.array([sum(numbers), count, total])
    return sizes


def _without_none(rules: Mapping[str, Rule | None]) -> dict[str, Rule]:
    return {line: rule for line, rule in rules.items() if rule is not None}


@contextlib.contextmanager
def _statistics_off() -> Iterator[None]:
    """Context in which batch normalisation takes its running statistics."""
    plain = BatchNormBase.forward

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        training, module.training = module.training, False
        try:
            return plain(module, x)  # type: ignore[arg-type]
        finally:
            module.training = training

    BatchNormBase.forward = forward  # type: ignore[method-assign]
    try:
        yield
    finally:
        BatchNormBase.forward = plain  # type: ignore[method-assign]


@contextlib.contextmanager
def _draws_off() -> Iterator[None]:
    """Context in which each draw gives its mean, and batch normalisation its running statistics."""
    with _statistics_off(), RandomOps(off=True):
        yield
