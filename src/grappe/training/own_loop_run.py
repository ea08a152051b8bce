"""The run of steps whose loop is the user's own, in an unedited script or around a grappe.Loop.

LoopFolder is a run as other trainings', with its lease, description, checkpoints and curves. StepLog has the clock, the
stop signal and the losses of the steps: losses, by the script's line, and a signal are summed over the processes while
the next step runs.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from grappe.checkpoint.format import Checkpoint, Retention
from grappe.checkpoint.lease import Lease
from grappe.checkpoint.saver import Saver
from grappe.errors import RunError
from grappe.errors.user_line import is_users_file
from grappe.launch import files
from grappe.launch.signals import StopSignal
from grappe.launch.terminal import complain, say
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.profiling import memory
from grappe.profiling.chronometer import Chronometer
from grappe.profiling.phases import BACKWARD, FORWARD, UPDATE
from grappe.rows.tensor import own_term
from grappe.step.scores import Scores
from grappe.training.bottleneck import BottleneckMeter
from grappe.training.rows_step import SpreadSteps
from grappe.training.run import DONE, Run, restarted, start_facts, taken
from grappe.training.watchers.base import Record, RunInfo, Watcher
from grappe.training.watchers.curves import Curves
from grappe.training.watchers.meter import Meter, used

NO_EPOCH = 1 << 62  # steps: a loop's epochs need not be alike, so the curves sum up none


class LoopFolder:
    """A run that a hand-written loop writes; process 0 writes all but its part of checkpoints.

    Args:
        folder: made if there is none; a run of a loop is resumed.

    Raises:
        RunError: another process writes it now, or its order of samples was another seed's.
    """

    def __init__(self, folder: Path, plan: Plan, world: World, seed: int) -> None:
        self._world = world
        self.path = folder
        self._run: Run | None = None
        self.samples = 0
        """Samples seen before this start; process 0 knows it."""
        self._lease: Lease | None = None
        self._token, run_id, self.checkpoint = world.first(lambda: self._begin(self._description(plan, seed)))
        step = 0 if self.checkpoint is None else self.checkpoint.step
        may_commit = self._lease.check if self._lease is not None else lambda: None
        self._saver = Saver(folder / "checkpoints", world, self._token, Retention(), may_commit, run=run_id)
        self.info = RunInfo(
            folder=folder, task=Path(sys.argv[0]).name, plan=str(plan), engine=plan.engine, rank=0,
            world_size=world.size, device=world.device.type, start=step, last_step=NO_EPOCH, total_steps=NO_EPOCH,
            steps_per_epoch=NO_EPOCH, batch_size=0, samples=0, description={},
        )  # fmt: skip
        self._curves = Curves() if world.rank == 0 else Watcher()
        self._curves.started(self.info)

    def _begin(self, now: dict[str, Any]) -> tuple[str, str, Checkpoint | None]:
        """Takes the run; returns the lease's token, the run's id, and what to resume from. On process 0."""
        with taken(self.path, now, self._refuse_another) as (run, before, lease, made):
            newest = run.choose(description=before).checkpoint
            if made is None:
                files.remove(run.folder / DONE)
                step = 0 if newest is None else newest.step
                now = restarted(before, now, step)
                run.write_description(now)
                run.cut_back(step)
                self.samples = run.last_record("step").get("samples", 0)
                if newest is None:
                    complain(f"grappe: {run.folder} has no checkpoint: starting again from step 0")
                else:
                    complain(f"grappe: {run.folder}: resuming from step {step}")
            if "ipykernel" not in sys.modules:  # a notebook has no file of its own
                run.keep_code(Path(sys.argv[0]))
            self._run, self._lease = run, lease
            return lease.token, str(now["id"]), newest

    def _refuse_another(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raises RunError if a run is not one that this start can resume."""
        folder = self.path
        if before.get("class") != now["class"]:
            raise RunError(
                f"{folder} is a run of the task {before.get('task')}, not of a grappe.Loop: give another run="
            )
        if before.get("seed") != now["seed"]:
            raise RunError(
                f"{folder} was trained with seed {before.get('seed')}, not {now['seed']}: its order would differ"
            )

    def _description(self, plan: Plan, seed: int) -> dict[str, Any]:
        return {
            "task": Path(sys.argv[0]).name or "notebook",
            "class": "Loop",
            "fields": {},
            "script": shlex.join(sys.argv),
            "plan": str(plan),
            "seed": seed,
            **start_facts(self._world),
        }

    def stepped(self, record: Record, losses: Sequence[float]) -> None:
        """Writes a step of this start with its losses: of the whole batch, in the order of the step's backwards."""
        further = {f"loss_{number}": loss for number, loss in enumerate(losses[1:], 2)}
        loss, samples = losses[0] if losses else float("nan"), self.samples + record.samples
        self._curves.stepped(record._replace(loss=loss, samples=samples, metrics=further))

    def evaluated(self, step: int, scores: Mapping[str, float], samples: int) -> None:
        """Writes an evaluation's scores."""
        metrics = {name: score for name, score in scores.items() if name != "loss"}
        loss = scores.get("loss", float("nan"))
        self._curves.evaluated(step, Scores(samples=samples, count=float(samples), loss=loss, metrics=metrics))

    def drew(self, begin: int, counts: Callable[[int], Mapping[str, int]], step: int) -> None:
        """Writes what the steps from `begin` to `step` were drawn from, if from a mixture."""
        if self._run is not None:
            self._run.describe_drawn(counts, begin, step)

    def save(self, step: int, tensors: dict[str, Tensor], own: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Saves in the background, after the curves up to here. Collective."""
        self._curves.saving(step)
        problem = self._saver.save(step, tensors, own, values)
        if problem is not None and self._world.rank == 0:
            say(f"{problem}; the checkpoint before it is intact, and training continues")

    def wait(self) -> None:
        """Waits until the last checkpoint is committed. Collective.

        Raises:
            RunError: it could not be written.
        """
        problem = self._saver.wait()
        if problem is not None:
            raise RunError(problem)

    def close(self, step: int, error: BaseException | None, *, interrupted: bool) -> None:
        """Writes how the run has ended, and releases its lease. Collective without an error."""
        try:
            if error is None:
                self.wait()
        finally:
            self._saver.close()
            self._curves.ended(None)
            if error is not None and not isinstance(error, SystemExit):
                Run(self.path).note_failure(error, self._token)
            elif self._run is not None:
                self._run.describe(status="interrupted" if interrupted else "finished", step=step)
                if not interrupted:
                    self._run.finish()
            if self._lease is not None:
                self._lease.release()


class StepLog:
    """Clock, meter, stop signal and losses of a script's steps; each process has its term of a loss.

    Args:
        began: when the process began, by time.perf_counter.
        steps: run the backwards.
    """

    def __init__(self, plan: Plan, world: World, began: float, steps: SpreadSteps) -> None:
        self._world, self._steps = world, steps
        self.chronometer, self.stop = Chronometer(world.device, began), StopSignal()
        self.meter = Meter(world, self.chronometer, per_device=plan.per_device, began=began, baseline=memory.resident())
        self.folder: LoopFolder | None = None
        """The run's; None: nothing is written."""
        self.check: Callable[[Sequence[float]], None] = lambda sums: None
        """Raises an error where the sums of a step's numbers say so."""
        self._terms: dict[str, Tensor] = {}
        self._fresh: set[str] = set()
        """Lines of backwards since an optimizer has stepped: their losses add up."""
        self._running: tuple[Record, Tensor, Tensor | None, Sequence[dist.Work]] | None = None
        self._bottleneck = BottleneckMeter(self.chronometer, world, self.meter.usage)
        self.workers: int | None = 0
        """Number of data workers that the loop has; None: its samples are in memory."""

    def close(self) -> None:
        """Writes the last step, the bottleneck, and the use of resources. Collective."""
        self.flush()
        self._say_bottleneck()
        usages = self._world.gather(dataclasses.replace(self.meter.usage(), timing=self.chronometer.timing()))
        if self.folder is not None and self._world.rank == 0:
            run = Run(self.folder.path)
            so_far = used(usages, run.read_description().get("used", {}))
            run.describe(costs=[dataclasses.asdict(each) for each in usages], used=so_far)

    def backward(self, loss: Tensor, run: Callable[[float], None]) -> None:
        """Runs a backward, and notes its time and this process's term of its loss."""
        self.chronometer.switch(BACKWARD)
        self._steps.backward(loss, run)
        if loss.numel() == 1:
            callers = ((frame.f_code.co_filename, line) for frame, line in traceback.walk_stack(sys._getframe(1)))
            line = next((f"{file}:{number}" for file, number in callers if is_users_file(file)), "")
            value = own_term(loss, self._world.data_size).detach().double().reshape(())
            before = self._terms.get(line) if line in self._fresh else None
            self._terms[line] = value if before is None else before + value
            self._fresh.add(line)
        self.chronometer.switch(FORWARD)

    def watch(self, optimizer: Optimizer) -> None:
        """Notes an optimizer's steps from now on."""
        optimizer.register_step_pre_hook(lambda *_: self.chronometer.switch(UPDATE))
        optimizer.register_step_post_hook(self._note_update)

    def _note_update(self, *_: object) -> None:
        self._fresh.clear()
        self.chronometer.switch(FORWARD)

    def end_step(self, record: Record, *numbers: float) -> list[float]:
        """Begins to sum a step's losses, the signal's flag, and further numbers over the processes. Collective.

        Args:
            record: of the step, without its loss, with the samples of this start.

        Returns:
            The sums of flag and numbers, of the step before; [] at first. One process has this step's.
        """
        self.stop.check_time()
        before = self.flush()
        self.meter.stepped(record)
        if self._bottleneck.stepped():
            self._say_bottleneck()
        sums, terms = torch.tensor([self.stop.flag, *numbers], dtype=torch.float64), list(self._terms.values())
        losses = torch.stack([each.to(terms[0].device) for each in terms]) if terms else None
        self._terms.clear()
        works = []
        if self._world.size > 1:
            works.append(dist.all_reduce(sums, group=self._world.control, async_op=True))
        group = self._steps.group
        if group is not None and losses is not None:  # on a GPU by its own library: nothing waits for the losses
            works.append(dist.all_reduce(losses, group=group, async_op=True))
        self._running = record, sums, losses, works
        return sums.tolist() if self._world.size == 1 else before

    def _say_bottleneck(self) -> None:
        """Says what holds the loop back most, and writes it to the run; nothing if nothing stands out. Collective."""
        sentence = self._bottleneck.sentence(self.workers)
        if not sentence or self._world.rank:
            return
        say(sentence, sys.stderr)
        if self.folder is not None:
            Run(self.folder.path).describe(bottleneck=sentence)

    def flush(self) -> list[float]:
        """Writes the last step, and returns the sums of its numbers; [] if that was done. Collective."""
        if self._running is None:
            return []
        (record, sums, losses, works), self._running = self._running, None
        for work in works:
            work.wait()
        self.check(sums.tolist())
        if self.folder is not None:
            self.folder.stepped(record, [] if losses is None else losses.tolist())
        return sums.tolist()
