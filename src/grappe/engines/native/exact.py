"""The native engine's strategy for exact plans: gradients with the same bits on any number of processes."""

from __future__ import annotations

from torch import Tensor

from grappe.data.batch import Batch
from grappe.data.rand_like import entering
from grappe.engines.base import EngineSetup
from grappe.engines.native.whole import ForwardBackward, WholeModel
from grappe.step.exact.sharded import exact_sums
from grappe.step.precision import LossScale
from grappe.step.reduction import Sums


class ExactGradients:
    """Strategy for exact plans: sums every piece's gradients in one order, for any number of processes."""

    def __init__(self, setup: EngineSetup, model: WholeModel, loss_scale: LossScale) -> None:
        self._seed, self._stop_requested = setup.task.seed, setup.stop_requested
        self._whole_batch = setup.task.whole_batch_loss
        parameters = [parameter for _, parameter in model.named]
        self._exact = exact_sums(model.module, parameters, setup.plan, setup.world, setup.task.forward)
        self._forward_backward = ForwardBackward(setup, model.module, loss_scale, self._exact.forward)

    def gradients(self, batch: Batch) -> Sums:
        """Leaves the global batch's gradient on each parameter; returns the step's sums. Collective."""
        exact = self._exact
        if self._whole_batch:
            self._forward_backward.first_pass(
                batch,
                lambda index, micro: exact.forward_ahead(index, batch.step, self._seed, entering(micro)),
            )
        for index, micro in enumerate(batch.microbatches):
            total: Tensor | None = None
            if micro.rows or exact.every_piece:
                with exact.piece(index, batch.step, self._seed):
                    total = self._forward_backward(batch, micro)
            exact.add(total)
        return exact.reduce(self._stop_requested(), batch.samples)

    def norm(self) -> Tensor:
        """Computes the 2-norm of the whole gradient, exact to the bit. Collective if parameters are sharded."""
        return self._exact.norm()
