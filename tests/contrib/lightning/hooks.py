"""The table of Lightning's hooks in docs/lightning.md, tried; `python -m tests.contrib.lightning.hooks` writes it."""

import re
from collections.abc import Iterator
from pathlib import Path

from lightning.pytorch import LightningDataModule, LightningModule
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks

import grappe
from grappe.contrib.lightning.lightning_module.unsupported import CARRIED, OUTSIDE, REMOVED
from grappe.errors import TaskError
from tests.contrib.lightning.modules import Data, Net

GUIDE = Path(__file__).parents[2] / "docs" / "lightning.md"
BEGIN, END = "<!-- hooks -->\n", "<!-- end -->"
OF_THE_MODULE = frozenset({
    "forward", "training_step", "validation_step", "test_step", "predict_step", "configure_optimizers",
    "configure_callbacks", "configure_gradient_clipping", "backward", "optimizer_step", "optimizer_zero_grad",
    "lr_scheduler_step",
})  # fmt: skip
"""Methods of LightningModule itself that its Trainer calls; the others are called by the user's code."""
OF_USERS = frozenset({
    "all_gather", "clip_gradients", "freeze", "unfreeze", "log", "log_dict", "lr_schedulers", "manual_backward",
    "optimizers", "print", "to_onnx", "to_tensorrt", "to_torchscript", "toggle_optimizer", "toggled_optimizer",
    "untoggle_optimizer",
})  # fmt: skip
OF_DATA = frozenset({"state_dict", "load_state_dict", "on_exception"})


def methods(kind: type) -> set[str]:
    """Lists a class's own public methods."""
    return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


def hooks() -> list[str]:
    """Lists all hooks of the installed Lightning, as its own classes define them."""
    own = set().union(*map(methods, (ModelHooks, DataHooks, CheckpointHooks)))
    return sorted(own | (methods(LightningModule) - OF_USERS) | (methods(LightningDataModule) & OF_DATA))


def verdict(name: str) -> str:
    """Overrides a hook in a module or its data, and says what `from_lightning` makes of it."""
    of_data = name in methods(DataHooks) | OF_DATA
    base = Data if of_data else Net

    def hook(self, *arguments, **options):
        found = getattr(super(kind, self), name, None)
        return found(*arguments, **options) if found is not None else None

    kind = type(base.__name__, (base,), {name: hook})
    made = (Net(), kind()) if of_data else (kind(), Data())
    if name in ("test_dataloader", "predict_dataloader"):
        setattr(kind, name, base.val_dataloader)
    if name == "test_step":
        setattr(kind, name, base.validation_step)
    try:
        grappe.from_lightning(*made)
    except TaskError as refused:
        assert re.search(rf"\b{name}\b", str(refused)), f"{name} is refused, and not by its name: {refused}"
        return "refused"
    if name in OUTSIDE:
        return "not called in training or test"
    assert name in CARRIED, f"{name} is dropped in silence"
    return "carried"


def table() -> Iterator[str]:
    """Yields the table's lines, in markdown."""
    found: dict[str, list[str]] = {}
    for name in hooks():
        found.setdefault(verdict(name), []).append(f"`{name}`")
    found["refused"] += [f"`{name}`" for name in sorted(REMOVED)]
    yield "| | hooks of Lightning 2.6, and of Lightning 1 |"
    yield "|---|---|"
    for word in ("carried", "not called in training or test", "refused"):
        yield f"| {word} | {', '.join(found[word])} |"


def written(guide: str) -> str:
    """Returns the guide's text with the table."""
    head, _, rest = guide.partition(BEGIN)
    return head + BEGIN + "\n".join(table()) + "\n" + END + rest.partition(END)[2]


if __name__ == "__main__":
    GUIDE.write_text(written(GUIDE.read_text()))
