"""Makes a launched script a run: writes down its steps, saves its state, and brings it back to a checkpoint.

A step ends where the loop over a loader asks for its next batch after an optimizer has stepped; without a loader, where
the first optimizer steps. Every process runs the same script, so all agree on the number of steps.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import shlex
import signal
import time
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from grappe.checkpoint.weights import gathered
from grappe.contrib.script.launch import INTERRUPTED, ScriptRequest, run_as_main, seed_all
from grappe.contrib.script.replay import Iteration, Replay, reads_noted
from grappe.contrib.script.surroundings import dates_of_clock, surroundings_shared, writing_nothing
from grappe.contrib.script.variables import Unchanged, Variables, variables_of
from grappe.errors import EXIT_INTERRUPTED, EXIT_OK, ReplayError, RunError, TaskError, UsageError
from grappe.errors.user_line import line_of
from grappe.launch import files
from grappe.launch.local import lost_another
from grappe.launch.rank import ProcessRank, hidden_rank
from grappe.launch.signals import handled
from grappe.launch.terminal import complain
from grappe.launch.world import World
from grappe.plan import Plan, as_plan
from grappe.profiling.chronometer import waits_counted
from grappe.profiling.phases import CHECKPOINT, DATA, EVALUATION, FORWARD
from grappe.rows.tensor import full
from grappe.training.interception import Begin, MainThread, StepHandler, alive, intercepted, parameters_of, rows_of
from grappe.training.options import SAVE_SECONDS
from grappe.training.own_loop_objects import KeptObjects
from grappe.training.own_loop_run import LoopFolder, StepLog
from grappe.training.own_loop_world import join_world
from grappe.training.plan_keys import PlanKeys, gradients_summed, shards_whole
from grappe.training.random_state import as_tensor, from_tensor, random_state, set_random_state, set_state_of, state_of
from grappe.training.rows_step import SpreadSteps, rows_context
from grappe.training.run import Run
from grappe.training.task_reference import SCRIPT
from grappe.training.watchers.base import Record

T = TypeVar("T")
MOST_READ = 1 << 26  # bytes of what a script has read, which each checkpoint holds
BY_BATCHES = "batches"
"""Entry of run.json: the run is brought back by loading each batch again."""


class ScriptFolder(LoopFolder):
    """The run of a script."""

    def __init__(self, request: ScriptRequest, plan: Plan, world: World) -> None:
        self._request = request
        assert request.run is not None
        super().__init__(request.run, plan, world, request.seed)

    def _description(self, plan: Plan, seed: int) -> dict[str, Any]:
        return super()._description(plan, seed) | {
            "task": str(self._request.script),
            "class": SCRIPT,
            "fields": {"arguments": shlex.join(self._request.arguments)},
            "source": hashlib.sha256(files.read_bytes(self._request.script)).hexdigest()[:12],
        }

    def _refuse_another(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        folder = self.path
        for name, words in (
            ("class", "is no run of a script"),
            ("source", f"was trained with {now['task']} as it was before"),
            ("fields", "was trained with other arguments"),
            ("processes", f"was trained on {before.get('processes')} processes (--plan {before.get('plan') or 'one'})"),
        ):
            if before.get(name) != now[name]:
                raise RunError(
                    f"{folder} {words}: a script resumes as it began, so begin another run, without --run or with "
                    "another folder"
                )


class RecordedSteps(StepHandler):
    """Handles a script's steps: writes them down, saves, and passes them on.

    Its run begins at the first step. To resume a run, the script is replayed up to the checkpoint.

    Args:
        steps: spread the script over the processes.
        unsaved: why there are no checkpoints; "" if there are.
    """

    def __init__(self, request: ScriptRequest, plan: Plan, world: World, steps: SpreadSteps, unsaved: str) -> None:
        began = time.perf_counter()
        self._request, self._plan, self._world, self._spread = request, plan, world, steps
        self.inner = steps
        self._log = StepLog(plan, world, began, steps)
        self.chronometer = self._log.chronometer
        self.step = 0
        self._main = MainThread()
        self._folder: ScriptFolder | None = None
        self._unwritten = contextlib.ExitStack()
        self._optimizers: list[Optimizer] = []
        self._lr = 0.0
        self._stepped = False
        self._leader: Iteration | None = None
        """The iteration that gave the first batch since a step's beginning."""
        self._trains: int | None = None
        """Number of the iteration whose batches train now."""
        self._first = self._epochs = self._iterations = self._samples = 0
        self._live: dict[int, Iteration] = {}
        self._began: dict[int, Mapping[str, Tensor]] = {}
        """Random state at the beginning of each iteration, by which its batches can be loaded again."""
        self._saved_at = time.monotonic()
        self._reads: list[Any] = []
        self._clocks: list[float] = []
        self._unchanged: Unchanged | None = None
        self._replay: Replay | None = None
        self._unsaved = unsaved
        """Why there are no checkpoints."""
        self._said = self._closed = False
        if request.run is not None and world.share(Run.is_run(request.run)):  # a network's file system may be late
            self._open()

    def _open(self) -> None:
        """Begins or takes over the run. Collective."""
        request = self._request
        self._folder = self._log.folder = ScriptFolder(request, self._plan, self._world)
        self._log.meter.started(self._folder.info)
        self._log.stop.install([each for each in handled() if each != signal.SIGINT or not request.catches])
        if request.steps is not None:
            self._unwritten.enter_context(writing_nothing())
        if self._folder.checkpoint is not None:
            by_batches = self._world.share(Run(self._folder.path).read_description().get("replay") == BY_BATCHES)
            self._replay = Replay(self._folder.checkpoint, self._world.rank, loads=by_batches)
            self._first = self._replay.first
            self._spread.replaying = True

    # ---- What the script does ------------------------------------------------------------------------------

    def batches(self, loader: DataLoader[Any], begin: Begin) -> Iterator[Any]:
        """Begins an iteration of a loader, on the way back to a checkpoint one that loads nothing."""
        made = Iteration(loader=loader, number=self._iterations, begin=begin)
        self._iterations += 1
        if self._replay is None or made.number < self._first:
            self._began[made.number] = random_state(loader.generator)
            made.plain = begin()
        else:
            self._began[made.number] = self._replay.random(f"began.{made.number}")
            if self._replay.computes:
                self._replay.begin()
        return super().batches(loader, lambda: self._source(made))

    def _source(self, made: Iteration) -> Iterator[Any]:
        """Yields whole batches; a step ends between two of them."""
        if not self._main and made.plain is not None:  # a step ends in the main thread, where others are told
            self._unsaved = "a thread of the script loads its batches"
            yield from made.plain
            return
        self._live[made.number] = made
        shapes = self._replay.batches(made) if self._replay is not None and made.plain is None else None
        try:
            while True:
                if self._leader is made:
                    self._leader = None
                    if self._stepped:
                        self._end_step(made)
                self.chronometer.switch(DATA if torch.is_grad_enabled() else EVALUATION)
                try:
                    batch = next(made) if made.plain is not None else next(cast("Iterator[Any]", shapes))
                except StopIteration:
                    return
                made.taken += made.plain is None
                self.chronometer.switch(FORWARD if torch.is_grad_enabled() else EVALUATION)
                self._leader = self._leader or made
                if self._leader is made and torch.is_grad_enabled():
                    self._log.workers = made.loader.num_workers
                    self._samples += rows_of(batch) or 0
                yield batch
        finally:
            del self._live[made.number]
            if self._leader is made:
                self._leader = None

    def backward(self, loss: Tensor, run: Callable[[float], None]) -> None:
        """Runs a backward, and notes its loss."""
        if self._unchanged is None:
            tensors = _of_modules()
            try:
                tensors += variables_of(self._optimizers).tensors.values()
            except (TaskError, UsageError) as error:
                self._unsaved = str(error)
            self._unchanged = Unchanged(tensors)
        if self._replay is not None and not self._replay.computes:
            self._replay.backward(self._optimizers)
            return
        self._log.backward(loss, run)

    def read(self, tensor: Tensor, plain: Callable[[Tensor], T]) -> T:
        """Returns the value of a tensor, on the way back to a checkpoint the one that was read."""
        value = plain(gathered(tensor)) if self._replay is None else self._replay.read()
        self._reads.append(value)
        return value

    def clock(self, value: float) -> float:
        """Returns what a clock shows the script, on the way back to a checkpoint what it showed."""
        if self._replay is not None and self._replay.clocks:
            value = self._replay.clocks.popleft()
        self._clocks.append(value)
        return value

    def add_optimizer(self, optimizer: Optimizer) -> None:
        """Notes an optimizer."""
        self._optimizers.append(optimizer)
        super().add_optimizer(optimizer)
        self._log.watch(optimizer)
        optimizer.register_step_pre_hook(self._note_update)
        optimizer.register_step_post_hook(lambda *_: self._note_step(optimizer))
        if self._replay is None:
            return
        plain = optimizer.step

        def step(optimizer: Optimizer, *arguments: Any, **options: Any) -> Any:
            if self._replay is None or self._replay.computes:
                return plain(*arguments, **options)
            return self._note_step(optimizer)  # on the way back to a checkpoint it does nothing

        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    def _note_update(self, optimizer: Optimizer, arguments: Sequence[Any], options: Mapping[str, Any]) -> None:
        if optimizer is self._optimizers[0]:
            self._lr = float(optimizer.param_groups[0]["lr"])
        if len(arguments) > 1 or options:
            self._unsaved = f"{type(optimizer).__name__}.step is given a closure"

    # ---- Steps ---------------------------------------------------------------------------------------------

    def _note_step(self, optimizer: Optimizer) -> None:
        self._stepped = True
        leader = self._leader
        if leader is None:
            if optimizer is self._optimizers[0]:
                self._unsaved = "its batches come from no loop over a torch.utils.data.DataLoader"
                self._end_step(None)
        elif leader.number != self._trains:
            if self._trains is None:
                self._first = leader.number
            self._trains = leader.number
            self._epochs += 1

    def _end_step(self, made: Iteration | None) -> None:
        """Ends a step: its record, its checkpoint; ends the script after a signal. Collective."""
        self.step += 1
        self._stepped = False
        seconds = self.chronometer.end_step()
        self.chronometer.switch(FORWARD)
        if self._replay is not None:
            self._samples = 0
            if self.step == self._replay.step:
                self._restore(self._replay)
            return
        if self._folder is None:
            self._open()
        place = self.step, max(self._epochs - 1, 0), self._samples
        record = Record(*place, 0.0, self._lr, seconds, norm=None, skipped=False, flag=0.0)
        is_due = self._world.rank == 0 and time.monotonic() - self._saved_at > SAVE_SECONDS
        stop, due = self._log.end_step(record, is_due) or (False, False)
        if self._request.steps is not None:
            if self.step < self._request.steps:
                return
            self.close(None)
            raise SystemExit(EXIT_OK)
        if self._request.save_every is not None:
            due = self.step % self._request.save_every == 0
        if stop or due:
            self._save()
        if stop:
            self.close(None, interrupted=True)
            raise SystemExit(INTERRUPTED if self._unsaved else EXIT_INTERRUPTED)

    # ---- Checkpoints ---------------------------------------------------------------------------------------

    def _save(self) -> None:
        """Saves the script's state in the background, where it can be had. Collective."""
        self._saved_at = time.monotonic()
        self._log.flush()
        if self._said:
            return
        assert self._folder is not None
        with self.chronometer.during(CHECKPOINT):
            state: tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]] = ({}, {}, {})
            try:
                state = self._state()
            except (TaskError, UsageError) as error:
                self._unsaved = str(error)
            self._unsaved = next(filter(None, self._world.gather(self._unsaved)), "")
            if not self._unsaved:
                self._folder.save(self.step, *state)
            elif self._world.rank == 0:
                complain(f"grappe: no checkpoints: {self._unsaved}")
        self._said = bool(self._unsaved)

    def _state(self) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Any]]:
        """Returns tensors that all have alike, this process's own, and JSON; TaskError: not to resume. Collective."""
        if self._unsaved:
            return {}, {}, {}
        variables = variables_of(self._optimizers)
        changed = self._changed(variables, _of_modules())
        tensors, values = self._kept().state()
        own: dict[str, Tensor] = {}
        rank = self._world.rank
        tensors |= {f"script.{number}": full(variables.tensors[path]) for number, path in enumerate(changed)}
        gradients = {
            number: each.grad for number, each in enumerate(parameters_of(self._optimizers)) if each.grad is not None
        }
        tensors |= {f"gradient.{number}": gradient for number, gradient in gradients.items()}
        states = {"now": random_state(), **{f"began.{number}": state for number, state in self._began.items()}}
        for name, state in states.items():
            own |= {f"local.{rank}.random.{name}.{key}": tensor for key, tensor in state.items()}
        for number, generator in enumerate(variables.generators.values()):
            own[f"local.{rank}.generator.{number}"] = state_of(generator)
        if not rank:
            texts = {"numbers": variables.numbers, "reads": self._reads, "clocks": self._clocks}
            own |= {f"local.0.{name}": as_tensor(value) for name, value in texts.items()}
            if own["local.0.reads"].nbytes > MOST_READ:
                raise TaskError("it has read too many values to read them again")
        live = [[number, each.taken, each.print] for number, each in self._live.items()]
        script = {"first": self._first, "paths": changed, "gradients": [*gradients], "live": live, "kept": values}
        return tensors, own, {"script": script}

    def _changed(self, variables: Variables, modules: Sequence[Tensor]) -> list[str]:
        """Lists variables whose tensors differ from those of a script that begins; TaskError: one cannot be saved.

        Versions of the tensors of `modules` do not tell: batch normalisation changes buffers unnoticed.
        """
        if any(scaler.is_enabled() for scaler in alive(torch.amp.GradScaler)):
            raise TaskError("a GradScaler skips steps by what it sees: take bf16")
        assert self._unchanged is not None
        alike = set(map(id, modules))
        changed = [path for path, each in variables.tensors.items() if id(each) in alike or each not in self._unchanged]
        if strange := [path for path in changed if variables.tensors[path].layout is not torch.strided]:
            raise TaskError(f"{strange[0]} is no dense tensor")
        reached = set(map(id, variables.tensors.values()))
        if any(id(each) not in reached and each not in self._unchanged for each in modules):
            raise TaskError("a module that changes is in none of its variables")
        return changed

    def _kept(self) -> KeptObjects:
        return KeptObjects({f"optimizer[{number}]": each for number, each in enumerate(self._optimizers)})

    def _restore(self, replay: Replay) -> None:
        """Puts the checkpoint's state into the script, if it has done what it did before. Collective."""
        try:
            variables = variables_of(self._optimizers)
            problem = self._differs(replay, variables) if self._world.rank == 0 else ""
            if problem := self._world.share(problem):
                raise RunError(
                    f"the script cannot resume at step {self.step}: {problem}. Begin another run, or resume by the "
                    "script's own checkpoints"
                )
            replay.compute()
            saved, rank = replay.values, self._world.rank
            with torch.no_grad():
                for number, path in enumerate(saved["paths"]):
                    variables.tensors[path].detach().copy_(replay.tensors.read(f"script.{number}"))
            self._kept().restore(replay.tensors, saved["kept"])
            for number, each in enumerate(parameters_of(self._optimizers)):
                kept = number in saved["gradients"]
                each.grad = replay.tensors.read(f"gradient.{number}").to(each.device) if kept else None
            for number, taken, first in saved["live"]:
                self._live[number].go_to(taken, replay.random(f"began.{number}"), first)
            for number, generator in enumerate(variables.generators.values()):
                set_state_of(generator, replay.tensors.read(f"local.{rank}.generator.{number}").clone())
            set_random_state(replay.random("now"))
        finally:
            self._leave_replay()

    def replay_error(self, error: BaseException) -> RunError | None:
        """Makes the error of a script that fails on its way back to a checkpoint; None if it is not there."""
        is_own = isinstance(error, Exception) and not lost_another(str(error))
        if self._replay is None or self._folder is None or not is_own:
            return None
        run, step = self._folder.path, self._replay.step
        why, line = type(error).__name__, line_of(error) or error
        failed = f"{run}: on its way back to step {step} the script failed with {why}: {line}"
        if self._replay.loads:
            return RunError(f"{failed}. Begin another run, or resume by the script's own checkpoints")
        if self._world.rank == 0:
            Run(run).describe(replay=BY_BATCHES)
        return ReplayError(f"{failed}. The next start loads each of its batches again")

    def _leave_replay(self) -> None:
        if self._replay is not None:
            self._replay.end()
            self._replay = None
            self._saved_at = time.monotonic()
            self.chronometer.begin()
        self._spread.replaying = False

    def _differs(self, replay: Replay, variables: Variables) -> str:
        """Returns what is not as it was at the checkpoint; "" if all is."""
        if replay.reads:
            return f"it reads {len(replay.reads)} values less than before"
        for number, path in enumerate(replay.values["paths"]):
            if path not in variables.tensors:
                return f"there is no tensor {path}"
            if variables.tensors[path].shape != replay.tensors.shape(f"script.{number}"):
                return f"{path} has another shape"
        before = from_tensor(replay.tensors.read("local.0.numbers").clone())
        for path, number in variables.numbers.items():
            if path in before and repr(before[path]) != repr(number):
                return f"{path} is {number}, and was {before[path]}"
        if sorted(self._live) != sorted(number for number, *_ in replay.values["live"]):
            return "other loops over loaders are running"
        return ""

    # ---- The end -------------------------------------------------------------------------------------------

    def close(self, error: BaseException | None, *, interrupted: bool = False) -> None:
        """Ends the run. Collective without an error.

        Raises:
            RunError: the script has ended before it came back to its checkpoint.
        """
        if self._closed:
            return
        if isinstance(error, SystemExit | KeyboardInterrupt):
            interrupted = isinstance(error, KeyboardInterrupt)
            code = getattr(error, "code", None)
            if not interrupted:
                error = TaskError(f"the script has ended with {code}") if code else None
        if error is None and self._replay is not None:
            error = RunError(
                f"the script has ended at step {self.step}, before its checkpoint of step {self._replay.step}"
            )
            self.close(error)
            raise error
        if error is None and self._stepped and not interrupted:
            self._end_step(None)
        self._closed = True
        self._unwritten.close()
        self._leave_replay()
        self.chronometer.finish()
        if error is None:
            self._log.close()
        self._log.meter.ended(None)
        if self._folder is not None:
            self._folder.close(self.step, error, interrupted=interrupted)


