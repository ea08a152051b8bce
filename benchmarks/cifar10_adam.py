"""CIFAR-10 with Adam, as the page's Lightning and DeepSpeed scripts have it."""

from __future__ import annotations

import torch

from grappe.tasks.cifar10 import Cifar10


class Cifar10Adam(Cifar10):
    """The shipped task with Adam: momentum and weight_decay do nothing."""

    lr: float = 1e-3

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=self.lr)
