"""Records the steps of a plain process in a small file, and compares the steps of another machine with it.

A record has sketches (see sketch.py): of each unit's outputs and gradients, of weights, and of single calls of
operators on drawn inputs. It is data: what it names is looked up among what this machine's own training calls, and
never called.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import platform
import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors.numpy
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from grappe.contrib.lab.sketch import PERTURBED, WIDTH, CallLog, Numbers, floats, gaps, moved, sketch
from grappe.errors import UsageError
from grappe.errors.foreign_text import printable
from grappe.launch import files
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.private_api.torch import tree_leaves, tree_map
from grappe.task import Task
from grappe.training.request import data_folder
from grappe.training.short_run import TaskProcess, short_run
from grappe.training.task_reference import TaskReference
from grappe.verbs.verify.random_ops import RandomOps
from grappe.verbs.verify.runner import FACTOR
from grappe.verbs.verify.trained_by_hand import ReferenceRequest
from grappe.words import AMD_DRIVER, NVIDIA, VERSION, driver_version, processor_name

FORM = 2
MOST_BYTES = 5_000_000
STEPS = 4
FLOOR = 4e-6
"""The least relative difference of a result that is more than rounding; 1.7e-6 was seen, of a call 1.3e-6."""
CALL_FLOOR = 2e-6
COARSE = 1 / 64
"""Up to this relative difference of a call's result, or of a unit's output, another precision explains it."""
DATA, LOSS = "the data", "the loss"


class RecordHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The description in a record: its task, machine and names."""

    form: int
    task: str
    fields: dict[str, str]
    precision: str
    machine: dict[str, str]
    """Versions, processor, device, settings; see `this_machine`."""
    draws: bool
    """Whether the model draws random numbers, whose means it was trained with."""
    keys: list[str]
    """Names of the results, in the order in which they were computed: "step|direction|unit|occurrence"."""
    calls: list[str]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RecordVerdict:
    """The verdict on a training on another machine."""

    verdict: str
    """same, same but for, different."""
    because: str = ""
    """The explained difference, or the place of the first one."""
    operator: str = ""
    """The operator that computes something else; "": none does on drawn inputs."""
    script: str = ""
    """A program that shows it."""
    machines: tuple[str, ...] = ()
    """Differences of the two machines, a few words each."""
    results: int = 0
    """Results that were compared."""
    calls: int = 0
    largest: float = 0.0
    """The largest relative difference of a result that is the same."""
    noise: tuple[float, float] = (0.0, 0.0)
    """The difference that rounding makes to that result, there and here."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recorded:
    """Steps of a plain process."""

    header: RecordHeader
    results: Numbers
    """Sketches (N, WIDTH + 1), of the header's keys."""
    noise: Numbers
    """The relative difference that rounding makes, by result (N,)."""
    calls: Numbers
    """Sketches of the header's calls."""
    call_noise: Numbers
    verdict: RecordVerdict | None = None
    """The comparison with the record of another machine; None: there is none to compare with."""


def this_machine(device: torch.device, threads: int) -> dict[str, str]:
    """Returns what may change what a training computes: versions, processor, device and settings."""
    gpu = device.type == "cuda"
    container = os.environ.get("APPTAINER_CONTAINER") or os.environ.get("SINGULARITY_CONTAINER") or ""
    matmul: Any = getattr(torch.backends.mkldnn, "matmul", None)  # torch 2.8 has none
    settings = {
        "matrix products": LEGACY.get(matmul.fp32_precision) if matmul else torch.get_float32_matmul_precision(),
        "TF32": f"{torch.backends.cuda.matmul.allow_tf32}, {torch.backends.cudnn.allow_tf32}",
        **{name: os.environ[name] for name in PRECISIONS if name in os.environ},
    }
    return {
        "grappe": VERSION,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "processor": processor_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name(device) if gpu else device.type,
        "driver": next((driver_version(file.read_text()) for file in (NVIDIA, AMD_DRIVER) if file.exists()), ""),
        "container": Path(container).name,
        "threads": str(threads),
        "oneDNN": str(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled),
        "arithmetic": json.dumps(settings, sort_keys=True),
    }


LEGACY = {"none": "highest", "ieee": "highest", "tf32": "high", "bf16": "medium"}
"""The old names of precisions: torch refuses to tell them where anybody has set a new one."""
PRECISIONS = (
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "DNNL_DEFAULT_FPMATH_MODE",
    "NVIDIA_TF32_OVERRIDE",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
)
"""Variables by which libraries compute with fewer bits."""


