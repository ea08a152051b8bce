"""Loop: runs a hand-written training loop under a plan.

    loop = grappe.Loop("replicate=2", run="runs/gan")
    model, optimizer = loop.parallelize(model, optimizer)        # any number of pairs
    for inputs, targets in loop.batches(dataset, batch_size=64, epochs=5):
        loss = loop.mean(loss_of_each_sample)                     # then backward and step, as before

Start the script directly, by torchrun or by srun. Shapes: a slice of b rows on each process; losses [b] or [b, ...].
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from grappe.checkpoint.format import Checkpoint, Retention, latest
from grappe.checkpoint.lease import Lease
from grappe.checkpoint.saver import Saver
from grappe.data import loader
from grappe.data.batch import Batch, entering
from grappe.data.datasets import check
from grappe.engines.shared.state import ModelState, SavedState
from grappe.errors import EXIT_INTERRUPTED, PlanError, RunError, UsageError
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.launch.signals import StopSignal
from grappe.launch.terminal import say
from grappe.launch.world import join
from grappe.parallel.replicate import wrap
from grappe.parallel.shard import shard, sum_scalars
from grappe.plan import AnyPlan, as_plan
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, CHECKPOINT, DATA, FORWARD, UPDATE
from grappe.step.fast_paths import seed_dropout
from grappe.task import Task

SUPPORTED_KEYS = frozenset(
    {
        "engine",
        "device",
        "backend",
        "replicate",
        "shard",
        "zero",
        "threads",
        "workers",
        "loading",
        "prefetch",
        "per_device",
    }
)
Batches = Iterator[Any]
EXIT_SECONDS = 0.05  # ten times Python's switch interval


class Loop:
    """Parts of a plan for a hand-written loop: parallelized models, slices of batches, checkpoints, a clock.

    Args:
        plan: replicate or shard (with zero), and the device's keys; the hand-written loop does the rest itself.
        run: the folder of checkpoints; None: nothing is saved. A restarted loop resumes from its last checkpoint.
        save_every: steps between checkpoints.
        seed: the seed of the sample order, and of each step's torch random numbers.

    Raises:
        PlanError: the plan has keys that only an engine supports, or does not fit the number of processes.
    """

    def __init__(
        self, plan: AnyPlan = "", run: Path | str | None = None, *, save_every: int = 100, seed: int = 0
    ) -> None:
        began = time.perf_counter()
        self.plan = as_plan(plan)
        beyond = sorted(self.plan.changed_keys() - SUPPORTED_KEYS)
        if beyond or self.plan.engine != "native":
            raise PlanError(
                f"a custom loop supports {', '.join(sorted(SUPPORTED_KEYS - {'engine'}))}, not "
                f"{', '.join(beyond) or 'another engine'}, which needs an engine: write a grappe.Task"
            )
        process = rank_from_environment() or ProcessRank(launcher="own loop")
        if process.launcher == "own loop" and self.plan.processes > 1:
            raise UsageError(
                f"plan {self.plan} needs {self.plan.processes} processes: start this script with "
                f"torchrun --nproc-per-node {self.plan.processes} SCRIPT, or srun"
            )
        self._folder = Path(run) if run is not None else None
        if self._folder is not None:
            (self._folder / "checkpoints").mkdir(parents=True, exist_ok=True)
        self.world = join(self.plan, process, self._folder or Path())
        self.device = self.world.device
        self.chronometer = Chronometer(self.device, began)
        self.step = 0
        """Optimizer steps done, over restarts."""
        self._seed, self._save_every = seed, save_every
        self._averaged = 1 if self.plan.uses_fsdp else self.world.data_size
        """What DDP divides a sum of gradients by; FSDP2 does not divide."""
        self._states: list[ModelState] = []
        self._batch: Batch | None = None
        self._stop_signal = StopSignal()
        self._stop_signal.install()
        self._stop_reduction: tuple[Tensor, dist.Work] | None = None
        self._lease, self._saver, self._found = self._open()

    def parallelize(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Optimizer]:
        """Moves the model to its device, spreads it as the plan says, and puts its new parameters into the optimizer.

        Call it for each pair in the same order on every process, before `batches`. All processes begin with
        process 0's weights, or with the checkpoint's. A replicated model is wrapped: its own attributes are those
        of `model.module`. Collective.

        Raises:
            UsageError: the optimizer has taken a step already, or has parameters that are not the model's.
        """
        if optimizer.state:
            raise UsageError("parallelize() comes before the optimizer's first step")
        model.to(self.device)
        for tensor in (*model.parameters(), *model.buffers()):
            if self.world.size > 1:
                dist.broadcast(tensor.detach(), 0)
        before = {parameter: name for name, parameter in model.named_parameters()}
        if self.plan.uses_fsdp:
            shard(model, [], self.plan, self.world)
            sum_scalars(model, self.world)
        after = dict(model.named_parameters())
        for group in optimizer.param_groups:
            if any(parameter not in before for parameter in group["params"]):
                raise UsageError("parallelize(): the optimizer has parameters that are not this model's")
            group["params"] = [after[before[parameter]] for parameter in group["params"]]
        named = nn.ModuleDict({str(len(self._states)): model})  # a name for each pair
        state = ModelState(model=named, optimizer=optimizer, schedule=None, world=self.world)
        self._states.append(state)
        if self._found is not None:
            values = self._found.read_values().get("engine", {})
            state.restore(SavedState(tensors=self._found.read_tensors(), values=values))
        optimizer.register_step_pre_hook(lambda *_: self.chronometer.switch(UPDATE))
        optimizer.register_step_post_hook(lambda *_: self.chronometer.switch(FORWARD))
        replicated = self.world.data_group is not None and not self.plan.uses_fsdp
        return (wrap(model, self.world) if replicated else model), optimizer

    def batches(self, dataset: Dataset, batch_size: int, epochs: int) -> Batches:
        """Yields this process's slice of each global batch of `batch_size`, on the device; resumes after a restart.

        Each epoch has every sample once, in an order that depends on `seed` alone; the last batch may be short.
        After a step a checkpoint is saved if due, and on a signal, which then ends the process with exit code 75.
        Collective.
        """
        task = Task(batch_size=batch_size, epochs=epochs, seed=self._seed)
        check(dataset, "train", task)
        source = loader.training_loader(task, dataset, self.plan, self.world)
        total = epochs * source.order.steps_per_epoch
        self.chronometer.begin()
        batches = source.batches(self.step, total)
        while self.step < total:
            self.chronometer.switch(DATA)
            self._batch = batch = next(batches)
            seed_dropout(self._seed, self.step, self.device, self.world.data_rank)
            micro = batch.microbatches[0]
            self.chronometer.switch(FORWARD)
            yield entering(micro), micro.targets
            self.step += 1
            self.chronometer.end_step()
            stop = self._stop_agreed()
            if self._saver is not None and (self.step == total or stop or self.step % self._save_every == 0):
                self.save()
            if stop:
                self._close()
                raise SystemExit(EXIT_INTERRUPTED)
        self._close()

    def mean(self, losses: Tensor) -> Tensor:
        """Computes this process's part of the global batch's mean of `losses` [b, ...]; call backward on the result.

        A plain mean over the slice would weigh a short slice's samples more than others'. The gradients of all
        processes' parts, which the plan sums or averages, are the gradients of the whole mean.
        """
        assert self._batch is not None, "mean() is for inside the loop over batches()"
        self.chronometer.switch(BACKWARD)
        micro = self._batch.microbatches[0]
        each = losses.numel() // (micro.rows or 1) or 1
        scale = self._averaged / (self._batch.samples * each) if micro.rows else 0.0
        return losses.sum() * scale

    def total(self, part: Tensor) -> float:
        """Sums the results of `mean` over all processes, for printing. Waits for the processes. Collective."""
        return sum(self.world.gather_data(float(part.detach()) / self._averaged))

    def save(self) -> None:
        """Saves all pairs now, in the background. Collective."""
        if self._saver is None:
            raise UsageError("Loop(plan, run=…): without a folder there is nowhere to save to")
        tensors: dict[str, Tensor] = {}
        own: dict[str, Tensor] = {}
        values: dict[str, Any] = {"optimizer": {}}
        for state in (pair.state() for pair in self._states):
            tensors |= state.tensors
            own |= state.local
            values |= {**state.values, "optimizer": values["optimizer"] | state.values["optimizer"]}
        with self.chronometer.during(CHECKPOINT):
            problem = self._saver.save(self.step, tensors, own, {"engine": values, "seed": self._seed})
        if problem is not None and self.world.rank == 0:
            say(f"{problem}; the checkpoint before it is whole, training goes on")

    def _open(self) -> tuple[Lease | None, Saver | None, Checkpoint | None]:
        if self._folder is None:
            return None, None, None
        lease = Lease(self._folder) if self.world.rank == 0 else None
        problem = None
        try:
            if lease is not None:
                lease.take()
        except RunError as error:
            problem = str(error)
        problem = self.world.share(problem)
        if problem is not None:
            raise RunError(problem)
        token = self.world.share(lease.token if lease is not None else "")
        may_commit = lease.check if lease is not None else lambda: None
        folder = self._folder / "checkpoints"
        step = self.world.share((newest.step if (newest := latest(folder)) else None) if lease else None)
        self.world.barrier()
        checkpoint = next((candidate for candidate in [latest(folder)] if candidate and candidate.step == step), None)
        if checkpoint is not None:
            self.step = checkpoint.step
            seed = checkpoint.read_values().get("seed")
            if seed != self._seed:
                raise RunError(f"{self._folder} was trained with seed {seed}, not {self._seed}: its order would differ")
        return lease, Saver(folder, self.world, token, Retention(), may_commit), checkpoint

    def _stop_agreed(self) -> bool:
        """Returns whether any process had a signal by the step before: reduced asynchronously. Collective."""
        self._stop_signal.check_time()
        flag = torch.tensor(self._stop_signal.flag)
        if self.world.control is None:
            return bool(flag)
        before, self._stop_reduction = self._stop_reduction, None
        work = dist.all_reduce(flag, group=self.world.control, async_op=True)
        assert work is not None
        self._stop_reduction = (flag, work)
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])

    def _close(self) -> None:
        self.chronometer.finish()
        if self._saver is not None:
            problem = self._saver.wait()
            self._saver.close()
            if problem is not None:
                raise RunError(problem)
        if self._lease is not None:
            self._lease.release()
        self.world.barrier()
        atexit.register(self._leave)  # not yet: what follows the loop may gather weights

    def _leave(self) -> None:
        """Ends all communication before Python takes itself apart.

        A thread of gloo's frees the tensors of a collective a little after its end, for which it needs the
        interpreter's lock; without a chance to take it the thread ends this process by SIGABRT (once in 15 times).
        """
        self.world.leave()
        time.sleep(EXIT_SECONDS)


def parallelize(model: nn.Module, optimizer: Optimizer, plan: AnyPlan = "") -> tuple[nn.Module, Optimizer, Loop]:
    """Parallelizes a model and its optimizer, and returns their loop too: Loop(plan).parallelize in one call."""
    loop = Loop(plan)
    return *loop.parallelize(model, optimizer), loop
