"""Private names of Lightning, which is imported only when a function needs it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from grappe.private_api import private_names

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

SEEN = "2.6"

USED = private_names(
    SEEN,
    {
        "lightning.pytorch.LightningModule": "_trainer",
        "lightning.pytorch.Trainer": "_signal_connector",
        "lightning.pytorch.core.optimizer": "_init_optimizers_and_lr_schedulers",
    },
)


def set_trainer(module: Any, trainer: object) -> None:
    """Gives a LightningModule a trainer that is not Lightning's; the public setter keeps only a weak reference."""
    module._trainer = trainer


def replace_signal_connector(trainer: Trainer, connector: Any) -> None:
    """Replaces the object that installs the Trainer's signal handlers."""
    trainer._signal_connector = connector


def configured_optimizers(module: LightningModule) -> tuple[list[Any], list[Any]]:
    """Calls configure_optimizers; returns the optimizers, and the configurations of their schedules."""
    from lightning.pytorch.core.optimizer import _init_optimizers_and_lr_schedulers

    return _init_optimizers_and_lr_schedulers(module)
