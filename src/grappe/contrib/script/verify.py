"""grappe verify --script: compares what grappe launch runs under a plan with one process, step by step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import math
import secrets
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from grappe.checkpoint.weights import full_tensor
from grappe.contrib.script.against import Agreement
from grappe.contrib.script.launch import ScriptRequest, refuse_plan, request_for_one, start_server
from grappe.contrib.script.ported import tensors_of
from grappe.contrib.script.recorded import run_recorded
from grappe.errors import GrappeError, UsageError
from grappe.launch.rank import ProcessRank, rank_from_environment
from grappe.launch.start import start
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.training.short_run import CALLED
from grappe.verbs.verify.runner import BOUND, FACTOR
from grappe.verbs.verify.trained_by_hand import gap, move
from grappe.verbs.verify.verify import SHOWN, STEPS
from grappe.words import and_more

FLOOR = 1e-5
"""Least tolerance, relative to a tensor's norm."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScriptTrial:
    """The result of a trial of a script."""

    steps: int
    apart: Mapping[tuple[int, str], float]
    """|a - b| / |a| from one process's, by the step from 1 and the tensor."""
    lines: Sequence[str]
    """Printed until the last step."""


def verify_script(
    script: Path | str,
    arguments: Sequence[str] = (),
    plan: AnyPlan = "",
    *,
    steps: int = STEPS,
    note: Callable[[str], None] = lambda line: None,
) -> Agreement:
    """Runs a script for one process as `grappe launch` does, on one process and under a plan; compares each step.

    Gradients and weights are compared after each step of an optimizer, and the lines that are printed until the last.

    Args:
        arguments: the script's own.
        steps: steps of an optimizer to compare, at most as many as the script takes.
        note: callback, called with a short description of the next trial.

    Raises:
        UsageError: there is no such script, it takes no step, or the plan is refused before anything trains.
    """
    script, chosen = Path(script), as_plan(plan)
    if steps < 1:
        raise UsageError(f"--steps={steps}: it must be at least 1")
    if chosen.processes < 2 or rank_from_environment() is not None:
        raise UsageError(
            "grappe verify --script needs a plan of several processes, which it starts: --plan replicate=2"
        )
    seed, alone = secrets.randbits(31), Plan(device=chosen.device, threads=chosen.threads)
    request = request_for_one(script, arguments, chosen, seed)
    refuse_plan(chosen)
    start_server(script, chosen)
    with tempfile.TemporaryDirectory(prefix="grappe-verify-") as temporary:

        def trial(name: str, under: Plan, *, first: bool = False, moved: bool = False) -> ScriptTrial:
            note(f"{script} {name}")
            folder = Path(temporary)
            own = dataclasses.replace(request, plan=str(under), run=folder / name)
            recorder = _StepRecorder(folder, steps, first=first, moved=moved)
            return start(CALLED, functools.partial(run_trial, own, recorder), under)

        plain = trial("on one process", alone, first=True)
        if not plain.steps:
            raise UsageError(f"{script} takes no step of a torch.optim.Optimizer. Did it need arguments?")
        try:
            several = trial(f"under {chosen}", chosen)
        except GrappeError as error:
            return Agreement(step=0, tensors=0, largest=0.0, difference=" ".join(str(error).split()))
        agreement = judged(plain, plain, several)
        if agreement.learns_the_same:
            return agreement
        return judged(plain, trial("on one process, its weights moved by their last bit", alone, moved=True), several)


def judged(plain: ScriptTrial, moved: ScriptTrial, several: ScriptTrial) -> Agreement:
    """Compares a plan's trial with what rounding alone makes on one process."""
    names = list(dict.fromkeys(name for _, name in several.apart))
    noise: dict[str, float] = {}
    largest, drifting = 0.0, list[str]()
    for (step, name), apart in several.apart.items():
        # Of all steps so far, as one step's rounding can be small by chance.
        noise[name] = max(noise.get(name, 0.0), moved.apart.get((step, name), 0.0))
        tolerated = max(FLOOR, FACTOR * noise[name])
        if tolerated > BOUND:
            drifting += [] if name in drifting else [name]
        elif apart > tolerated:
            words = f"{name}: {apart:.1e} of its norm apart, {tolerated:.0e} is tolerated"
            return Agreement(step=step, tensors=len(names), largest=largest, difference=words)
        else:
            largest = max(largest, apart)
    difference = f"{plain.steps} steps on one process, {several.steps} under the plan" * (plain.steps != several.steps)
    for number, line in enumerate(plain.lines):
        own, again = (trial.lines[number] if number < len(trial.lines) else "" for trial in (several, moved))
        if line != own and line == again and not difference:
            difference = f"printed line {number + 1}: {line!r} on one process, {own!r} under the plan"
    notes = []
    if drifting:
        notes = [
            f"not judged: {and_more(drifting, SHOWN)}, which one process moves by more than {BOUND / FACTOR:.1%} if "
            "its first weights are moved by their last bit"
        ]
    if len(drifting) == len(names):
        difference = difference or "cannot be judged: rounding alone moves every tensor. Give a smaller learning rate"
    return Agreement(step=several.steps, tensors=len(names), largest=largest, difference=difference, notes=notes)


