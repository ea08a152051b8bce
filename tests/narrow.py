"""A task whose process may take what a step needs, and a copy of its state only between steps."""

import resource

from benchmarks.mlp_task import Mlp
from torch import nn

from grappe.profiling.memory import data_size

ROOM = 1_000_000_000
"""Bytes: parameters 151 MB, gradients as many, the optimizer's state 302 MB; a copy has parameters and state."""


class Narrow(Mlp):
    """Wide enough for each tensor to be a mapping of its own, which is given back at once."""

    width: int = 3072

    def model(self) -> nn.Module:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (data_size() + ROOM, hard))
        return super().model()
