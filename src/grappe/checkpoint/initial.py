"""Makes a training's initial weights in a separate process, and saves them as step 0."""

from __future__ import annotations

import contextlib
import json
import mmap
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from grappe.checkpoint.commit import Origin, commit, write_new
from grappe.checkpoint.foreign_training import (
    ALONE,
    NEW_LAYERS,
    Begin,
    copy_values,
    differences,
    files_of,
    foreign_training,
    foreign_weights,
    match,
    some,
)
from grappe.checkpoint.format import STATE, choose, step_folder
from grappe.checkpoint.tensor_file import Piece, write
from grappe.checkpoint.weights import LOCAL, MODEL, InMemory, Weights, named_tensors
from grappe.errors import GrappeError, OutOfMemory, RunError, TaskError, disk_advice
from grappe.errors.user_code import user_call
from grappe.errors.user_line import at
from grappe.launch import files
from grappe.launch.fork import LimitReached, Limits, run_in_fork
from grappe.task import Task
from grappe.words import format_bytes

FRESH = {"step": 0}
"""The JSON of a checkpoint before the first step."""
SLACK = 1 << 26  # bytes, for what is not weights: names, headers, torch's own
LEAST_SECONDS = 3
MOST_STATES = 3  # of an optimizer, each as large as the weights, as with Adam's amsgrad
BYTES_PER_SECOND = 10**8  # of a file that is read, and copied into the model


def build(
    task: Task,
    checkpoints: Path,
    begin: Begin | None,
    run: str = "",
    kind: torch.dtype = torch.float32,
    check: Callable[[nn.Module], None] = lambda model: None,
) -> tuple[str, ...]:
    """Makes the model in a separate process and saves it as step 0; the memory of building is freed with that process.

    A run that begins with another training's state is saved as the step after that training's epochs.

    Args:
        begin: what to take over, instead of fresh weights.
        run: the id of the run that it is for.
        kind: float64 for weights in float64.
        check: raises GrappeError where the data do not suit the model.

    Returns:
        Notes for the user about what was taken over.

    Raises:
        OutOfMemory: the separate process had no room for the whole model.
        GrappeError: the model cannot be made, or the given weights do not fit it.
    """

    def work() -> str:
        torch.set_num_threads(1)  # a forked process must not use its parent's threads
        model = _made(task)
        check(model)
        if kind == torch.float64:  # before it takes anything over: a float32 would round it
            model.double()
        if begin is not None and (begin.with_optimizer or begin.epochs_done):  # it may begin after step 0
            return _continue(task, model, begin, checkpoints, run)
        notes = "" if begin is None else take_over(model, begin.source)
        _save(model, checkpoints, run)
        return notes

    try:
        notes = run_in_fork(work)
    except OutOfMemory as error:
        raise OutOfMemory(
            f"no room for the initial weights: process 0 starts a separate process that makes the whole model "
            f"once, under any plan{_parameters_in_words(task)}. {error}"
        ) from error
    return tuple(notes.splitlines())


def _parameters_in_words(task: Task) -> str:
    """Returns the size of the model's parameters, as the end of a clause; "" where it has to have values."""

    def work() -> str:
        with contextlib.suppress(Exception), torch.device("meta"):
            parameters = user_call(task, "model").parameters()
            size = sum(parameter.nbytes for parameter in parameters if parameter.is_meta)
            return f", with {format_bytes(size)} of parameters"
        return ""

    try:
        return run_in_fork(work)
    except GrappeError:  # it does not even fit without values
        return ""


def built(task: Task) -> Weights:
    """Returns the weights of a freshly made model, a function of the task's seed alone."""
    return InMemory({name: tensor.detach() for name, tensor in named_tensors(_made(task)).items()})