class _Results:
    """Sketches of one model's results, by their keys, in the order of the computation.

    Args:
        seed: with one, each unit's output is moved by its last bit, to see what rounding makes.
    """

    def __init__(self, model: nn.Module, log: CallLog, seed: int | None) -> None:
        self.sketches: dict[str, Numbers] = {}
        self.places: list[int] = []
        self._log, self._seed, self._step = log, seed, 0
        self._counts = Counter[str]()
        self._units: dict[int, str] = {}
        """The unit whose backward computes a tensor's gradient: it is the last that takes the tensor."""
        self._alive: list[Tensor] = []
        for name, module in model.named_modules():
            unit = name or "the model"
            module.register_forward_pre_hook(
                lambda _, args, kwargs, unit=unit: self._enter(unit, (args, kwargs)), with_kwargs=True
            )
            module.register_forward_hook(lambda _, args, output, unit=unit: self._leave(unit, output))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(
                    lambda parameter, name=name: self.add("backward", name, parameter.grad)
                )

    def begin(self, step: int) -> None:
        """Begins a step."""
        self._step = step
        self._counts.clear(), self._units.clear(), self._alive.clear()

    def add(self, direction: str, unit: str, *tensors: Tensor) -> None:
        """Sketches a result."""
        self._log.paused = True
        name = f"{self._step}|{direction}|{unit}"
        self.sketches[f"{name}|{self._counts[name]}"] = sketch(tensors)
        self._counts[name] += 1
        self.places.append(len(self._log.order))
        self._log.paused = False

    def _enter(self, unit: str, inputs: Any) -> None:
        for tensor in floats(inputs):
            if id(tensor) not in self._units:
                self._watch(unit, tensor, f"the input of {unit}")
            self._units[id(tensor)] = unit

    def _leave(self, unit: str, output: Any) -> Any:
        if (seed := self._seed) is not None:
            output = tree_map(
                lambda leaf: moved(leaf, seed) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf,
                output,
            )
        for tensor in floats(output):
            if id(tensor) not in self._units:
                self._watch(f"what follows {unit}", tensor, unit)
        return output

    def _watch(self, consumer: str, tensor: Tensor, name: str) -> None:
        """Sketches a tensor now, and its gradient when backward computes it."""
        self._units[id(tensor)] = consumer
        self._alive.append(tensor)  # so that no other has its id
        self.add("forward", name, tensor)
        if tensor.requires_grad:
            key = id(tensor)
            tensor.register_hook(lambda gradient: self.add("backward", self._units.get(key, consumer), gradient))


def recorded_steps(
    request: ReferenceRequest, reference: TaskReference, other: Recorded | None, process: TaskProcess
) -> Recorded:
    """Trains on the plain process, and returns the record, compared with another one if that is given."""
    _, batches, new_model = request.begin(process)
    log, models = CallLog(), [new_model() for _ in range(1 + PERTURBED)]
    every = [
        _Results(model.model, CallLog() if index else log, index - 1 if index else None)
        for index, model in enumerate(models)
    ]
    draws = False
    for number in range(request.steps):
        batch, log.keeps = batches.batch(number), not number  # later steps call the same
        rows = [rows for pieces in batch.slices for rows in pieces]
        for index, (model, results) in enumerate(zip(models, every, strict=True)):
            results.begin(number)
            loaded = tree_leaves([(piece.inputs, piece.targets) for piece in rows])
            results.add("forward", DATA, *(leaf for leaf in loaded if isinstance(leaf, Tensor)))
            with RandomOps(off=True) as random_ops, contextlib.nullcontext() if index else log:
                loss, _ = model.step(number, batch)
            draws = draws or bool(random_ops.seen)
            results.add("forward", LOSS, torch.tensor([loss], dtype=torch.float64))
            for name, tensor in model.weights().items():
                results.add("update", name, tensor)
    base, others = every[0], every[1:]
    noise = [
        max((float(gaps(numbers, other.sketches[key])) for other in others if key in other.sketches), default=0.0)
        for key, numbers in base.sketches.items()
    ]
    calls = log.sketches()
    header = RecordHeader(
        form=FORM,
        task=Path(reference.name).name,  # its folder is another one on another machine
        fields={name: str(value) for name, value in reference.texts.items()},
        precision=request.plan.precision,
        machine=this_machine(process.world.device, torch.get_num_threads()),
        draws=draws,
        keys=list(base.sketches),
        calls=list(calls),
    )
    recorded = Recorded(
        header=header,
        results=np.stack(list(base.sketches.values())),
        noise=np.array(noise),
        calls=np.stack([numbers for numbers, _ in calls.values()]) if calls else np.zeros((0, WIDTH + 1)),
        call_noise=np.array([noise for _, noise in calls.values()]),
    )
    verdict = None if other is None else compared(other, recorded, log, base.places)
    return dataclasses.replace(recorded, verdict=verdict)


