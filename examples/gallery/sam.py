"""Sharpness-aware minimisation: an optimizer with two passes a step, the second one where the loss is worst nearby."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassAccuracy

import grappe


class SAM(torch.optim.SGD):
    """Foret et al. 2021, arXiv:2010.01412."""

    def __init__(self, params, radius, **options):
        super().__init__(params, **options)
        self.radius = radius

    @torch.no_grad()
    def step(self, closure):  # an argument without a default: grappe gives it a closure
        loss = closure()
        weights = [one for group in self.param_groups for one in group["params"]]
        gradients = [one.grad.clone() for one in weights]
        before = [one.clone() for one in weights]
        norm = torch.stack([one.norm() for one in gradients]).norm()
        for one, gradient in zip(weights, gradients, strict=True):
            one.add_(gradient, alpha=self.radius / norm.item())
        closure()
        for one, kept in zip(weights, before, strict=True):
            one.copy_(kept)
        super().step()
        return loss


class Flat(grappe.Task):
    """Handwritten digits of 8 x 8."""

    epochs: int = 5
    batch_size: int = 64

    def model(self):
        convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
        return nn.Sequential(nn.Unflatten(1, (1, 8)), *convolutions, nn.Flatten(), nn.Linear(288, 10))

    def data(self, split, folder):
        images, labels = load_digits(return_X_y=True)
        place = torch.arange(len(labels)).numpy() % 10
        keep = {"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]
        return grappe.Arrays((images[keep] / 8 - 1).reshape(-1, 8, 8).astype("float32"), labels[keep])

    def loss(self, output, target):
        return cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return SAM(named_parameters, radius=0.05, lr=0.05, momentum=0.9)

    def metrics(self):
        return {"accuracy": MulticlassAccuracy(10, average="micro")}
