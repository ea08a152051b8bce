"""Lightning's DeepSpeed strategy over an existing DeepSpeed engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lightning.pytorch.plugins.precision import DeepSpeedPrecision
from lightning.pytorch.strategies import DeepSpeedStrategy

from grappe.private_api.lightning import configured_optimizers

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import Tensor


class AsItIs(DeepSpeedPrecision):
    """DeepSpeed's backward and step in the form that Lightning calls; batches keep their counts unconverted."""

    def convert_input(self, data: Any) -> Any:
        return data


class Stage3(DeepSpeedStrategy):
    """Lightning's strategy, on CPUs too; DeepSpeed is initialized already, with settings checked against the plan.

    Args:
        engine: DeepSpeed's engine.
    """

    def __init__(self, engine: Any) -> None:
        super().__init__(config={"zero_optimization": {"stage": 3}}, precision_plugin=AsItIs("32-true"))
        self._engine = engine

    def setup_environment(self) -> None:
        assert self.accelerator is not None
        self.accelerator.setup_device(self.root_device)

    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        assert self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.optimizers, self.lr_scheduler_configs = configured_optimizers(self.lightning_module)
        self.model = self._engine

    def training_step(self, *arguments: Any, **options: Any) -> Tensor:
        assert self.lightning_module is not None
        return self.lightning_module.training_step(*arguments, **options)  # pyrefly: ignore

    def teardown(self) -> None:
        """Does nothing: the model stays on its device, for evaluation and saving."""