def differing_calls(there: Recorded, here: Recorded) -> dict[str, float]:
    """Returns the calls that both have and whose results differ by more than rounding, with by how much."""
    places = {name: place for place, name in enumerate(there.header.calls)}
    differing = {}
    for place, name in enumerate(here.header.calls):
        if (other := places.get(name)) is not None:
            away = float(gaps(there.calls[other], here.calls[place]))
            # The smaller noise: a kernel that computes with fewer bits makes more of it.
            if away > max(CALL_FLOOR, FACTOR * min(there.call_noise[other], here.call_noise[place])):
                differing[name] = away
    return differing


def compared(there: Recorded, here: Recorded, log: CallLog, places: Sequence[int]) -> RecordVerdict:
    """Compares what two machines computed, in the order in which this one did.

    Args:
        log: this machine's calls.
        places: the number of calls before each result.

    Raises:
        UsageError: the two trained something else.
    """
    for name in ("task", "fields"):
        if (a := getattr(there.header, name)) != (b := getattr(here.header, name)):
            raise UsageError(f"the record is of {name} {printable(a)}, and this is {printable(b)}: give the same")
    machines = changes(there.header.machine, here.header.machine)
    others = {name: place for place, name in enumerate(there.header.keys)}
    both = [(place, others[name]) for place, name in enumerate(here.header.keys) if name in others]
    if not both:
        raise UsageError("the record has no result of this model: is it of another version of the task?")
    ours, theirs = (np.array(column) for column in zip(*both, strict=True))
    away = gaps(there.results[theirs], here.results[ours])
    precision = there.header.precision != here.header.precision
    noise: dict[str, float] = {}
    allowed = []
    for place, other in both:
        unit = here.header.keys[place].partition("|")[2]
        noise[unit] = max(noise.get(unit, 0.0), there.noise[other], here.noise[place])  # the largest so far
        # In another precision an optimizer's first step, the sign of a gradient, may be another number altogether.
        floor = FLOOR if not precision else COARSE if unit.startswith("forward") else np.inf
        allowed.append(max(floor, FACTOR * noise[unit]))
    beyond = away > np.array(allowed)
    same = np.flatnonzero(~beyond)
    worst = int(same[np.argmax(away[same])]) if len(same) else 0
    verdict = RecordVerdict(
        verdict="same",
        machines=tuple(machines),
        results=len(both),
        calls=len(set(there.header.calls) & set(here.header.calls)),
        largest=float(away[worst]),
        noise=(float(there.noise[theirs[worst]]), float(here.noise[ours[worst]])),
    )
    wrong = differing_calls(there, here)
    lowered = bool(wrong) and max(wrong.values()) <= COARSE and any(text.startswith("arithmetic") for text in machines)
    because, span = "no result of these steps, but a call of an operator on drawn inputs", log.order[:0]
    if beyond.any():
        first = int(np.argmax(beyond))
        step, direction, unit, _ = here.header.keys[ours[first]].split("|")
        because = (
            f"from step {int(step) + 1}, {unit}, in {direction}: {away[first]:.1e} of its norm, "
            f"where {allowed[first]:.1e} is rounding"
        )
        span = log.order[places[ours[first - 1]] if first else 0 : places[ours[first]]]
        if unit == DATA:
            wrong, lowered, because = {}, False, (
                f"the data: in step {int(step) + 1} the batch is another (other files, or another library that reads "
                "them)"
            )  # fmt: skip
    if lowered or not (wrong or beyond.any()):
        but = "the precision" if lowered or precision else "the order of sums" if (away > 0).any() else ""
        return dataclasses.replace(verdict, verdict="same but for" if but else "same", because=but)
    verdict = dataclasses.replace(verdict, verdict="different", because=because)
    name = next((name for name in (*span, *here.header.calls) if name in wrong), "")
    if not name:
        return verdict
    operator = log.calls[name].operator
    alike = [log.calls[each] for each in wrong if log.calls[each].operator is operator]
    smallest = min(alike, key=lambda call: call.numbers)
    expected = there.calls[there.header.calls.index(str(smallest))]
    where, own = (
        ", ".join(f"{name} {value}" for name, value in of.header.machine.items() if value) for of in (there, here)
    )
    return dataclasses.replace(
        verdict,
        operator=f"{operator.name()} ({wrong[name]:.1e})",
        script=smallest.script(expected, printable(where, 1000), own),
    )