def _continue(task: Task, model: nn.Module, begin: Begin, checkpoints: Path, run: str) -> str:
    """Saves the first checkpoint of a run that goes on with another training's state; returns notes, one a line."""
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    optimizer = user_call(task, "optimizer", trained) if begin.with_optimizer else None

    def work() -> str:
        note = _copied(model, begin.source)
        with _refusing(begin.source):
            training = foreign_training(begin, model, optimizer)
        _save(model, checkpoints, run, training.state, training.pieces)
        step = training.state["step"]
        state = "with the optimizer's state" if optimizer is not None else "with a fresh optimizer"
        where = f"begins after {training.epochs_done} epochs (step {step}) {state}, from {begin.source}"
        return "\n".join(filter(None, (where, *training.notes, note)))

    return _limited(work, model, begin.source, 1 + MOST_STATES if begin.with_optimizer else 1)


def _made(task: Task) -> nn.Module:
    torch.manual_seed(task.seed)
    model = user_call(task, "model")
    check_model(task, model)
    return model


def check_model(task: Task, model: object) -> None:
    """Raises TaskError where what `task.model()` returned cannot be trained."""
    name, place = f"{type(task).__name__}.model()", at(task, "model")
    if not isinstance(model, nn.Module):
        raise TaskError(f"{name} returned {type(model).__name__}: return an nn.Module{place}")
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise TaskError(
            f"{name} returned a {type(model).__name__}: return the module in it; the plan spreads it, as in --plan "
            f"replicate=2{place}"
        )
    sparse = [key for key, tensor in named_tensors(model).items() if tensor.layout != torch.strided]
    if sparse:
        raise TaskError(
            f"{name} has sparse tensors ({some(sparse)}), which a checkpoint cannot hold: register their indices and "
            f"values as buffers, and make the sparse tensor of them in forward(){place}"
        )
    lazy = [key for key, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise TaskError(
            f"{name} has parameters without a shape ({some(lazy)}): give lazy layers their sizes, as in "
            f"nn.Linear(3, 4), or call the model once in model(){place}"
        )


def _save(
    model: nn.Module, checkpoints: Path, run: str, state: Mapping[str, Any] = FRESH, others: Sequence[Piece] = ()
) -> None:
    pieces = [Piece.complete(f"{MODEL}{name}", value.cpu()) for name, value in model.named_parameters()]
    pieces += [Piece.complete(f"{LOCAL}0.{name}", value.cpu()) for name, value in model.named_buffers()]
    step = state["step"]
    try:
        temporary = checkpoints / f".{step_folder(checkpoints, step).name}.{secrets.token_hex(8)}"
        checkpoints.parent.mkdir(parents=True, exist_ok=True)
        files.make_folder(checkpoints, files.IN_RUN)
        files.make_folder(temporary, files.IN_PART)
        fingerprints = {"rank-0.safetensors": write(temporary / "rank-0.safetensors", [*pieces, *others])}
        fingerprints[STATE] = write_new(temporary / STATE, json.dumps(state).encode())
        commit(temporary, step_folder(checkpoints, step), fingerprints, Origin(step=step, run=run))
    except OSError as error:  # of the disk, and not of the model that is being made
        raise RunError(f"step {step} could not be saved: {error}: {disk_advice(error)}; then start again") from error


def _weights_of(source: Path) -> tuple[Weights, str]:
    """Returns the weights, and a note where an older checkpoint than the newest is taken; else ""."""
    folder = source if source.is_dir() else source.parent
    ways = {
        ".metadata": f"a distributed checkpoint of torch's: python -m torch.distributed.checkpoint.format_utils "
        f"dcp_to_torch {source} weights.pt, then --from weights.pt",
        "latest": f"DeepSpeed's checkpoint: python {source / 'zero_to_fp32.py'} {source} FOLDER (its own script, which "
        "it saves there), then --from the file that it writes",
        "adapter_config.json": "an adapter of peft's: model.merge_and_unload().save_pretrained(FOLDER), then --from "
        "FOLDER",
        "pytorch_model.bin.index.json": "several .bin files of transformers': "
        f"AutoModel.from_pretrained({str(source)!r}).save_pretrained(FOLDER), then --from FOLDER",
        "hparams.yaml": f"a folder of Lightning's: --from a file in {source / 'checkpoints'}",
    }
    for name, way in () if (source / "run.json").is_file() else ways.items():
        if (folder / name).is_file() and (source == folder or name == "adapter_config.json"):
            raise RunError(f"--from {source}: this is {way}")
    if not source.is_dir():
        return foreign_weights(source), ""
    if not (source / "checkpoints").is_dir() and not (source / "run.json").is_file():
        return files_of(source, f"--from {source} is no run"), ""
    choice = choose(source / "checkpoints")
    if choice.checkpoint is None:
        why = f": {choice.passed_over[0]}" if choice.passed_over else ""
        raise RunError(f"--from {source}: there is no run with a checkpoint that verifies{why}")
    return choice.checkpoint.read_model(), f"--from {source}: {choice}" if choice.passed_over else ""


def take_over(model: nn.Module, source: Path) -> str:
    """Reads the weights in `given` into the model, by a process that may take as much memory as the model does.

    Returns:
        A note where an older checkpoint than the newest is taken; else "".

    Raises:
        RunError: the names are not this model's, or `given` is damaged or hostile.
        UsageError: shapes or kinds of numbers are not this model's.
    """
    return _limited(lambda: _copied(model, source), model, source)


def _limited(work: Callable[[], str], model: nn.Module, source: Path, times: int = 1) -> str:
    """Calls `work` in a process that shares the model, with at most `times` the memory of the model's weights."""
    own = 0
    for tensor in named_tensors(model).values():
        own += tensor.nbytes
        if tensor.nbytes:  # in memory that forked processes share; not /dev/shm, which is small in many a container
            shared = torch.frombuffer(mmap.mmap(-1, tensor.nbytes), dtype=tensor.dtype).view(tensor.shape)
            tensor.data = shared.copy_(tensor.detach())
    if source.is_dir():
        tensor_files = source.glob("checkpoints/*/*.safetensors")
        mapped = sum(file.lstat().st_size for file in tensor_files if files.kind(file) == "file")
    else:
        mapped = source.stat().st_size if source.is_file() else 0
    limits = Limits(
        memory=own * times + SLACK, mapped=mapped + SLACK, seconds=LEAST_SECONDS + mapped // BYTES_PER_SECOND
    )
    try:
        return run_in_fork(work, limits)
    except LimitReached as error:
        raise RunError(
            f"--from {source}: refused, since {error}, and the model's weights are {own / 1e6:,.1f} MB: {ALONE}"
        ) from None


def _copied(model: nn.Module, source: Path) -> str:
    """Copies the weights; returns notes, one a line, on what is taken where that is not plain."""
    with _refusing(source):
        weights, note = _weights_of(source)
        matched, trained = match(model, weights), dict(model.named_parameters())
        missing = {name: shape for name, shape in matched.missing.items() if name in trained}
        if missing or matched.left:
            raise RunError(
                f"--from {source}: its parameter names differ from this model's. {differences(missing, matched.left)}. "
                f"{NEW_LAYERS}"
            )
        copy_values(matched, weights, f"--from {source}")
        kept = [name for name in matched.missing if not name.endswith("num_batches_tracked")]
        fresh = f"it lacks the buffers {some(kept)}, which keep their initial values" if kept else ""
        return "\n".join([note] * bool(note) + [f"--from {source}: {text}" for text in (matched.note, fresh) if text])


@contextlib.contextmanager
def _refusing(source: Path) -> Iterator[None]:
    """Turns any error of a foreign file into one message."""
    try:
        yield
    except GrappeError:
        raise
    except Exception as error:  # a foreign file may lead to any error
        kind = type(error).__name__
        raise RunError(
            f"--from {source}: it holds no weights that can be read ({kind}: {str(error)[:300]}): {ALONE}"
        ) from error
