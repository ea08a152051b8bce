"""The folder of a hand-written loop: a run as other trainings', with its lease, description, checkpoints and curves."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from grappe.checkpoint.format import Checkpoint, Retention
from grappe.checkpoint.lease import Lease
from grappe.checkpoint.saver import Saver
from grappe.errors import RunError
from grappe.launch import files
from grappe.launch.terminal import say
from grappe.launch.world import World
from grappe.plan import Plan
from grappe.step.scores import Scores
from grappe.training.run import DONE, Run, restarted, start_facts
from grappe.training.watchers.base import Record, RunInfo
from grappe.training.watchers.curves import Curves

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
        self._samples = 0
        self._lease: Lease | None = None
        answer: tuple[str, str, int | None] | RunError = ("", "", None)
        if world.rank == 0:
            try:
                answer = self._begin(folder, plan, seed)
            except RunError as error:
                answer = error
        answer = world.share(answer)
        if isinstance(answer, RunError):
            raise answer
        self._token, run_id, step = answer
        self.checkpoint: Checkpoint | None = None if step is None else Run(folder).choose(step).checkpoint
        """From which the loop resumes; None: it is new."""
        may_commit = self._lease.check if self._lease is not None else lambda: None
        self._saver = Saver(folder / "checkpoints", world, self._token, Retention(), may_commit, run=run_id)
        self.info = self._info(plan, step or 0)
        self._waiting: list[Record] = []
        """Steps whose losses are still being summed up."""
        self._curves: Curves | None = None
        if self._run is not None:
            self._curves = Curves()
            self._curves.started(self.info)

    def _begin(self, folder: Path, plan: Plan, seed: int) -> tuple[str, str, int | None]:
        """Takes the run; returns the lease's token, the run's id, and the step to resume from. On process 0."""
        now = self._description(plan, seed)
        new = not Run.is_run(folder)
        self._run = run = Run.create(folder, now) if new else Run(folder)
        before = now if new else run.read_description()
        self._refuse_another(folder, before, now)
        self._lease = lease = Lease(folder)
        lease.take()
        try:
            run.clear()
            newest = run.choose(description=before).checkpoint
            step = None if newest is None else newest.step
            if not new:
                files.remove(folder / DONE)
                now = restarted(before, now, step or 0)
                run.write_description(now)
                run.cut_back(step or 0)
                self._samples = run.last_record("step").get("samples", 0)
            if "ipykernel" not in sys.modules:  # a notebook has no file of its own
                run.keep_code(Path(sys.argv[0]))
        except BaseException:
            lease.release()
            raise
        return lease.token, str(now["id"]), step

    def _refuse_another(self, folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        """Raises RunError if a run is not one that this start can resume."""
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

    def _info(self, plan: Plan, start: int) -> RunInfo:
        return RunInfo(
            folder=self.path, task=Path(sys.argv[0]).name, plan=str(plan), engine=plan.engine,
            rank=0, world_size=self._world.size, device=self._world.device.type, start=start, last_step=NO_EPOCH,
            total_steps=NO_EPOCH, steps_per_epoch=NO_EPOCH, batch_size=0, samples=0, description={},
        )  # fmt: skip

    def stepped(self, step: int, epoch: int, samples: int, lr: float, seconds: float, *, skipped: bool) -> None:
        """Notes a step, whose losses come with a later call of `reduced`."""
        self._samples += samples
        self._waiting.append(Record(step, epoch, self._samples, 0.0, lr, seconds, norm=None, skipped=skipped, flag=0.0))

    def reduced(self, losses: list[float]) -> None:
        """Writes the oldest step that waits, with its losses: of the whole batch, in the order of the step's calls."""
        record = self._waiting.pop(0)
        if self._curves is None:
            return
        further = {f"loss_{number}": loss for number, loss in enumerate(losses[1:], 2)}
        self._curves.stepped(record._replace(loss=losses[0] if losses else float("nan"), metrics=further))

    def evaluated(self, step: int, scores: Mapping[str, float], samples: int) -> None:
        """Writes an evaluation's scores."""
        if self._curves is not None:
            metrics = {name: score for name, score in scores.items() if name != "loss"}
            loss = scores.get("loss", float("nan"))
            self._curves.evaluated(step, Scores(samples=samples, count=float(samples), loss=loss, metrics=metrics))

    def drew(self, begin: int, counts: Callable[[int], Mapping[str, int]], step: int) -> None:
        """Writes what the steps from `begin` to `step` were drawn from, if from a mixture."""
        if self._run is not None:
            self._run.describe_drawn(counts, begin, step)

    def save(self, step: int, tensors: dict[str, Tensor], own: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Saves in the background, after the curves up to here. Collective."""
        if self._curves is not None:
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
        """Writes how the run has ended, and gives it free. Collective without an error."""
        try:
            if error is None:
                self.wait()
        finally:
            self._saver.close()
            if self._curves is not None:
                self._curves.ended(None)
            if error is not None and not isinstance(error, SystemExit):
                Run(self.path).note_failure(error, self._token)
            elif self._run is not None:
                self._run.describe(status="interrupted" if interrupted else "finished", step=step)
                if not interrupted:
                    self._run.finish()
            if self._lease is not None:
                self._lease.release()
