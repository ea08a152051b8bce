"""The loop of a training: steps, evaluations, saves and watchers, until the last step or a stop.

Numbers of a step are read one step late, when the device has computed them, so that no step waits for its loss.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim import Optimizer

from grappe.checkpoint.format import Checkpoint
from grappe.checkpoint.saver import SAMPLES, Saver
from grappe.checkpoint.weights import AVERAGE, Weights, read_into
from grappe.data.batch import Batch
from grappe.data.loader import BatchLoader
from grappe.data.sampling import samples_seen
from grappe.data.stream import POSITION, StreamBatches
from grappe.engines.base import Engine
from grappe.engines.shared.carried import CarriedState
from grappe.engines.shared.microbatch import remarks_on_draws
from grappe.engines.shared.state import SavedState
from grappe.errors import DivergedError, GrappeError, RunError, TaskError
from grappe.errors.remedies import OVERWRITTEN, remedy
from grappe.errors.user_code import is_users, sentence
from grappe.errors.user_line import FRAME, Line, at, is_users_file
from grappe.launch.signals import StopSignal
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.private_api.torch import foreach_add_, foreach_mul_, tree_leaves, tree_map
from grappe.profiling import memory, phases
from grappe.profiling.chronometer import Chronometer, StepTimes
from grappe.step.clip import local_part
from grappe.step.loss import HostCopy, StepResult, loss_of
from grappe.step.scores import Scores, SliceSums, TrainingScores
from grappe.step.task_contract import Plateau, model_of
from grappe.task import Task, overrides, split_name
from grappe.training.bottleneck import BottleneckMeter
from grappe.training.checked_steps import CheckedSteps
from grappe.training.headspace import Headspace
from grappe.training.options import SAVE_SECONDS, Options
from grappe.training.run import Run
from grappe.training.watchdog import Watchdog
from grappe.training.watchers.base import Outcome, Record, RunInfo
from grappe.training.watchers.curves import SampleLog
from grappe.training.watchers.watcher_list import WatcherList
from grappe.words import format_seconds, host_name

DELIVERY_SECONDS = 0.1  # quick steps are passed to the watchers in groups: then a step pays for none of them
SAVING = (1.0, 0.05)  # seconds, and the part of the time, that saving each epoch may take
COMPUTING = (phases.FORWARD, phases.BACKWARD, phases.UPDATE)


@dataclasses.dataclass(kw_only=True)
class LoopState:
    """State of a training that each checkpoint stores beyond the engine's state."""

    best_loss: float = math.inf
    since_best: int = 0
    """Evaluations since the one with the lowest loss."""
    evaluation_pending: bool = False
    """Whether a signal came before the evaluation that was due: it is made when the training resumes."""
    scores: Scores | None = None
    """Scores of this start's last evaluation."""
    evaluated_step: int = -1

    def note(self, step: int, scores: Scores) -> None:
        """Notes the evaluation after `step`."""
        self.scores, self.evaluated_step = scores, step
        if scores.loss < self.best_loss:
            self.best_loss, self.since_best = scores.loss, 0
        else:
            self.since_best += 1

    def as_json(self, step: int) -> dict[str, Any]:
        """Returns JSON for the checkpoint of `step`."""
        best = self.best_loss if math.isfinite(self.best_loss) else None
        return {
            "patience": {"best": best, "since": self.since_best},
            "evaluation_owed": self.evaluation_pending,
            "validation_loss": self.scores.loss if self.scores and self.evaluated_step == step else None,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Restores a checkpoint's JSON."""
        saved = values.get("patience", {})
        best = saved.get("best")
        self.best_loss, self.since_best = (math.inf if best is None else float(best), int(saved.get("since", 0)))
        self.evaluation_pending = values.get("evaluation_owed") is True


class Pending(NamedTuple):
    """A step whose numbers are still on the device."""

    result: StepResult
    seconds: float
    phases: Sequence[float]
    """Host seconds by phase."""
    count: HostCopy | None
    """The loss's divisor, if it is on the device: the number of counted targets."""
    norm: HostCopy | None
    scores: SliceSums | None
    """Scores of training batches; None if they are not shown after this step."""


@dataclasses.dataclass(kw_only=True, eq=False)
class Training:
    """One start of a training in one process: its parts, made before the first step, and the loop over its steps."""

    task: Task
    options: Options
    info: RunInfo
    world: World
    engine: Engine
    batches: BatchLoader
    """The training batches."""
    validation: BatchLoader
    sample_log: SampleLog | None
    """Log of the samples of steps and evaluations; None: it is not kept."""
    clock: Chronometer
    watchers: WatcherList
    watchdog: Watchdog
    stop_signal: StopSignal
    saver: Saver
    average: WeightAverage
    carried: CarriedState
    stream: StreamBatches | None
    """Stream of the training samples; None if samples are read by index."""
    training_scores: TrainingScores
    loading_cost: Callable[[StepTimes], Headspace]
    """Computes what waiting for samples has cost. Collective."""
    meter: BottleneckMeter
    check: CheckedSteps | None
    """Compares steps with one process's; None: there is one process, or nothing to compare."""
    first_use: Callable[[], AbstractContextManager[None]]
    """Context of the first evaluation, which measures the memory that libraries keep."""

    def __post_init__(self) -> None:
        options, info = self.options, self.info
        self.progress = LoopState()
        self.step = info.start
        """Optimizer steps done, in earlier starts too."""
        self._evaluates = not options.steps_only
        self._evaluate_every = options.evaluations_every(info.steps_per_epoch) or math.inf
        self._save_every = options.saves_every(info.steps_per_epoch) or math.inf
        self._prints_after = options.printing(info.steps_per_epoch)
        self._pending: Pending | None = None
        self._undelivered: list[Record] = []  # not yet given to the watchers
        self._undelivered_seconds = 0.0
        self._delivery_seconds = 0.0 if self.watchers.prompt else DELIVERY_SECONDS
        self._stop: str | None = None
        self._saved_step = -1
        self._saving_seconds, self._began = 0.0, time.perf_counter()
        self._asks_to_save = self.world.rank == 0 and options.save_every is None and self._evaluates
        self._saved_at, self._save_asked = self._began, False
        self._limited = ""

    def resume(self, checkpoint: Checkpoint, tensors: Weights) -> None:
        """Resumes from the checkpoint whose weights the engine was made with. Collective.

        Args:
            tensors: the checkpoint's tensors; the engine has the model's already, which are not read again.

        Raises:
            RunError: the checkpoint verifies, but has content that no training of grappe wrote.
        """
        info = self.info
        values = checkpoint.read_values()
        here = samples_seen(checkpoint.step, info.samples, info.batch_size)
        if values.get(SAMPLES, here) != here:
            raise RunError(
                f"{checkpoint.folder} was saved after {values[SAMPLES]} samples, and step {checkpoint.step} of this "
                f"training comes after {here}: it belongs to another training. Start a new run from its weights: "
                f"--from {info.folder}"
            )
        try:
            saved = SavedState(tensors=tensors, values=values.get("engine", {}), model_loaded=True)
            # The optimizer's state has a meaning only to the engine that saved it.
            same_engine = values.get("engine_name") == info.engine
            self.engine.train_state.restore(saved if same_engine else saved.weights_only())
            self.progress.restore(values)
            self.average.restore(tensors)
            self.carried.restore(tensors, self.world)
        except (TypeError, ValueError, KeyError, AttributeError, IndexError) as error:
            raise RunError(
                f"{checkpoint.folder} verifies, but its state cannot be resumed from "
                f"({type(error).__name__}: {error}). Start a new run from its weights: --from {info.folder}"
            ) from error

    def run(self) -> Outcome:
        """Trains until the last step, or until a signal, a limit or patience stops it. Collective.

        Raises:
            DivergedError: the loss is not a number any more.
        """
        clock, engine = self.clock, self.engine
        start = self.info.start
        self.watchers.call("started", self.info)
        clock.begin()
        self.watchdog.start(start)
        outcome = None
        try:
            if self.progress.evaluation_pending:
                self._evaluate(start)
            elif not start:
                with self.first_use():
                    self._rehearse_evaluation()
            self.engine.train(self._timed(self._read("step", self.batches, start, self.info.last_step)), self.after)
            clock.finish()
            self._read_previous_step()
            self._notify_watchers()
            with clock.during(phases.CHECKPOINT):
                problem = self.saver.wait()  # so that the end of a training loses nothing
            if problem is not None:
                raise RunError(f"{problem}. The checkpoint before it is whole: free some space, and start again")
            timing = clock.timing()
            waits = self.loading_cost(timing)
            outcome = Outcome(
                status=self._stop or ("finished" if self.step >= self.info.total_steps else "paused"),
                step=self.step,
                scores=self.progress.scores,
                peaks=self.world.gather({**memory.peak(self.world.device), **clock.held}),
                timing=timing,
                headspace=waits,
                bottleneck=self._bottleneck(waits),
                remarks=[
                    *engine.remarks(),
                    *self.batches.remarks(),
                    *self.carried.remarks,
                    *remarks_on_draws(Plan.parse(self.info.plan), self.world.device),
                ],
                limited_validation=self._limited,
            )
        except DivergedError:  # on every process; the best that there was is kept
            self.saver.write_held()
            raise
        finally:
            self.watchdog.stop()
            self.saver.close()
            try:
                self._notify_watchers()
            finally:
                self.watchers.call("ended", outcome)
        return outcome

    def _bottleneck(self, waits: Headspace) -> str:
        """Says what holds the training back most; "" if nothing stands out. Collective."""
        return self.meter.sentence(waits.workers, waits.advice, waits.share if waits.advice else 0.0)

    def _read(self, kind: str, loader: BatchLoader, start: int, stop: int) -> Iterator[Batch]:
        log = self.sample_log
        return loader.batches(start, stop) if log is None else log.batches(kind, loader, start, stop)

    def _timed(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yields the same batches; the wait for each counts as data, the time after it as forward."""
        switch = self.clock.switch
        switch(phases.DATA)
        check = self.check
        for batch in batches:
            if check is not None and check.is_due(batch.step):
                with self.clock.during(phases.START):
                    check.before(batch, self.engine)
            switch(phases.FORWARD)
            yield batch
            switch(phases.DATA)
        switch(phases.WATCHING)

    def after(self, result: StepResult) -> bool:
        """Evaluates, saves and reports after a step; returns True when the training should stop."""
        seconds = self.clock.end_step()
        if self.check is not None and self.check.is_running:
            steps = 1 + self.check.steps
            with self.clock.during(phases.START), self.watchdog.steps_at_once(steps):
                finding = self.check.after(result)
            if finding:
                self.watchers.call("checked", result.batch.step, finding)
        if self._asks_to_save and time.perf_counter() - self._saved_at > SAVE_SECONDS:
            self.stop_signal.ask_to_save(True)
        if self.stop_signal.deadline is not None:
            self.stop_signal.check_time()
        self._read_previous_step()
        if self.average.kept and not result.skipped:
            with self.clock.during(phases.UPDATE):
                self.average.update()
        batch, norm = result.batch, result.norm
        count = None if batch.count.__class__ is float else HostCopy(batch.count)  # type: ignore[arg-type]
        self.step = self.watchdog.step = step = batch.step + 1
        prints = self._prints_after is not None and self._prints_after(step)
        scores = self.training_scores.copied() if prints else None
        spent, size = self.clock.last_step, None if norm is None else HostCopy(norm)
        self._pending = Pending(result, seconds, spent, count, size, scores)
        self.watchdog.marks += 1
        if self.meter.stepped() and (says := self._bottleneck(self.loading_cost(self.clock.timing()))):
            self.watchers.call("noted", step, says)
        last = step == self.info.last_step and self._evaluates
        evaluate = last or not step % self._evaluate_every
        save = last or not step % self._save_every
        if not (evaluate or save or self._save_asked or self._stop is not None):
            return False
        self._read_previous_step()
        self._notify_watchers()
        # A signal does not wait for an evaluation: it stays pending, and is made when the training resumes.
        self.progress.evaluation_pending = evaluate and self._stop is not None
        if evaluate and not self.progress.evaluation_pending:
            self._evaluate(step)
        if last or self._stop is not None or ((save or self._save_asked) and self._save_is_due()):
            self._save(step)
        elif save and self.progress.evaluated_step == step and not self.progress.since_best:
            self._save(step, hold=True)
        self._saved_at = time.perf_counter() if save or self._save_asked else self._saved_at
        if self._save_asked:
            self._save_asked = False
            self.stop_signal.ask_to_save(False)
        return self._stop is not None

    def _read_previous_step(self) -> None:
        """Reads the numbers of the step before: one step late, when the device has computed them."""
        if self._pending is None:
            return
        (result, seconds, spent, count, norm, scores), self._pending = self._pending, None
        batch, info, watchdog = result.batch, self.info, self.watchdog
        watchdog.waiting = True
        total, flag = result.sums.read()
        metrics = {} if scores is None else self.training_scores.so_far(scores)
        watchdog.waiting = False
        step, epoch = batch.step, batch.epoch
        loss = total / float(batch.count if count is None else count.read())
        within = (step % info.steps_per_epoch + 1) * info.batch_size
        samples = epoch * info.samples + min(within, info.samples)
        size = None if norm is None else float(norm.read())
        # By position, as names take a microsecond.
        # A schedule of NumPy's numbers makes the rate one of them, which JSON does not know.
        rate = float(result.lr)
        # A GPU computes while the host is in another phase.
        device = None if info.device != "cpu" else sum(spent[phase] for phase in COMPUTING)
        rest = (seconds, size, result.skipped, flag, metrics, spent[phases.DATA], device)
        record = Record(step + 1, epoch, samples, loss, rate, *rest)
        if not (math.isfinite(loss) or record.skipped):
            raise self._diverged(record, batch, result.sums.own)
        self._undelivered.append(record)
        self._undelivered_seconds += seconds
        if self._undelivered_seconds > self._delivery_seconds:
            self._notify_watchers()
        if flag > 0 and self._stop is None:
            self._stop = "interrupted"
        self._save_asked = self._save_asked or flag < 0

    def _diverged(self, record: Record, batch: Batch, own: Sequence[Tensor]) -> DivergedError:
        """Returns the error of a loss that is no number: whose samples it was, if not everybody's. Collective."""
        world, order = self.world, self.batches.order
        ids = order.samples(order.ids(batch.epoch, batch.step % self.info.steps_per_epoch))
        rows = world.gather((all(map(math.isfinite, map(float, own))), host_name(), order.samples(batch.ids)))
        of_them = [rank for rank, row in enumerate(rows) if not row[0]]
        alone = 0 < len(of_them) < world.size
        nodes = sorted({rows[rank][1] for rank in of_them})
        where = ""
        if alone:
            ids = [index for rank in of_them for index in rows[rank][2]]
            where = f", on process {', '.join(map(str, of_them))} of {world.size} alone (node {', '.join(nodes)})"
        targets = tree_leaves([micro.targets for micro in batch.microbatches])
        decimal = [leaf for leaf in targets if isinstance(leaf, Tensor) and leaf.is_floating_point()]
        way_out = "Try a lower lr, clip=1, or look at those samples"
        if overrides(self.task, "counts") and not all(leaf.isfinite().all() for leaf in decimal):
            way_out = (
                "Targets are not finite, and 0 x NaN is NaN, in the gradient too, where counts() is 0: write "
                f"target = target.nan_to_num() in loss(){at(self.task, 'loss')}"
            )
        shown = ", ".join(str(index) for index in ids[:16]) + (", …" if len(ids) > 16 else "")
        error = DivergedError(
            f"the loss is {record.loss} in epoch {record.epoch + 1}, step {record.step}{where} (sample ids {shown}). "
            f"No checkpoint was overwritten: the last one is from an earlier step. {way_out}"
        )
        if alone and len(nodes) == 1 and len({row[1] for row in rows}) > 1:
            error.nodes = {nodes[0]: f"step {record.step}, loss {record.loss} of samples {shown} alone"}
        return error

    def _notify_watchers(self) -> None:
        """Passes to the watchers the steps that they have not seen."""
        if not self._undelivered:
            return
        records, self._undelivered, self._undelivered_seconds = self._undelivered, [], 0.0
        self.stop_signal.reserve(step=max(record.seconds for record in records))
        self.watchers.stepped(records)

    def _evaluate(self, step: int) -> None:
        """Evaluates after `step`; stops the training when patience is exhausted. Collective."""
        order = self.validation.order
        total, limit = order.steps_per_epoch, self.options.validation_batches
        taken = min(total, limit or total)
        batches = self.watchdog.counted(self._read("evaluation", self.validation, 0, taken))
        weights = self.engine.train_state.evaluated_weights()
        began = time.perf_counter()
        with self.clock.during(phases.EVALUATION), weights, self.average.in_place():
            scores = self.engine.evaluate(batches, min(order.length, taken * order.batch_size))
            scores = self.training_scores.joined(scores)
        scores = dataclasses.replace(scores, split=split_name(self.task, "validation"))
        if taken < total:
            seconds = time.perf_counter() - began
            self._limited = (
                f"the first {taken} of {total} batches took {format_seconds(seconds)}: all of them would take about "
                f"{format_seconds(seconds / taken * total)}"
            )
        self.progress.note(step, scores)
        if isinstance(plateau := self.engine.train_state.schedule, Plateau):
            plateau.evaluated(plateau.score(scores.loss, scores.metrics))
        self.watchers.call("evaluated", step, scores)
        patience = self.options.patience
        if patience is not None and self.progress.since_best >= patience:  # the same on every process
            self._stop = "stopped"

    def _rehearse_evaluation(self) -> None:
        """Evaluates one batch and forgets it, so that a TaskError of evaluation alone comes now. Collective."""
        if not self._evaluates:
            return
        order = self.validation.order
        batches = self.watchdog.counted(self.validation.rehearsed())
        try:
            with self.clock.during(phases.EVALUATION), refusing_late_parameters():
                scores = self.engine.evaluate(batches, min(order.batch_size, order.length))
            if isinstance(plateau := self.engine.train_state.schedule, Plateau):
                plateau.score(scores.loss, scores.metrics)
        except Exception as error:
            if isinstance(error, GrappeError) or not is_users(error):
                raise  # an error about the task's contract needs no note on where it was seen first
            raise TaskError(
                f"evaluation fails (one batch of it is tried before the first step): {sentence(error, self.task)}"
            ) from error

    def _save_is_due(self) -> bool:
        """Returns whether to save now: where the user does not say when, by what saving has taken. Collective."""
        if self.options.save_every is not None:
            return True
        least, part = SAVING
        allowed = max(least, part * (time.perf_counter() - self._began))
        return self.world.share(self._saving_seconds <= allowed)

    def _save(self, step: int, *, hold: bool = False) -> None:
        """Saves the state after `step`, unless it is saved already; mostly in the background. Collective.

        Args:
            hold: copy it only: the next save writes it first. A start that is killed before then comes to it again.

        Raises:
            RunError: the save before this one failed, with `stop_on_failed_save`.
        """
        if step == self._saved_step:
            return
        info = self.info
        began = time.perf_counter()
        self.engine.before_save()
        with self.clock.during(phases.CHECKPOINT):
            if not hold:
                self.watchers.call("saving", step)
            state = self.engine.train_state.state()
            values: dict[str, Any] = {
                "engine_name": info.engine,
                "engine": dict(state.values),
                **self.progress.as_json(step),
                SAMPLES: samples_seen(step, info.samples, info.batch_size),
                **({} if self.stream is None else {POSITION: self.stream.position(step)}),
            }
            averages, stream = self.average.tensors(), state.stream
            if stream is not None and averages:
                engines = stream
                stream = lambda: itertools.chain(engines(), averages.items())  # noqa: E731
            self.carried.refuse_resized()
            own = {**state.local, **self.carried.tensors(self.world)}
            tensors = {**state.tensors, **averages}
            if self.progress.evaluated_step == step and not self.progress.since_best:
                self.saver.forget()  # this one is better
            if hold and stream is None:
                problem = self.saver.hold(step, tensors, own, values)
            else:
                problem = self.saver.save(step, tensors, own, values, stream)
                self._saved_step = step
        if problem is not None:
            if not Run.is_run(info.folder):
                raise RunError(
                    f"{problem}. The run's folder {info.folder} is gone or was moved, so nothing can be "
                    "saved any more: if it was moved, move it back, and start again"
                )
            if self.options.stop_on_failed_save:
                raise RunError(f"{problem}. The checkpoint before it is whole")
            self.watchers.call("failed_to_save", problem)
        seconds = time.perf_counter() - began
        self._saving_seconds += seconds
        self.stop_signal.reserve(saving=seconds)


ANOMALY = re.compile("Traceback of forward call")


@contextlib.contextmanager
def naming_overwritten(task: Task, loader: BatchLoader, plan: Plan) -> Iterator[None]:
    """Context in which backward's error about an overwritten tensor names the line that made the tensor.

    This process alone repeats the forward for that; where it has a part of the model, without values.
    """
    try:
        yield
    except RuntimeError as error:
        line = None
        if OVERWRITTEN.search(str(error)):
            place = torch.device("cpu" if plan.replicate == plan.processes else "meta")
            with contextlib.suppress(Exception):  # without a line the message stays as it was
                line = _line_overwritten(task, loader, place)
        if line is None:
            raise
        raise TaskError(
            f"backward needs the result of this line, which is changed in place afterwards ({line}). "
            f"{remedy(str(error))}"
        ) from error


def _line_overwritten(task: Task, loader: BatchLoader, place: torch.device) -> Line | None:
    inputs, targets = tree_map(
        lambda leaf: leaf.to(place) if isinstance(leaf, Tensor) else leaf, loader.example_batch()
    )
    with (
        place,
        warnings.catch_warnings(record=True) as caught,
        torch.autograd.set_detect_anomaly(True, check_nan=False),
    ):
        warnings.simplefilter("always")
        model = model_of(task).to(place)
        values = loss_of(task, task.forward(model, inputs), targets).values
        with contextlib.suppress(RuntimeError):
            values.sum().backward()
    text = next((str(warning.message) for warning in caught if ANOMALY.search(str(warning.message))), "")
    lines = [Line(file, int(number), name) for file, number, name in FRAME.findall(text)]
    return next((line for line in reversed(lines) if is_users_file(line.file)), None)


@contextlib.contextmanager
def refusing_late_parameters() -> Iterator[None]:
    """Context of a forward that may make no parameter: no optimizer would train it, no checkpoint have it."""

    def refuse(module: nn.Module, name: str, parameter: Any) -> None:
        stack = traceback.extract_stack()[:-1]
        made = next((frame for frame in reversed(stack) if not frame.filename.endswith("modules/module.py")), None)
        if (
            parameter is None
            or name in dict(module.named_parameters(recurse=False))
            or made is None
            or not is_users_file(made.filename)
        ):
            return
        line = Line(made.filename, made.lineno or 0, made.name)
        raise TaskError(
            f"{type(module).__name__} makes the parameter '{name}' in its forward, where the optimizer does not learn "
            f"of it: make it in __init__() ({line})"
        )

    handle = register_module_parameter_registration_hook(refuse)
    try:
        yield
    finally:
        handle.remove()


class WeightAverage:
    """Averages this process's part of each trained parameter: average <- decay average + (1 - decay) weight.

    It begins with the first weights. Each number is averaged on its own, so a plan changes nothing.
    """

    def __init__(self, decay: float | None) -> None:
        self._decay = decay
        self.kept = decay is not None
        """True if there is an average: the task's `ema`."""
        self._weights: dict[str, nn.Parameter] = {}
        self._averages: dict[str, Tensor] = {}

    def watch(self, optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]]) -> None:
        """Begins with the weights as they are; for `Observers.optimizer`."""
        if self.kept:
            self._weights = dict(named)
            self._averages = {name: parameter.detach().clone() for name, parameter in named}

    def restore(self, tensors: Weights) -> None:
        """Restores the averages from a checkpoint; parameters without one start from the current weights."""
        for name, average in self._averages.items():
            average.copy_(self._weights[name].detach())
            if AVERAGE + name in tensors:
                read_into(average, tensors, AVERAGE + name)

    @torch.no_grad()
    def update(self) -> None:
        """Updates the average after a step."""
        assert self._decay is not None, "no average is kept"
        if not self._averages:  # a pipeline's stage that is frozen
            return
        averages = [local_part(average) for average in self._averages.values()]
        weights = [local_part(weight) for weight in self._weights.values()]
        # Not lerp: it would round parts of a tensor differently from the whole tensor.
        foreach_mul_(averages, self._decay)
        foreach_add_(averages, weights, alpha=1 - self._decay)

    def tensors(self) -> dict[str, Tensor]:
        """Returns the averaged tensors to save: sharded as the weights are."""
        return {AVERAGE + name: average for name, average in self._averages.items()}

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Context in which the model has the averages as its weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for name, held in self._averages.items():
            weight, average = local_part(self._weights[name].detach()), local_part(held)
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)
