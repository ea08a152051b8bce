"""Loop: runs a hand-written training loop under a plan.

    with grappe.Loop(run="runs/gan") as loop:
        model, optimizer = loop.parallelize(model, optimizer)        # any number of pairs
        for epoch in loop.epochs(5):
            for inputs, targets in loop.batches(dataset, batch_size=64):
                loss = loop.mean(loss_of_each_sample)                # then backward and step, as before

Start the script by `grappe launch --plan replicate=2 script.py`, by torchrun or by srun; directly, it has one process.
Shapes: a slice of b rows on each process; losses [b] or [b, ...].
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import itertools
import os
import sys
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import Dataset

from grappe.data import loader
from grappe.data.arrays import in_memory, one_by_one
from grappe.data.batch import Batch, entering, stored_in
from grappe.data.corpus.mixture import drawn_from
from grappe.data.datasets import check
from grappe.data.sampling import SampleOrder, Sampling
from grappe.data.whole_batch_draws import whole_batch_draws
from grappe.engines.native import Native
from grappe.engines.shared.microbatch import remarks_on_draws
from grappe.engines.shared.state import ModelState, SavedState
from grappe.errors import EXIT_INTERRUPTED, PlanError, UsageError
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.launch.signals import StopSignal
from grappe.launch.start import start
from grappe.launch.terminal import complain
from grappe.parallel.batchnorm import buffers_agreed
from grappe.parallel.gradient_average import GradientAverage
from grappe.parallel.parallelize import prepare_made
from grappe.parallel.shard import reduction_switch, reshard
from grappe.parallel.units import repeated_blocks
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import CHECKPOINT, DATA, EVALUATION, FORWARD
from grappe.step.clip import bounding, gradient_norm, scale
from grappe.step.closure import gradients_first, needs_closure
from grappe.step.exact import Exact, exact_norm, exact_sums
from grappe.step.precision import set_gpu_arithmetic
from grappe.task import Task
from grappe.training.own_loop_folder import LoopFolder
from grappe.training.own_loop_objects import KeptObjects
from grappe.training.own_loop_step import LoopBatches, LoopStep, Pair, as_given, refuse_hooks
from grappe.training.own_loop_world import PLAN, Joined, join_world

SUPPORTED_KEYS = frozenset({
    "engine", "device", "backend", "replicate", "shard", "zero", "threads", "workers", "loading", "prefetch",
    "per_device", "precision", "batchnorm", "channels_last", "recompute", "compile", "dropout", "microbatches", "exact",
    "offload", "validation_batch",
})  # fmt: skip
Batches = Iterator[Any]


class _Position(NamedTuple):
    """Position of the calls of `batches`."""

    step: int = 0
    """Number of optimizer steps of the calls that have begun."""
    epochs: int = 0
    """Epochs of the calls, on which the order of the samples depends."""
    drawn: dict[str, int] | None = None
    """Samples of the calls that have ended, by the sources of a mixture."""


class Loop:
    """Parts of a plan for a hand-written loop: parallelized models, slices of batches, checkpoints, curves, a clock.

    Args:
        plan: data parallelism, and what else a loop can have; None: the plan of `grappe launch`, or one process.
        run: the folder of the run; None: nothing is saved. A restarted loop resumes from its last checkpoint.
        save_every: steps between checkpoints.
        seed: the seed of the sample order, and of each step's torch random numbers.

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
        self.chronometer = Chronometer(self.device, began)
        self.step = 0
        """Optimizer steps done, over restarts."""
        self._closed = False
        self._seed, self._save_every = seed, save_every
        set_gpu_arithmetic(self.plan.precision)
        self._running = LoopStep(self.plan, self.world, seed, self.chronometer.switch)
        self._pairs = self._running.pairs
        self._names: dict[int, dict[nn.Parameter, str]] = {}
        """Of each model the parameters' names before it was spread."""
        self._kept = KeptObjects()
        self._stop_signal = StopSignal()
        self._stop_signal.install()
        self._reduction: tuple[Tensor, Tensor, Sequence[dist.Work]] | None = None
        """Signals and losses of the last step, and what sums them up."""
        self._folder = LoopFolder(folder, self.plan, self.world, seed) if folder is not None else None
        self._found = self._folder.checkpoint if self._folder is not None else None
        self._now, self._before = _Position(), _Position()
        """After the calls of `batches` so far; and before those of the running epoch."""
        self._drawn: tuple[int, Callable[[int], Mapping[str, int]]] = 0, lambda step: {}
        """The step at which the running call of `batches` began, and what counts the samples of a mixture's sources."""
        self._epoch = 0
        self._remarks = set[str]()
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
        optimizers. All processes begin with
        process 0's weights, or with the checkpoint's. The model stays itself: nothing is wrapped around it. Collective.

        Args:
            units: blocks in order, each of which is gathered, recomputed or compiled at once; None: repeated blocks
                are found, those of an nn.ModuleList for instance.

        Raises:
            UsageError: the optimizer has taken a step already, has parameters that are not the model's, or calls a
                closure and there are several processes, microbatches or fp16; a parameter's hook clips its gradient.
        """
        plan, world, step = self.plan, self.world, self._running
        if optimizer.state:
            raise UsageError("parallelize() comes before the optimizer's first step")
        parts = plan.data_parallel * plan.microbatches > 1 or plan.exact
        if (parts and needs_closure(optimizer) and not gradients_first(optimizer)) or (
            step.scale.is_dynamic and needs_closure(optimizer)
        ):
            raise UsageError(
                f"parallelize(): {type(optimizer).__name__} compares losses that a closure returns, and under this "
                "plan each has a part of them or a scale: describe the training as a grappe.Task, or use one process"
            )
        again = id(model) in self._names  # with a further optimizer
        before = self._names.setdefault(id(model), {each: name for name, each in model.named_parameters()})
        if parts:
            refuse_hooks(model, plan)
        if not again:
            if any(each in names for names in self._names.values() if names is not before for each in before):
                raise UsageError("parallelize(): a part of this model is spread already: give the same whole model")
            if units is None and (plan.uses_fsdp or plan.recompute or plan.compile):
                units = [model.get_submodule(name) for name in repeated_blocks(model)]
            self._spread(model, list(units or ()))
        after = dict(model.named_parameters())
        for group in optimizer.param_groups:
            if any(parameter not in before for parameter in group["params"]):
                raise UsageError("parallelize(): the optimizer has parameters that are not this model's")
            group["params"] = [after[before[parameter]] for parameter in group["params"]]
        named = nn.ModuleDict({str(len(self._pairs)): model})  # a name for each pair
        state = ModelState(model=named, optimizer=optimizer, schedule=None, world=world, loss_scale=step.scale)
        if self._found is not None:
            values = self._found.read_values().get("engine", {})
            state.restore(SavedState(tensors=self._found.read_tensors(), values=values))
        group = None if plan.uses_fsdp or plan.exact or again else world.data_group
        pair = Pair(
            model=model,
            optimizer=optimizer,
            state=state,
            average=None if group is None else GradientAverage(model.parameters(), group),
            # Without zero=1 each microbatch is reduced: FSDP2 keeps a sum for the replicas flat, over the parameters
            # that a backward reaches, and adds the next one's to it though that reaches others.
            switch=reduction_switch(model, plan) if plan.uses_fsdp and plan.zero == 1 and not again else None,
            exact=self._exact(model) if plan.exact and not again else None,
        )
        self._pairs.append(pair)
        if step.scale.is_dynamic:
            optimizer.step = types.MethodType(step.updating(pair, optimizer.step), optimizer)
        optimizer.register_step_pre_hook(step.before_update)
        optimizer.register_step_post_hook(lambda *_: self.chronometer.switch(FORWARD))
        return model, optimizer

    def _spread(self, model: nn.Module, blocks: Sequence[nn.Module]) -> None:
        """Gives every process process 0's weights, and changes the model as the plan's keys say. Collective."""
        plan, world = self.plan, self.world
        model.to(self.device, stored_in(plan) if plan.precision == "fp64" else None)
        for tensor in (*model.parameters(), *model.buffers()) if world.size > 1 else ():
            dist.broadcast(tensor.detach(), 0)
        prepare_made(model, blocks, plan, world)

    def _exact(self, model: nn.Module) -> Exact:
        """Makes the sums of a model's gradients, and has them see each forward of a piece."""
        forward = model.forward
        sums = exact_sums(
            model, list(model.parameters()), self.plan, self.world, lambda _, call: forward(*call[0], **call[1])
        )

        @functools.wraps(forward)
        def recorded(*arguments: Any, **options: Any) -> Any:
            if not self._running.in_piece:
                return forward(*arguments, **options)
            return sums.forward((arguments, options))

        model.forward = recorded
        return sums

    def keep(self, **objects: Any) -> None:
        """Puts further objects with a `state_dict` into the checkpoints, by name: `loop.keep(schedule=schedule)`.

        Call it before the first batch. A resumed loop restores them where it goes on.
        """
        self._kept.add(objects)
        for kept in objects.values() if self._running.scale.is_dynamic else ():
            if isinstance(kept, LRScheduler):
                kept.step = self._running.unless_skipped(kept.step)

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
    ) -> Batches:
        """Yields this process's slice of each global batch of `batch_size`, on the device; resumes after a restart.

        Each epoch has every sample once, in an order that depends on `seed` and the number of epochs so far; the last
        batch may be short. A further call goes on with further epochs. After a step a checkpoint is saved if due, and
        on a signal, which then ends the process with exit code 75. Collective.

        Args:
            collate: makes a batch of a list of samples; None: torch's default_collate.
            sampling: which samples an epoch has, and how often.
        """
        if self._running.is_running:
            raise UsageError(
                "batches() inside of batches(), as in a zip of two: give one dataset, of which each sample has a part "
                "of both, such as torch.utils.data.StackDataset"
            )
        source = self._loader(loader.training_loader, dataset, batch_size, epochs, collate, sampling)
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
        taken = source.batches(first + self.step - begin, first + epochs * each)
        try:
            while self.step < end:
                self.chronometer.switch(DATA)
                batch = next(taken)
                with self._running.running(batch, self.step) as parts:
                    yield parts
                self.step += 1
                if self._end_step(batch, last=self.step == end):
                    self._close(None, interrupted=True)
                    raise SystemExit(EXIT_INTERRUPTED)
        finally:  # after a break, too
            self._remark()
        self._now = self._now._replace(drawn=self._drawn[1](end))
        if self._folder is not None:
            self._folder.wait()

    def microbatches(self, batch: Any, *, counts: Callable[[Any], Tensor] | None = None) -> Batches:
        """Yields the microbatches of a batch of `batches`: gradient accumulation, as `microbatches=` in the plan says.

        Forward, `mean` and backward are inside, `zero_grad`, clipping and the optimizer's step around it. Under a plan
        without microbatches it yields the batch itself. Collective.

        Args:
            counts: gives a microbatch's counts, for `mean(losses, counts)`: they are summed before the first backward.
        """
        return self._running.microbatches(batch, counts)

    def mean(self, losses: Tensor, counts: Tensor | None = None) -> Tensor:
        """Computes this process's part of the global batch's mean of `losses` [b, ...]; call backward on the result.

        A plain mean over the slice would weigh a short slice's samples more than others'. The gradients of all
        processes' parts are the gradients of the whole mean. Of a microbatch it is the microbatch's part.

        Args:
            counts: what each loss counts, in the losses' shape: 0 for padding. The mean is over the counts of the whole
                batch. Collective then.

        Raises:
            UsageError: the losses do not have one row for each sample of the slice.
        """
        return self._running.mean(losses, counts)

    def sum(self, losses: Tensor) -> Tensor:
        """Computes this process's part of the global batch's sum of `losses` [b, ...]; otherwise as `mean`."""
        return self._running.sum(losses)

    def backward(self, loss: Tensor) -> None:
        """Calls `loss.backward()`; with precision=fp16 of the loss times the loss scale, and unscales the gradients.

        An update whose gradient has an infinity is then left out, and so is the step of a schedule that is kept.
        """
        self._running.backward(loss)

    def clip_grad_norm_(self, parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
        """Scales gradients to at most this 2-norm of all of them, and returns the norm before, as torch's does.

        Torch's own adds up in another order under each plan, and cannot add up offloaded gradients. Collective.
        """
        present = [each for each in parameters if each.grad is not None]
        norm = (exact_norm if self.plan.exact else gradient_norm)(present)
        scale(present, bounding(norm, max_norm))
        return norm

    def total(self, part: Tensor) -> float:
        """Sums the results of `mean` or `sum` over all processes, for printing. Waits for the processes. Collective."""
        return sum(self.world.gather_data(float(part.detach()) / self._running.averaged))

    def evaluate(
        self,
        dataset: Dataset,
        score: Callable[..., Tensor | Mapping[str, Tensor]],
        batch_size: int = 256,
        *,
        collate: Callable[[list[Any]], Any] | None = None,
    ) -> dict[str, float]:
        """Computes the mean of each score over all samples of a dataset, each counted once. Collective.

        All models are in evaluation mode meanwhile, without gradients, and with batch normalisation's statistics agreed
        between the processes. With a run, the scores are in its curves.

        Args:
            score: gets a batch's inputs and targets; returns one value for each sample [b], or several by name.
            batch_size: samples of a global batch.
            collate: as in `batches`; `score` gets what it returns, of a tuple or list each part as an argument.

        Returns:
            The means by name; "loss" for one without a name.

        Raises:
            UsageError: `score` does not return one value for each sample.
        """
        source = self._loader(loader.evaluation_loader, dataset, batch_size, 1, collate, None)
        length = len(dataset)  # type: ignore[arg-type]
        sums: dict[str, float] = {}
        samples = 0
        with self.chronometer.during(EVALUATION), torch.random.fork_rng(self._devices()), self._evaluating():
            batches = source.batches(0, source.order.steps_per_epoch)
            for micro in itertools.chain.from_iterable(batch.microbatches for batch in batches):
                entering(micro)
                taken = as_given(micro)
                values = score(*taken) if isinstance(taken, tuple | list) else score(taken)
                for name, value in (values if isinstance(values, Mapping) else {"loss": values}).items():
                    if value.shape != (micro.size,):
                        raise UsageError(
                            f"evaluate(): the score {name} has shape {tuple(value.shape)}: return one value for each "
                            f"of the batch's {micro.size} samples"
                        )
                    sums[name] = sums.get(name, 0.0) + float(value[: micro.rows].double().sum())
                samples += micro.rows
        everyone = self.world.gather_data((samples, sums))
        assert sum(count for count, _ in everyone) == length, "a sample is missing or counted twice"
        scores = {name: sum(theirs[name] for _, theirs in everyone) / length for name in sums}
        if self._folder is not None:
            self._flush()
            self._folder.evaluated(self.step, scores, length)
        return scores

    def save(self) -> None:
        """Saves all pairs and kept objects now, in the background. Collective."""
        if self._folder is None:
            raise UsageError("Loop(plan, run=…): without a folder there is nowhere to save to")
        self._flush()
        tensors, kept = self._kept.state()
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

    def _loader(
        self,
        make: Callable[..., loader.BatchLoader],
        dataset: Dataset,
        batch_size: int,
        epochs: int,
        collate: Callable[[list[Any]], Any] | None,
        sampling: Sampling | None,
    ) -> loader.BatchLoader:
        """Makes the loader of a call. Pairs in memory are gathered at once where the call says nothing of its own."""
        plain = collate is None and sampling is None and in_memory(dataset) is not None
        task = (Task if plain else LoopBatches)(batch_size=batch_size, epochs=epochs, seed=self._seed)
        task.__dict__.update({} if plain else {"form": collate, "drawn": sampling})
        check(dataset, "train", task)
        plan = dataclasses.replace(self.plan, validation_batch=self.plan.validation_batch or batch_size)
        return make(task, dataset if plain else one_by_one(dataset), plan, self.world)

    def _end_step(self, batch: Batch, *, last: bool) -> bool:
        """Ends a step: its record, its checkpoint; returns whether the processes agreed to stop. Collective."""
        seconds = self.chronometer.end_step()
        self._stop_signal.check_time()
        stop = self._agreed(batch, seconds)
        if self._folder is not None and (last or stop or self.step % self._save_every == 0):
            self.save()
        return stop

    def _agreed(self, batch: Batch, seconds: float) -> bool:
        """Sums signals and losses over the processes while the next step runs; returns whether any had a signal."""
        stop = self._flush()
        flag = torch.tensor([self._stop_signal.flag, *self._running.widths()], dtype=torch.float64)
        parts = self._running.parts
        losses = torch.zeros(0, dtype=torch.float64, device=self.device)
        if self._folder is not None:
            lr = self._pairs[0].optimizer.param_groups[0]["lr"] if self._pairs else 0.0
            skipped = self._running.skipped
            self._folder.stepped(self.step, batch.epoch, batch.samples, float(lr), seconds, skipped=skipped)
            if parts:
                losses = torch.stack([part.double() for part in parts]) / self._running.averaged
        if self.world.control is None or self.world.data_group is None:
            self._reduction = (flag, losses, ())
            return bool(self._stop_signal.flag)
        works = [dist.all_reduce(flag, group=self.world.control, async_op=True)]
        if len(losses):  # on a GPU by its own library: nothing waits for the losses
            works.append(dist.all_reduce(losses, group=self.world.data_group, async_op=True))
        self._reduction = (flag, losses, works)
        return stop

    def _flush(self) -> bool:
        """Waits for the last step's sums, and writes them to the curves; returns whether there was a signal."""
        before, self._reduction = self._reduction, None
        if before is None:
            return False
        flag, losses, works = before
        for work in works:
            work.wait()
        if self._folder is not None:
            self._folder.reduced(losses.tolist())
        signals, *widths = flag.tolist()
        self._running.check_widths(widths)
        return signals > 0

    @contextlib.contextmanager
    def _evaluating(self) -> Iterator[None]:
        modules = [module for pair in self._pairs for module in pair.model.modules()]
        training = [module.training for module in modules]
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.no_grad())
            contexts.enter_context(whole_batch_draws(None))
            for pair in self._pairs:
                pair.model.eval()
                if self.world.data_group is not None:
                    contexts.enter_context(buffers_agreed(pair.model, self.world.data_group))
            try:
                yield
            finally:
                for module, mode in zip(modules, training, strict=True):
                    module.training = mode
                for pair in self._pairs if self.plan.uses_fsdp else ():
                    reshard(pair.model)

    def _restore(self) -> None:
        """Puts back what the loop's body may have changed since the models were restored: kept objects, settings."""
        assert self._found is not None
        values = self._found.read_values()
        self._kept.restore(self._found.read_tensors(), values.get("kept", {}))
        for pair, groups in zip(self._pairs, values.get("groups", ()), strict=False):
            for group, settings in zip(pair.optimizer.param_groups, groups, strict=False):
                for key, value in settings.items():
                    if isinstance(group.get(key), Tensor):
                        group[key].fill_(value)
                    else:
                        group[key] = tuple(value) if isinstance(value, list) else value
        self._found = None

    def _remark(self) -> None:
        """Says which random numbers were not those of one process, each once."""
        remarks = set(remarks_on_draws(self.plan, self.device)) - self._remarks
        self._remarks |= remarks
        for remark in sorted(remarks) if self.world.rank == 0 else ():
            complain(f"grappe: {remark}")

    def _devices(self) -> list[torch.device]:
        return [self.device] if self.device.type == "cuda" else []

    def _close(self, error: BaseException | None, *, interrupted: bool = False) -> None:
        """Ends the run; an error is written down as the reason. Collective without one."""
        atexit.unregister(self._close_at_exit)
        if self._closed:
            return
        self._closed = True
        self.chronometer.finish()
        if error is None:
            self._flush()
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
    beyond = sorted(chosen.changed_keys() - SUPPORTED_KEYS)
    if beyond or chosen.engine != "native":
        raise PlanError(
            f"a custom loop supports {', '.join(sorted(SUPPORTED_KEYS - {'engine'}))}, not "
            f"{', '.join(beyond) or 'another engine'}, which needs an engine: write a grappe.Task{by_hand(chosen)}"
        )
    reason = Native.unsupported_reason(chosen)
    if chosen.exact and chosen.shard > 1:
        reason = "exact in a custom loop is for replicas, as shards are summed in each backward: replicate instead"
    if chosen.offload != "none" and chosen.replicate > 1 and chosen.shard == 1:
        reason = f"offload in a custom loop is for sharded models: use shard={chosen.replicate}, or no offload"
    if reason is not None:
        raise PlanError(reason)
    return chosen


def by_hand(plan: Plan) -> str:
    """Says which keys of a script's plan do what memory= would choose for a task."""
    return "" if plan.memory == "none" else "; less memory by hand: recompute, or microbatches=4"


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
