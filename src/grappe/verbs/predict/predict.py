"""grappe predict: computes a run's predictions, one per sample, and writes them to .npy and .npz files."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from grappe.checkpoint.format import Checkpoint, step_folder
from grappe.data.batch import SampleIds, inside, stored_in
from grappe.data.collate import in_float64
from grappe.domain.batches import cut_batch, uncut
from grappe.errors import DataError, PlanError, TaskError, UsageError
from grappe.errors.foreign_text import printable
from grappe.errors.user_code import naming_user_line
from grappe.launch.rank import ProcessRank
from grappe.launch.start import start
from grappe.launch.world import World, joined
from grappe.plan import AnyPlan, Plan, as_plan
from grappe.private_api.torch import tree_leaves, tree_map
from grappe.step.precision import autocast, set_gpu_arithmetic
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.short_run import CALLED
from grappe.training.task_reference import TaskReference, resolve_task
from grappe.verbs.load import choose, data_of, load
from grappe.verbs.predict.inputs import STDIN, source_of

CPU, PLAIN = torch.device("cpu"), Plan()
PLAN_KEYS = frozenset({
    "replicate", "shard", "zero", "domain", "cut", "precision", "device", "backend", "per_device", "threads",
})  # fmt: skip


def predict(
    run: Run | Path | str,
    inputs: Any,
    plan: AnyPlan = "",
    *,
    task: Task | type[Task] | str | None = None,
    data: Path | str | None = None,
    checkpoint: int | str | None = None,
    taken: Callable[[str], object] = str,
    trained: bool = False,
) -> Iterator[Any]:
    """Yields what the task's `prediction` gives for each sample: the model's output, if it has none.

    Under a plan the processes take turns with the batches that one process has: the predictions are the same to the bit
    on the same device with the same threads. They are in memory until the last is there.

    If a newer checkpoint is passed over, a message on standard error names it.

    Args:
        inputs: a split's name; a .npy file of samples in the form of the model's inputs (first dimension N), or a
            tensor or array of that form; a file of JSON lines with a sample each, "-" for the standard input; a
            picture, JPEG or PNG, a folder of them, or a list of their files. It is read a batch at a time.
        plan: of several processes, by replicate, shard and domain; "" is this process, on the CPU.
        task: needed where the run was not trained here by this user, as for grappe.load.
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        taken: called with the name of the checkpoint that was taken.
        trained: take the weights themselves where the run keeps a moving average (`ema`).

    Raises:
        DataError: a file has no samples of the model's, or the model cannot take them.
        UsageError: `inputs` is none of these.
        PlanError: a key of the plan has no meaning for predictions, or the task's batches continue one another.
        TaskError: the output does not have a row for each sample.
    """
    run = run if isinstance(run, Run) else Run(run)
    plan = as_plan(plan)
    _refuse(plan, inputs)
    source = source_of(inputs)
    reference = resolve_task(run, task)
    made = reference.resolve()
    if plan != Plan():
        if plan.processes > 1 and made.consecutive_batches:
            raise PlanError(
                f"{type(made).__name__}'s batches continue one another, so one process predicts them: leave --plan out"
            )
        _, chosen = choose(run, checkpoint)
        taken(chosen.folder.name)
        work = functools.partial(worker, run, reference, plan, inputs, data_of(run, data), chosen.step, trained)
        for output, count in start(CALLED, work, plan, run=run.folder):
            yield from rows(output, count, type(made).__name__)
        return
    model = load(run, made, checkpoint=checkpoint, trained=trained)
    taken(Path(str(model.grappe_checkpoint)).name)
    with naming_user_line(made):
        batches = source(made, lambda: data_of(run, data))
    done = 0
    while True:
        with naming_user_line(made):
            entry = next(batches, None)
        if entry is None:
            return
        read, count = entry
        # Computed before the first yield: otherwise gradients would be off in the caller's code.
        yield from list(rows(_output(made, model, read, done, count), count, type(made).__name__))
        done += count


def worker(
    run: Run,
    reference: TaskReference,
    plan: Plan,
    inputs: Any,
    data: Path,
    step: int,
    trained: bool,
    process: ProcessRank,
    rendezvous_folder: Path,
) -> list[tuple[Any, int]]:
    """Runs one process of a prediction; process 0 returns each batch's output and size, in order. Collective.

    Args:
        step: of the verified checkpoint.
    """
    from grappe.parallel.parallelize import parallelize

    with joined(plan, process, rendezvous_folder) as world:
        set_gpu_arithmetic(plan.precision)
        task = reference.resolve()
        checkpoint = Checkpoint(folder=step_folder(run.checkpoints, step), step=step)
        weights = checkpoint.read_model(averaged=not trained)
        units = run.read_description().get("start", {}).get("units", ())
        with naming_user_line(task):
            model = parallelize(task, plan, world, weights, blocks=units).eval()
            batches = source_of(inputs, stored_in(plan))(task, lambda: data)
        outputs: list[tuple[Any, int]] = []
        done = 0
        while group := list(itertools.islice(batches, world.data_size)):
            counts = [count for _, count in group]
            # All gather sharded parameters: a process without a batch computes the last one again.
            own = min(world.data_rank, len(group) - 1)
            with autocast(plan.precision, world.device):
                output = _output(task, model, group[own][0], done + sum(counts[:own]), counts[own], plan, world)
            gathered = world.gather_data(tree_map(lambda leaf: leaf.cpu() if hasattr(leaf, "cpu") else leaf, output))
            if world.rank == 0:
                outputs += zip(gathered, counts, strict=False)
            done += sum(counts)
        return outputs


def _refuse(plan: Plan, inputs: Any) -> None:
    if unfit := sorted(plan.changed_keys() - PLAN_KEYS):
        raise PlanError(
            f"grappe predict has no {unfit[0]}= in its plan, but {', '.join(sorted(PLAN_KEYS))}: leave it out"
        )
    if isinstance(inputs, str) and inputs == STDIN and plan.processes > 1:
        raise UsageError("lines on the standard input go to one process: leave --plan out, or give a file of lines")


def _output(
    task: Task,
    model: torch.nn.Module,
    read: Callable[[], Any],
    first: int,
    count: int,
    plan: Plan = PLAIN,
    world: World | None = None,
) -> Any:
    """Computes what the task's `prediction` gives for a batch: `count` samples, the first of which has this number."""
    with torch.no_grad(), naming_user_line(task):
        device = CPU if world is None else world.device
        batch = tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, read())
        if stored_in(plan) == torch.float64:
            batch = in_float64(batch)
        with inside(SampleIds(task.seed, -1, np.arange(first, first + count))):
            try:
                if world is not None and world.domain is not None:
                    parts, _ = cut_batch(task, batch, None)
                    output = uncut(task.forward(model, parts), "predictions")
                else:
                    output = task.forward(model, batch)
                output = tree_map(_plain_tensor, output)
            except (RuntimeError, ValueError, IndexError, TypeError) as error:
                if not isinstance(batch, torch.Tensor):
                    raise
                kind = str(batch.dtype).removeprefix("torch.")
                raise DataError(
                    f"the model does not take inputs of shape {['N', *batch.shape[1:]]} and type {kind}: "
                    f"{printable(error, 500)}"
                ) from error
            return task.prediction(output)