def _of_modules() -> list[Tensor]:
    """Returns the parameters and buffers of all modules of the process."""
    return [
        tensor
        for module in alive(nn.Module)
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ]


def run_recorded(request: ScriptRequest, process: ProcessRank, rendezvous_folder: Path) -> None:
    """Runs an unedited script as a run: this process computes its own rows of each batch."""
    plan = as_plan(request.plan)
    world = join_world(plan, process, rendezvous_folder)
    request = world.share(request)  # a launcher's processes have drawn a seed and a run's name each
    keys = PlanKeys(plan, world)
    spread = SpreadSteps(world, keys, rows_context(world, request.script.parent))
    steps = RecordedSteps(request, plan, world, spread, keys.unsaved)
    seed_all(request.seed)
    with (
        hidden_rank(),
        intercepted(steps),
        surroundings_shared(world, rendezvous_folder),
        reads_noted(world, steps.read, steps.clock),
        dates_of_clock(),
        waits_counted(steps.chronometer),
        gradients_summed(world) if plan.shard > 1 else contextlib.nullcontext(),
        shards_whole() if plan.shard > 1 else contextlib.nullcontext(),
        spread.running(),
    ):
        try:
            run_as_main(request.script, request.arguments)
            spread.close()
            steps.close(None)
        except BaseException as error:
            failed = steps.replay_error(error)
            steps.close(failed or error)
            if failed is not None:
                raise failed from error
            raise
        finally:
            for stream in alive(io.IOBase):  # the process ends without Python's own end
                with contextlib.suppress(Exception):
                    stream.flush()
