"""Loop: runs a hand-written training loop under a plan.

    with grappe.Loop(run="runs/gan") as loop:
        model, optimizer = loop.parallelize(model, optimizer)        # any number of pairs
        for epoch in loop.epochs(5):
            for inputs, targets in loop.batches(dataset, batch_size=64):
                loss = criterion(model(inputs), targets)             # then backward and step, as before

Start the script by `grappe launch --plan replicate=2 script.py`, by torchrun or by srun; directly, it has one process.
A batch's tensors look like the whole batch's, and hold this process's rows (`grappe.rows`).
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from grappe.checkpoint.weights import read_into
from grappe.data.batch import Batch
from grappe.data.corpus.mixture import drawn_from
from grappe.data.loader import evaluation_loader, training_loader
from grappe.data.sampling import SampleOrder, Sampling
from grappe.engines.native import Native
from grappe.engines.shared.state import ModelState, SavedState
from grappe.errors import EXIT_INTERRUPTED, GrappeError, PlanError, UsageError
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.launch.start import start
from grappe.parallel.shard import reshard
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.profiling.chronometer import waits_counted
from grappe.profiling.phases import CHECKPOINT, DATA, EVALUATION, FORWARD
from grappe.rows.messages import check_in_step
from grappe.rows.tensor import full
from grappe.step.fast_paths import seed_dropout
from grappe.step.precision import set_gpu_arithmetic
from grappe.training.interception import alive
from grappe.training.own_loop_objects import KeptObjects
from grappe.training.own_loop_run import LoopFolder
from grappe.training.own_loop_steps import LoopBatches, LoopSteps
from grappe.training.own_loop_world import PLAN, Joined, join_world
from grappe.training.rows_step import is_checked
from grappe.training.watchers.base import Record

SUPPORTED_KEYS = frozenset({
    "engine", "device", "backend", "replicate", "shard", "zero", "threads", "workers", "loading", "prefetch",
    "per_device", "precision", "batchnorm", "dropout", "channels_last", "recompute", "compile", "offload",
    "validation_batch",
})  # fmt: skip
GRADIENT = "gradient."
"""Prefix of a gradient in a checkpoint: a script may add to it over several batches."""


class Pair(NamedTuple):
    """A model and what trains it."""

    model: nn.Module
    optimizer: Optimizer
    state: ModelState


class _Position(NamedTuple):
    """Position of the calls of `batches`."""

    step: int = 0
    """Number of optimizer steps of the calls that have begun."""
    epochs: int = 0
    """Epochs of the calls, on which the order of the samples depends."""
    drawn: dict[str, int] | None = None
    """Samples of the calls that have ended, by the sources of a mixture."""


class Loop:
    """Parts of a plan for a hand-written loop: parallelized models, batches as rows, checkpoints, curves, a clock.

    Args:
        plan: data parallelism, and what else a loop can have; None: the plan of `grappe launch`, or one process.
        run: the folder of the run; None: nothing is saved. A restarted loop resumes from its last checkpoint.
        save_every: steps between checkpoints.
        seed: the seed of the sample order, and of each step's random numbers.

    Raises:
        PlanError: the plan has keys that only an engine supports, or does not fit the number of processes.
    """

    def __init__(
        self, plan: AnyPlan | None = None, run: Path | str | None = None, *, save_every: int = 100, seed: int = 0
    ) -> None:
        began = time.perf_counter()
        self.plan = _plan_of(plan)
        process = Joined.process or rank_from_environment() or ProcessRank(launcher="own loop")
        if process.launcher == "own loop" and self.plan.processes > 1:
            raise UsageError(
                f"plan {self.plan} needs {self.plan.processes} processes: start this script with "
                f"grappe launch --plan {self.plan} {Path(sys.argv[0]).name or 'SCRIPT'}, with torchrun or with srun"
            )
        folder = Path(run) if run is not None else None
        self.world = join_world(self.plan, process, folder or Path())
        self.device = self.world.device
        self.step = 0
        """Batches done, over restarts."""
        self._samples = 0
        """Number of samples in the batches since this start."""
        self._closed = False
        self._seed, self._save_every = seed, save_every
        set_gpu_arithmetic(self.plan.precision)
        self._steps, self._log = LoopSteps.of(self.plan, self.world, began)
        self._log.check = self._refuse_other_shapes
        self.chronometer = self._log.chronometer
        self._pairs: list[Pair] = []
        self._spread: set[int] = set()
        """The ids of the models' parameters."""
        self._kept = KeptObjects()
        self._log.stop.install()
        self._waits = contextlib.ExitStack()
        self._waits.enter_context(waits_counted(self.chronometer))
        self._folder = LoopFolder(folder, self.plan, self.world, seed) if folder is not None else None
        self._log.folder = self._folder
        if self._folder is not None:
            self._log.meter.started(self._folder.info)
        self._found = self._folder.checkpoint if self._folder is not None else None
        self._now, self._before = _Position(), _Position()
        """After the calls of `batches` so far; and before those of the running epoch."""
        self._drawn: tuple[int, Callable[[int], Mapping[str, int]]] = 0, lambda step: {}
        """The step at which the running call of `batches` began, and what counts the samples of a mixture's sources."""
        self._epoch = 0
        if self._found is not None:
            self.step = self._found.step
        atexit.register(self._close_at_exit)

    def __enter__(self) -> Loop:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._close(error)

    @staticmethod
    def launch(function: Callable[..., Any], *arguments: Any, plan: AnyPlan = "") -> Any:
        """Calls function(*arguments), which makes a Loop(), on the processes of a plan; for a notebook.

        The function, classes of the notebook and arguments are sent by value; process 0 prints.

        Returns:
            What process 0 returns.

        Raises:
            GrappeError: a process failed.
        """
        chosen = as_plan(plan)
        return start(
            "grappe.training.own_loop_world:call_function", (function, arguments, str(chosen)), chosen, saves=True
        )

    # ---- What is trained ----

    def parallelize(
        self, model: nn.Module, optimizer: Optimizer, *, units: Sequence[nn.Module] | None = None
    ) -> tuple[nn.Module, Optimizer]:
        """Moves the model to its device, spreads it as the plan says, and puts its new parameters into the optimizer.

        Call it for each pair in the same order on every process, before `batches`, and again for a model's further
        optimizers. All processes begin with process 0's weights, or with the checkpoint's. The model stays itself:
        nothing is wrapped around it. Collective.

        Args:
            units: blocks in order, each of which is sharded, recomputed or compiled at once; None: repeated blocks
                are found, those of an nn.ModuleList for instance.

        Raises:
            UsageError: the optimizer has taken a step already, or has parameters that are not the model's.
            TaskError: the model or the optimizer cannot have a key of the plan.
        """
        if optimizer.state:
            raise UsageError("parallelize() comes before the optimizer's first step")
        if not any(pair.model is model for pair in self._pairs):  # else it has a further optimizer
            if not self._spread.isdisjoint(map(id, model.parameters())):
                raise UsageError("parallelize(): a part of this model is spread already: give the same whole model")
            model.to(self.device)
            for tensor in (*model.parameters(), *model.buffers()) if self.world.size > 1 else ():
                dist.broadcast(tensor.detach(), 0)
            # A sharded model has other parameters, which its further optimizers get, too.
            self._steps.keys.prepare(model, alive(Optimizer) if self.plan.uses_fsdp else [optimizer], units)
        own = set(map(id, model.parameters()))
        self._spread |= own
        if any(id(each) not in own for group in optimizer.param_groups for each in group["params"]):
            raise UsageError("parallelize(): the optimizer has parameters that are not this model's")
        self._steps.add_optimizer(optimizer)
        named = nn.ModuleDict({str(len(self._pairs)): model})  # a name for each pair
        scale = self._steps.keys.scale
        state = ModelState(model=named, optimizer=optimizer, schedule=None, world=self.world, loss_scale=scale)
        if self._found is not None:
            values = self._found.read_values().get("engine", {})
            state.restore(SavedState(tensors=self._found.read_tensors(), values=values))
        self._pairs.append(Pair(model, optimizer, state))
        self._log.watch(optimizer)
        return model, optimizer

    def keep(self, **objects: Any) -> None:
        """Puts further objects with a `state_dict` into the checkpoints, by name: `loop.keep(schedule=schedule)`.

        Call it before the first batch. A resumed loop restores them where it goes on.
        """
        self._kept.add(objects)
        for kept in objects.values() if self._steps.keys.scale.is_dynamic else ():
            if isinstance(kept, LRScheduler):
                self._steps.keys.leave_out(kept)

    # ---- The loop ----

    def epochs(self, number: int) -> Iterator[int]:
        """Yields the numbers of the epochs, 0 to number - 1; a resumed loop begins with the one that it stopped in.

        What follows the batches in an epoch's body, an evaluation or a schedule's step, is run again if the loop was
        stopped in between, with what was saved after the epoch's last batch.
        """
        if self._found is not None:
            place = self._found.read_values().get("loop", {})
            self._epoch = int(place.get("epoch", 0))
            self._now = _Position(*place.get("before", _Position()))
        for epoch in range(self._epoch, number):
            self._epoch, self._before = epoch, self._now
            yield epoch

    def batches(
        self,
        dataset: Dataset,
        batch_size: int,
        epochs: int = 1,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
        sampling: Sampling | None = None,
    ) -> Iterator[Any]:
        """Yields batches of `batch_size`, of which each process has its rows, on the device; resumes after a restart.

        Each epoch has every sample once, in an order that depends on `seed` and the number of epochs so far; the last
        batch may be short. A further call goes on with further epochs. After a step a checkpoint is saved if due, and
        on a signal, which then ends the process with exit code 75. Collective.

        Args:
            collate: makes a batch of the list of all its samples, which each process loads then; None: torch's
                default_collate, of a process's own.
            sampling: which samples an epoch has, and how often.
        """
        if self._steps.running is not None:
            raise UsageError(
                "batches() inside of batches(), as in a zip of two: give one dataset, of which each sample has a part "
                "of both, such as torch.utils.data.StackDataset"
            )
        call = LoopBatches(batch_size=batch_size, epochs=epochs, seed=self._seed)
        source, own = self._steps.loader(training_loader, call, dataset, collate, sampling)
        self._log.workers = None if source.loading is None else source.loading.workers
        each = source.order.steps_per_epoch
        before = self._now
        first, begin = before.epochs * each, before.step
        end = begin + epochs * each
        self._now = _Position(end, before.epochs + epochs, before.drawn)
        self._drawn = begin, functools.partial(_drawn, source.order, before)
        if self._found is not None and begin < self._found.step <= end:
            self._restore()
        if self.step >= end:  # the loop stopped after these
            self._now = self._now._replace(drawn=self._drawn[1](end))
            return
        if self._folder is not None and self.step == begin:
            self._kept.refuse_others([pair.optimizer for pair in self._pairs], [pair.model for pair in self._pairs])
        self.chronometer.begin()
        self.chronometer.switch(DATA)
        for batch, parts in self._steps.load(source, own, first + self.step - begin, first + epochs * each):
            seed_dropout(self._seed, self.step, self.device, 0)  # a body draws by the seed and the step alone
            self._steps.running = self._log
            self.chronometer.switch(FORWARD)
            try:
                yield parts
            finally:
                self._steps.running = None
            self.step += 1
            if self._end_step(batch, last=self.step == end):
                self._close(None, interrupted=True)
                raise SystemExit(EXIT_INTERRUPTED)
            self.chronometer.switch(DATA)
        self._now = self._now._replace(drawn=self._drawn[1](end))
        if self._folder is not None:
            self._folder.wait()

    def evaluate(
        self,
        dataset: Dataset,
        score: Callable[..., Tensor | Mapping[str, Tensor]],
        batch_size: int = 256,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Computes the mean of each score over all samples of a dataset, each counted once. Collective.

        All models are in evaluation mode meanwhile, without gradients. With a run, the scores are in its curves.

        Args:
            score: gets a batch's inputs and targets; returns one value for each sample [B], or several by name.
            batch_size: samples of a batch.
            collate: as in `batches`; `score` gets what it returns, of a tuple or list each part as an argument.

        Returns:
            The means by name; "loss" for one without a name.

        Raises:
            UsageError: `score` does not return one value for each sample.
        """
        call = LoopBatches(batch_size=batch_size, epochs=1, seed=self._seed)
        source, own = self._steps.loader(evaluation_loader, call, dataset, collate, None)
        sums: dict[str, Tensor] = {}
        samples = 0
        devices = [self.device] if self.device.type == "cuda" else []
        undo = contextlib.ExitStack()
        for module in (module for pair in self._pairs for module in pair.model.modules()):
            undo.callback(setattr, module, "training", module.training)
        for model in (pair.model for pair in self._pairs):
            undo.callback(reshard, model)  # without a backward, FSDP2 leaves parameters gathered
            model.eval()
        with self.chronometer.during(EVALUATION), torch.random.fork_rng(devices), undo, torch.no_grad():
            for batch, taken in self._steps.load(source, own, 0, source.order.steps_per_epoch):
                values = score(*taken) if isinstance(taken, tuple | list) else score(taken)
                for name, value in (values if isinstance(values, Mapping) else {"loss": values}).items():
                    if value.shape != (batch.samples,):
                        raise UsageError(
                            f"evaluate(): the score {name} has shape {tuple(value.shape)}: return one value for each "
                            f"of the batch's {batch.samples} samples"
                        )
                    part = value.double().sum()
                    sums[name] = sums[name] + part if name in sums else part
                samples += batch.samples
        assert samples == len(dataset), "a sample is missing or counted twice"  # type: ignore[arg-type]
        scores = {name: float(total) / samples for name, total in sums.items()}
        if self._folder is not None:
            self._log.flush()
            self._folder.evaluated(self.step, scores, samples)
        return scores

    def save(self) -> None:
        """Saves all pairs and kept objects now, in the background. Collective."""
        if self._folder is None:
            raise UsageError("Loop(plan, run=…): without a folder there is nowhere to save to")
        self._log.flush()
        tensors, kept = self._kept.state()
        gradients = {name: full(each.grad) for name, each in self._parameters().items() if each.grad is not None}
        tensors |= {f"{GRADIENT}{name}": each.detach() for name, each in gradients.items()}
        own: dict[str, Tensor] = {}
        values: dict[str, Any] = {"optimizer": {}}
        for state in (pair.state.state() for pair in self._pairs):
            tensors |= state.tensors
            own |= state.local
            values |= {**state.values, "optimizer": values["optimizer"] | state.values["optimizer"]}
        groups = [[_settings(group) for group in pair.optimizer.param_groups] for pair in self._pairs]
        place = {"epoch": self._epoch, "before": list(self._before)}
        with self.chronometer.during(CHECKPOINT):
            self._folder.drew(*self._drawn, self.step)
            self._folder.save(
                self.step,
                tensors,
                own,
                {"engine": values, "seed": self._seed, "kept": kept, "groups": groups, "loop": place},
            )

    # ---- Within ----

    def _parameters(self) -> dict[str, nn.Parameter]:
        """Returns the models' parameters by name, each once."""
        models = {id(pair.model): pair.model for pair in self._pairs}
        named = nn.ModuleDict({str(number): model for number, model in enumerate(models.values())})
        return dict(named.named_parameters())

    def _end_step(self, batch: Batch, *, last: bool) -> bool:
        """Ends a step: its record, its checkpoint; returns whether the processes agreed to stop. Collective."""
        seconds = self.chronometer.end_step()
        if self.world.size > 1 and is_checked(self.step):
            check_in_step()
        self._samples += batch.samples
        lr = float(self._pairs[0].optimizer.param_groups[0]["lr"]) if self._pairs else 0.0
        skipped, shapes = self._steps.keys.skipped, self._steps.shapes
        record = Record(self.step, batch.epoch, self._samples, 0.0, lr, seconds, norm=None, skipped=skipped, flag=0.0)
        signals, *_ = self._log.end_step(record, shapes, shapes**2) or [0.0]
        stop = signals > 0
        if self._folder is not None and (last or stop or not self.step % self._save_every):
            self.save()
        return stop

    def _refuse_other_shapes(self, sums: Sequence[float]) -> None:
        """Raises UsageError if the processes had samples of different shapes in the step of these sums."""
        _, shapes, squares = sums
        if shapes * shapes != squares * self.world.size:
            raise UsageError(
                "batches(): samples of a batch have different shapes, or types: give collate=, which makes a batch of "
                "the list of all its samples"
            )

    def _restore(self) -> None:
        """Puts back what the loop's body may have changed since the models were restored: kept objects, settings."""
        assert self._found is not None
        tensors, values = self._found.read_tensors(), self._found.read_values()
        self._kept.restore(tensors, values.get("kept", {}))
        for name, parameter in self._parameters().items():
            if f"{GRADIENT}{name}" in tensors:
                parameter.grad = torch.empty_like(parameter)
                read_into(parameter.grad, tensors, f"{GRADIENT}{name}")
        for pair, groups in zip(self._pairs, values.get("groups", ()), strict=False):
            for group, settings in zip(pair.optimizer.param_groups, groups, strict=False):
                for key, value in settings.items():
                    if isinstance(group.get(key), Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(value, list) else value
        self._found = None

    def _close(self, error: BaseException | None, *, interrupted: bool = False) -> None:
        """Ends the run; an error is written down as the reason. Collective without one."""
        atexit.unregister(self._close_at_exit)
        if self._closed:
            return
        self._closed = True
        self._waits.close()
        self.chronometer.finish()
        try:
            if error is None:
                self._log.close()
                self._steps.end(self._log, None)
        except GrappeError as problem:
            error = problem
            raise
        finally:
            self._steps.end(self._log, error)
            self._log.meter.ended(None)
            if self._folder is not None:
                self._folder.close(self.step, error, interrupted=interrupted)
        if error is None:
            self.world.barrier()

    def _close_at_exit(self) -> None:
        self._close(getattr(sys, "last_value", None))


def _plan_of(plan: AnyPlan | None) -> Plan:
    launched = os.environ.get(PLAN)
    chosen = as_plan(launched or "" if plan is None else plan)
    if launched is not None and as_plan(launched) != chosen:
        raise PlanError(
            f"grappe launch has the plan {launched or 'one'}, and the script says Loop({str(chosen)!r}): write Loop() "
            "in the script"
        )
    if "microbatches" in chosen.changed_keys():
        raise PlanError(
            "microbatches is not for a custom loop: accumulate gradients in the loop, as in any PyTorch script "
            "(docs/own-loop.md), or write a grappe.Task"
        )
    beyond = sorted(chosen.changed_keys() - SUPPORTED_KEYS)
    if chosen.dropout == "local":
        beyond = ["dropout=local"]
    if beyond or chosen.engine != "native":
        raise PlanError(
            f"a custom loop supports {', '.join(sorted(SUPPORTED_KEYS - {'engine'}))}, not "
            f"{', '.join(beyond) or 'another engine'}, which needs an engine: write a grappe.Task{by_hand(chosen)}"
        )
    reason = Native.unsupported_reason(chosen)
    if chosen.compile and chosen.processes > 1:
        reason = (
            "compile on several processes is not for a custom loop, whose tensors hold rows of a batch: leave it out"
        )
    if chosen.offload != "none" and chosen.replicate > 1 and chosen.shard == 1:
        reason = f"offload in a custom loop is for sharded models: use shard={chosen.replicate}, or no offload"
    if reason is not None:
        raise PlanError(reason)
    return chosen


def by_hand(plan: Plan) -> str:
    """Says which key of a script's plan does what memory= would choose for a task."""
    return "" if plan.memory == "none" else "; less memory by hand: recompute"


def _drawn(order: SampleOrder, before: _Position, step: int) -> dict[str, int]:
    """Counts the samples of a mixture's sources up to a step of a call of `batches` that began at `before`."""
    first = before.epochs * order.steps_per_epoch
    earlier, now = drawn_from(order, first), drawn_from(order, first + step - before.step)
    so_far = before.drawn or {}
    return so_far | {name: so_far.get(name, 0) + count - earlier[name] for name, count in now.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the numbers of a parameter group, learning rate and momenta, as JSON."""
    settings: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, Tensor) and not value.dim():
            settings[key] = value.item()
        elif isinstance(value, bool | int | float) or (key == "betas" and isinstance(value, tuple)):
            settings[key] = list(value) if isinstance(value, tuple) else value
    return settings


def parallelize(
    model: nn.Module, optimizer: Optimizer, plan: AnyPlan | None = None
) -> tuple[nn.Module, Optimizer, Loop]:
    """Parallelizes a model and its optimizer, and returns their loop too: Loop(plan).parallelize in one call."""
    loop = Loop(plan)
    return *loop.parallelize(model, optimizer), loop
