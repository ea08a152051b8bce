"""grappe export: writes a run's model as a C++ program, or its weights alone; proven, or not written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from grappe.errors import UsageError
from grappe.errors.user_code import naming_user_line
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_reference import resolve_task
from grappe.verbs.export import exchange
from grappe.verbs.export.folder import check_target, whole_or_nothing
from grappe.verbs.export.proof import Proof
from grappe.verbs.export.replacement import write_replacement
from grappe.verbs.export.samples import samples_of
from grappe.verbs.export.work import SPLIT, Format, Work
from grappe.verbs.export.writers import WRITERS
from grappe.verbs.load import data_of, load


@dataclasses.dataclass(frozen=True, kw_only=True)
class Exported:
    """Result of an export: the folder, and its proof."""

    folder: Path
    checkpoint: str
    proof: Proof
    cpp: str | None
    """Reason why the C++ program was not built; None if it was, or is not part of the format."""


def export(
    run: Run | Path | str,
    folder: Path | str,
    *,
    checkpoint: int | str | None = None,
    task: Task | type[Task] | str | None = None,
    data: Path | str | None = None,
    format: Format = "program",
    build: bool = True,
    sources: Sequence[Path] = (),
    weights_for: Path | str | None = None,
    trained: bool = False,
    progress: Callable[[str], None] = lambda words: None,
) -> Exported:
    """Writes the model of one of a run's checkpoints to `folder`: a C++ program, weights alone, as transformers'
    from_pretrained reads it, ONNX or TorchScript.

    Nothing is left at `folder` unless the predictions for the whole validation split, at several batch sizes, are those
    of grappe.predict.

    Args:
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        task: needed where the run was not trained here by this user, as for grappe.load.
        build: whether to build and prove the C++ program too, where there are cmake and a compiler.
        sources: C++ files that register the operators which the model uses and LibTorch has not.
        weights_for: an exported program's folder, of which weights alone are written: the program takes them as they
            are. It was exported here by the same user, of a model that differs in its weights alone.
        trained: take the weights themselves where the run keeps a moving average (`ema`).
        progress: called with a few words, now and then.

    Raises:
        UsageError: the folder holds something; there is no compiler, or a package; the program cannot be built.
        TaskError: the model cannot be traced, with the user's line where it is known.
        Differs: a prediction is another one; with the first sample and layer.
    """
    target = Path(folder)
    check_target(target)
    if format in exchange.FILES:
        exchange.check_packages(format)
    if sources and format != "program":
        raise UsageError(f"--operators: --format {format} compiles nothing: leave the option out")
    if weights_for is not None and format != "program":
        raise UsageError(f"--weights-for: --format {format} makes no program: leave one of the two out")
    run = run if isinstance(run, Run) else Run(run)
    made = resolve_task(run, task).resolve()
    model = load(run, made, checkpoint=checkpoint, trained=trained)
    place = data_of(run, data)
    with naming_user_line(made):
        samples = samples_of(made, SPLIT, place)
    work = Work(
        run=run,
        task=made,
        model=model,
        samples=samples,
        checkpoint=Path(str(model.grappe_checkpoint)).name,
        trained=trained,
        data=place,
        format=format,
        build=build,
        sources=sources,
        weights_for=None if weights_for is None else Path(weights_for),
        progress=progress,
    )
    write = WRITERS[format] if weights_for is None else write_replacement
    with whole_or_nothing(target) as staged:
        proof, why = write(work, staged, work.known())
    return Exported(folder=target, checkpoint=work.checkpoint, proof=proof, cpp=why)
