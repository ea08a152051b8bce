"""grappe.load: loads a run's trained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from grappe.checkpoint.format import Choice, select
from grappe.errors import RunError
from grappe.errors.user_code import naming_user_line
from grappe.launch.rank import is_main_process
from grappe.launch.terminal import complain
from grappe.plan import Plan
from grappe.task import Task
from grappe.training.run import Run
from grappe.training.task_reference import resolve_task

if TYPE_CHECKING:
    from torch import nn

    from grappe.checkpoint.format import Checkpoint


def load(
    run: Run | Path | str,
    task: Task | type[Task] | str | None = None,
    *,
    checkpoint: int | str | None = None,
    trained: bool = False,
    precision: Literal["fp32", "fp64"] = "fp32",
) -> nn.Module:
    """Loads the model of one of a run's checkpoints, on the CPU, in evaluation mode.

    If a newer checkpoint is passed over, a message on standard error names it. The model's `grappe_checkpoint`
    is the path of the loaded checkpoint. In another task's `model()` (a frozen teacher), it is read once a run.

    Args:
        task: needed where the run was not trained here by this user, or its task came from a notebook or a script:
            no code is run because a run names it. An instance, a class, or a name as on the command line.
        checkpoint: a step, "best" or "last": that one and no other. None: the newest that verifies.
        trained: take the weights themselves where the run keeps a moving average (`ema`).
        precision: "fp64": a model in float64, which keeps each bit of a training with precision=fp64.

    Raises:
        RunError: the folder is no run, or it has no checkpoint that verifies.
        TaskError: the run's task is not known, or cannot be found.
    """
    import torch

    from grappe.data.batch import stored_in
    from grappe.parallel.materialise import fill, on_meta
    from grappe.step.task_contract import model_of

    run = run if isinstance(run, Run) else Run(run)
    made = resolve_task(run, task).resolve()
    _, chosen = choose(run, checkpoint)
    with naming_user_line(made):
        if torch.get_default_device().type == "meta":
            # A part of another task's model, whose own checkpoint has the values.
            return model_of(made).eval()
        # Without values: a folder of pretrained ones need not be here any more.
        model = on_meta(made, stored_in(Plan(precision=precision)))
    fill(model, chosen.read_model(averaged=not trained), torch.device("cpu"))
    model.grappe_checkpoint = str(chosen.folder)  # pyrefly: ignore
    return model.eval()


def load_models(folder: Path | str, *models: nn.Module, checkpoint: int | str | None = None) -> tuple[nn.Module, ...]:
    """Fills models with the weights of a `grappe.Loop`'s folder, on the CPU; returns them, in evaluation mode.

    Args:
        models: in the order in which the loop got them by `parallelize`; the first ones suffice.
        checkpoint: as for `load`.

    Raises:
        RunError: the folder has no checkpoint that verifies.
        TaskError: a model is another than the one that was trained.
    """
    import torch
    from torch import nn

    from grappe.parallel.materialise import fill

    choice = select(Path(folder) / "checkpoints", checkpoint)
    if choice.checkpoint is None:
        raise RunError(f"{folder} has no checkpoint that verifies: is it the run= of a grappe.Loop?")
    if choice.passed_over:
        complain(f"grappe: {folder}: {choice}")
    for model in models:
        model.to("cpu").eval()
    numbered = nn.ModuleDict({str(number): model for number, model in enumerate(models)})
    fill(numbered, choice.checkpoint.read_model(), torch.device("cpu"))
    return models


def choose(run: Run, which: int | str | None = None) -> tuple[Choice, Checkpoint]:
    """Chooses the newest checkpoint that verifies, or the requested one; names the passed-over ones for the user.

    Raises:
        RunError: there is no such checkpoint.
    """
    choice = run.choose(which)
    if choice.checkpoint is None:
        why = "".join(f"; {reason}" for reason in choice.passed_over)
        raise RunError(
            f"{run.folder} has no checkpoint that verifies{why}: train it first, or look with: grappe runs RUN"
        )
    if choice.passed_over and is_main_process():
        complain(f"grappe: {run.folder}: {choice}")
    return choice, choice.checkpoint


def data_of(run: Run, folder: Path | str | None) -> Path:
    """Returns the folder of a run's data: `folder`, else the one that its description names."""
    return Path(folder or run.read_description().get("data") or "data")
