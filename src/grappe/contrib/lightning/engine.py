"""The Lightning engine: lightning.Trainer runs the training loop, with grappe's watchers as one callback."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Iterator, Sequence

from grappe.contrib.lightning.steps import Parts
from grappe.data.batch import Batch, inside
from grappe.engines.base import COMMON, Engine, EngineSetup
from grappe.parallel.parallelize import KEYS
from grappe.plan import Plan
from grappe.step.loss import After
from grappe.step.precision import set_gpu_arithmetic
from grappe.step.scores import Scores

INSTALL = "engine=lightning needs the package lightning: pip install 'grappe[lightning]'"


class Lightning(Engine):
    """Trains in Lightning's Trainer, with torch's parallelism, or with DeepSpeed's if the plan offloads."""

    sharded_units = True
    supported_keys = COMMON | KEYS
    about = "lightning.Trainer and its strategies: DDP, FSDP2 with tensor parallelism, DeepSpeed for offload"

    @classmethod
    def unsupported_reason(cls, plan: Plan) -> str | None:
        if importlib.util.find_spec("lightning") is None:
            return INSTALL
        if plan.offload != "none":
            from grappe.contrib.lightning import offload

            return offload.unsupported_reason(plan)
        if plan.tensor > 1 and plan.batchnorm == "sync":
            return "batchnorm=sync with tensor parallelism is not supported: use batchnorm=local"
        return None

    def __init__(self, setup: EngineSetup) -> None:
        set_gpu_arithmetic(setup.plan.precision)
        kind = Parts
        if setup.plan.offload != "none":
            from grappe.contrib.lightning import offload

            kind = offload.Offloaded
        self._parts = kind(setup)
        self.train_state = self._parts.train_state

    def train(self, batches: Iterator[Batch], after: After) -> None:
        first = next(batches, None)
        if first is None:
            return
        from grappe.contrib.lightning.fit import fit

        # Lightning reads a batch ahead: `batches` have ended when the last one is in the model.
        with inside(None), self._parts.training():
            fit(self._parts, itertools.chain((first,), batches), after)

    def evaluate(self, batches: Iterator[Batch], samples: int) -> Scores:
        return self._parts.evaluate(batches, samples)

    def remarks(self) -> Sequence[str]:
        return self._parts.remarks()

    def close(self) -> None:
        del self.train_state
        self._parts.close()


ENGINE = Lightning