def changes(there: Mapping[str, str], here: Mapping[str, str]) -> list[str]:
    """Describes what is different on two machines, of what `here` names; see `this_machine`."""
    return [
        f"{name}: {printable(there.get(name) or 'none', 200)} -> {here[name] or 'none'}"
        for name in here
        if there.get(name) != here[name]
    ]


def comparison(header: RecordHeader, file: Path | str, device: str = "") -> str:
    """Returns the command that compares what a machine computes with a record."""
    words = ["grappe", "verify", header.task, *(f"{name}={value}" for name, value in header.fields.items())]
    keys = {"device": device, "precision": header.precision.removeprefix("fp32")}
    plan = ",".join(f"{key}={value}" for key, value in keys.items() if value)
    return printable(shlex.join([*words, "--with", str(file), *(["--plan", plan] if plan else [])]), 1000)


def write(recorded: Recorded, file: Path) -> tuple[int, int]:
    """Writes a record, of as many steps as fit, or of every so many results of the first one.

    Returns:
        The number of steps and of results that are kept.
    """
    header = recorded.header
    of_steps = [int(name.partition("|")[0]) for name in header.keys]
    steps, stride = 1 + max(of_steps), 1
    while True:
        kept = [place for place, step in enumerate(of_steps) if step < steps][::stride]
        part = msgspec.structs.replace(header, keys=[header.keys[place] for place in kept])
        arrays = {
            "results": recorded.results[kept],
            "noise": recorded.noise[kept],
            "calls": recorded.calls,
            "call_noise": recorded.call_noise,
        }
        content = safetensors.numpy.save(arrays, {"grappe-record": msgspec.json.encode(part).decode()})
        if len(content) <= MOST_BYTES or len(kept) == 1:
            files.replace(file, content)
            return steps, len(kept)
        steps, stride = max(steps - 1, 1), stride if steps > 1 else 2 * stride


def read(file: Path) -> Recorded:
    """Reads a record.

    Raises:
        UsageError: the file is none.
    """
    try:
        if file.stat().st_size > 2 * MOST_BYTES:
            raise ValueError(f"it has more than {2 * MOST_BYTES:,} bytes")
        with safetensors.safe_open(file, framework="np") as opened:
            header = msgspec.json.decode((opened.metadata() or {})["grappe-record"], type=RecordHeader)
            results, noise, calls, call_noise = (
                np.asarray(opened.get_tensor(name), np.float64) for name in ("results", "noise", "calls", "call_noise")
            )
        keys, count = len(header.keys), len(header.calls)
        shapes = (keys, WIDTH + 1), (keys,), (count, WIDTH + 1), (count,)
        if header.form != FORM or (results.shape, noise.shape, calls.shape, call_noise.shape) != shapes:
            raise ValueError("it is of another version, or damaged")
    except (OSError, KeyError, ValueError, TypeError, SafetensorError, msgspec.MsgspecError) as error:
        raise UsageError(f"{file} is no record of grappe verify --record: {printable(error, 300)}") from None
    return Recorded(header=header, results=results, noise=noise, calls=calls, call_noise=call_noise)


def record(
    task: Task | type[Task] | str,
    plan: AnyPlan = "",
    *,
    fields: Mapping[str, object] | None = None,
    data: Path | str | None = None,
    steps: int = STEPS,
    other: Recorded | None = None,
) -> Recorded:
    """Trains a few steps on one plain process, on the plan's device and in its precision, and records them.

    Args:
        other: a record to compare with.

    Raises:
        GrappeError: the task does not train.
    """
    if steps < 1:
        raise UsageError(f"--steps={steps}: it must be at least 1")
    chosen = as_plan(plan)
    reference = TaskReference.of(task, fields)
    plain = Plan(device=chosen.device, threads=chosen.threads, precision=chosen.precision)
    request = ReferenceRequest(steps=steps, folder=Path(), plan=plain)
    work = functools.partial(recorded_steps, request, reference, other)
    return short_run(work, reference, request.process, data_folder(data))