def _plain_tensor(value: Any) -> Any:
    """Returns the numbers of a quantized tensor, and anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_nested or value.layout != torch.strided:
        raise TaskError(
            "the model gives a nested or sparse tensor, and grappe predict shows plain tensors [N, ...]: give the task "
            "a prediction(self, output) that makes one, or call the model in Python, with model = grappe.load(run)"
        )
    return value.dequantize() if value.is_quantized else value


def rows(batch: Any, count: int, name: str) -> Iterator[Any]:
    """Cuts a batch of predictions by row, however they nest.

    Raises:
        TaskError: a tensor in it has no row for each of `count` samples.
    """
    if isinstance(batch, list) and len(batch) == count and not _is_cuttable(batch, count):
        yield from batch  # one a sample already: boxes, texts
        return
    for row in range(count):
        yield _row(batch, row, count, name)


def _is_cuttable(batch: list[Any], count: int) -> bool:
    leaves = tree_leaves(batch)
    return bool(leaves) and all(isinstance(leaf, torch.Tensor) and leaf.dim() and len(leaf) == count for leaf in leaves)


def _row(value: Any, row: int, count: int, name: str) -> Any:
    shape = getattr(value, "shape", None)
    if shape is not None and len(shape):
        if shape[0] != count:
            raise TaskError(
                f"the output of {name}'s model has {list(shape)}, no row for each of {count} samples: give {name} a "
                "prediction(self, output) that makes some, or a list with one prediction a sample"
            )
        return value[row]
    if isinstance(value, Mapping):
        return {key: _row(part, row, count, name) for key, part in value.items()}
    if isinstance(value, list) and len(value) == count and not _is_cuttable(value, count):
        return value[row]
    if isinstance(value, tuple | list):
        return [_row(part, row, count, name) for part in value]
    return value  # a number or word of the whole batch


def as_json(prediction: Any) -> dict[str, Any]:
    """A prediction's fields for a line of JSON: a dict's keys, else `output`."""
    plain = _plain(prediction)
    return plain if isinstance(plain, dict) else {"output": plain}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(part) for part in value]
    if hasattr(value, "tolist"):  # a tensor, an array, a number of NumPy's
        if getattr(value, "is_meta", False):
            raise TaskError("a prediction is a tensor on the device meta, which has no numbers: give a real one")
        return _finite(value.tolist())
    if value is None or isinstance(value, str | int | float | bool | complex):
        return _finite(value)
    raise TaskError(
        f"a prediction is a {type(value).__name__}, which cannot be written as JSON: let prediction() give tensors, "
        "numbers and texts, in dicts and lists"
    )


def _finite(value: Any) -> Any:
    """Replaces what JSON cannot express: a number that is not finite by None, a complex number by a pair."""
    if isinstance(value, list):
        return [_finite(number) for number in value]
    if isinstance(value, complex):
        return [_finite(value.real), _finite(value.imag)]
    if isinstance(value, float):
        return round(value, 6) if math.isfinite(value) else None
    return value


SUFFIXES = (".npy", ".npz")


def save(file: Path, predictions: Iterable[Any]) -> None:
    """Writes predictions [N, ...]: to a .npy file where each is a tensor, to a .npz file where each is a dict.

    The file appears once all are written; in memory is one row at a time. A name of another ending gets
    .npy, as numpy.save's does; of a link what it leads to is written.

    Raises:
        DataError: there is none.
        UsageError: they are neither, or of several shapes; or `file` is a folder, or in none.
    """
    target = (file if file.suffix in SUFFIXES else Path(f"{file}.npy")).resolve()
    if file.is_dir() or target.is_dir():
        raise UsageError(f"--out {file}: it is a folder: give a file in it, as {file}/predictions.npy")
    if not target.parent.is_dir():
        raise UsageError(f"--out {file}: there is no folder {target.parent}")
    remaining = iter(predictions)
    first = next(remaining, None)
    if first is None:
        raise DataError(f"--out {file}: there is no sample")
    names = tuple(first) if isinstance(first, dict) else ("",)
    if names != ("",) and file.suffix != ".npz":
        raise UsageError(f"--out {file}: predictions have {', '.join(names)}: give a file that ends in .npz")
    with tempfile.TemporaryDirectory(prefix=".grappe-predict-", dir=target.parent) as folder:
        parts = {name: Path(folder) / f"{number}.npy" for number, name in enumerate(names)}
        with contextlib.ExitStack() as stack:
            columns = {name: _Column(stack.enter_context(part.open("wb"))) for name, part in parts.items()}
            for row in itertools.chain([first], remaining):
                try:
                    for name, column in columns.items():
                        column.append(row[name] if name else row)
                except (TypeError, ValueError, RuntimeError, KeyError) as error:
                    raise UsageError(
                        f"--out {file}: predictions of several forms or shapes make no array ({error}): leave --out "
                        "away, and keep the lines of JSON"
                    ) from error
            for column in columns.values():
                column.finish()
        made = parts.get("")
        if made is None or file.suffix == ".npz":
            made = Path(folder) / "all.npz"
            with zipfile.ZipFile(made, "w") as archive:
                for name, part in parts.items():
                    archive.write(part, f"{name or 'output'}.npy")
        made.replace(target)


class _Column:
    """An .npy file that is written by row; its header is written again once the number of rows is known."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream, self._rows = stream, 0
        self._kind: tuple[np.dtype, tuple[int, ...]] | None = None

    def append(self, row: Any) -> None:
        """Writes a row.

        Raises:
            TypeError, ValueError: it is not an array of numbers of the first row's type and shape.
        """
        tensor = torch.as_tensor(row)
        if tensor.dtype == torch.bfloat16:  # which NumPy does not have
            tensor = tensor.float()
        array = tensor.numpy()
        if self._kind is None:
            self._kind = array.dtype, array.shape
            self._header()
        if (array.dtype, array.shape) != self._kind:
            raise ValueError(f"{array.dtype} {list(array.shape)} after {self._kind[0]} {list(self._kind[1])}")
        self._stream.write(array.tobytes())
        self._rows += 1

    def finish(self) -> None:
        """Writes the header with the number of rows."""
        self._stream.seek(0)
        self._header()

    def _header(self) -> None:
        assert self._kind is not None
        kind, shape = self._kind
        # The header's length is the same for any number of rows: NumPy leaves room for their digits.
        header = {"descr": kind.str, "fortran_order": False, "shape": (self._rows, *shape)}
        np.lib.format.write_array_header_1_0(self._stream, header)