def run_trial(
    request: ScriptRequest, recorder: _StepRecorder, process: ProcessRank, rendezvous_folder: Path
) -> ScriptTrial:
    """Runs a script for some steps, as grappe launch does; process 0 compares or notes their tensors."""
    recorder.reads = process.rank == 0
    with (
        register_module_forward_pre_hook(lambda module, *_: recorder.move(module.parameters(recurse=False))),
        register_optimizer_step_pre_hook(lambda optimizer, *_: recorder.move(recorder.named(optimizer).values())),
        register_optimizer_step_post_hook(lambda optimizer, *_: recorder.compare(optimizer)),
        contextlib.redirect_stdout(io.StringIO()) as text,
        contextlib.suppress(SystemExit),
    ):
        run_recorded(request, process, rendezvous_folder)
    return ScriptTrial(steps=recorder.step, apart=recorder.apart, lines=text.getvalue().splitlines())


class _StepRecorder:
    """Notes the gradients and weights of each step of an optimizer, or their distance from those of one process.

    Args:
        folder: has the tensors of each step of one process.
        steps: number of steps, after which the script ends.
        first: whether this is the one process that is compared with.
        moved: whether weights are moved by their last bit before they are used, to measure what rounding makes.
    """

    def __init__(self, folder: Path, steps: int, *, first: bool, moved: bool) -> None:
        self._folder, self._steps, self._first, self._moves = folder, steps, first, moved
        self._moved, self._generator = set[int](), torch.Generator().manual_seed(0)
        self.reads = False
        """Whether this process compares or notes tensors."""
        self._tensors: dict[int, dict[str, Tensor]] = {}
        """Tensors of each optimizer, by its id."""
        self.step = 0
        self.apart: dict[tuple[int, str], float] = {}

    def named(self, optimizer: Optimizer) -> dict[str, Tensor]:
        if id(optimizer) not in self._tensors:
            number = len(self._tensors) + 1
            prefix = f"optimizer {number}: " if number > 1 else ""
            trained = {id(each) for group in optimizer.param_groups for each in group["params"]}
            named = tensors_of(optimizer).parameters
            self._tensors[id(optimizer)] = {
                f"{prefix}{name}": each for name, each in named.items() if id(each) in trained
            }
        return self._tensors[id(optimizer)]

    @torch.no_grad()
    def move(self, parameters: Iterable[Tensor]) -> None:
        """Moves parameters by about their last bit, once.

        Gradients of the first step must be moved, too: one that is zero but for rounding, of a bias before a batch
        normalisation or of attention's keys, is another one then.
        """
        for each in parameters if self._moves else ():
            if id(each) not in self._moved:
                self._moved.add(id(each))
                move(each, self._generator)

    def compare(self, optimizer: Optimizer) -> None:
        """Compares, or notes, an optimizer's tensors after its step.

        Raises:
            SystemExit: it was the last one.
        """
        named = self.named(optimizer)
        self.step += 1
        own = {f"the gradient of {name}": each.grad for name, each in named.items() if each.grad is not None} | named
        own = {name: full_tensor(each.detach()) for name, each in own.items()}  # collective, where it is sharded
        if self.reads:
            file = self._folder / f"{self.step}.pt"
            if self._first:
                SAVE(own, file)
            else:
                for name, each in LOAD(file, weights_only=True).items():
                    self.apart[self.step, name] = gap(each, own[name]) if name in own else math.inf
        if self.step == self._steps:
            raise SystemExit


SAVE, LOAD = torch.save, torch.load
"""torch's own functions, before a script runs whose load waits for others, and whose files process 0 reads alone."""
