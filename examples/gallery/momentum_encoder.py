"""Momentum contrast: an encoder finds views of an image by its slow copy, which moves after each step."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import grappe


class Encoders(nn.Module):
    """Two views [B, 2, 64] of each image to their queries and keys, [B, 2, 32] each."""

    def __init__(self, width):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 32))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, views):
        return {"query": normalize(self.query(views), dim=2), "key": normalize(self.key(views), dim=2)}


class MomentumContrast(grappe.Task):
    """Handwritten digits without their labels; a view hides pixels of the image."""

    epochs: int = 10
    batch_size: int = 64
    momentum: float = 0.98
    heat: float = 0.2
    whole_batch_loss = True

    def model(self):
        return Encoders(128)

    def data(self, split, folder):
        images = torch.from_numpy(load_digits().data / 8 - 1).float()
        place = torch.arange(len(images)) % 10
        images = images[{"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]]
        return grappe.Arrays(images, torch.zeros(len(images)))

    def augment(self, images, targets, keys, training):  # in evaluation, too
        hidden = grappe.draw(keys, 128).view(-1, 2, 64) < 0.3
        return images[:, None].expand(-1, 2, -1).masked_fill(hidden, 0), targets

    def loss(self, output, target):  # each view's query finds the key of the other view
        own = torch.arange(len(target), device=target.device)
        pairs = [output["query"][:, view] @ output["key"][:, 1 - view].T / self.heat for view in (0, 1)]
        return sum(cross_entropy(logits, own, reduction="none") for logits in pairs) / 2

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.3, momentum=0.9)

    def after_step(self, model):
        for key, query in zip(model.key.parameters(), model.query.parameters(), strict=True):
            key.lerp_(query, 1 - self.momentum)
