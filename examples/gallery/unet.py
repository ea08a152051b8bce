"""Segmentation by a U-Net: pixels that nobody labelled count nothing, in the loss and in the score."""

import torch
from torch import nn
from torchmetrics.classification import MulticlassJaccardIndex

import grappe


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())


class Level(nn.Module):
    def __init__(self, before, width, below):
        super().__init__()
        self.down, self.up = block(before, width), block(3 * width, width)
        self.below = nn.Sequential(nn.MaxPool2d(2), below, nn.Dropout2d(0.2), nn.Upsample(scale_factor=2))

    def forward(self, image):
        return self.up(torch.cat([self.below(fine := self.down(image)), fine], 1))


class Segmentation(grappe.Task):
    """Bright and dark discs in noise, whose edges are not labelled."""

    batch_size: int = 16

    def model(self):
        return nn.Sequential(Level(1, 8, Level(8, 16, block(16, 32))), nn.Conv2d(8, 3, 1))

    def data(self, split, folder):
        g = torch.Generator().manual_seed({"train": 0, "validation": 1, "test": 2}[split])
        numbers = torch.rand(4, 200, 1, 1, generator=g)
        across, down = torch.arange(-6.0, 18) - 12 * numbers[:2]
        inside = 3 + 4 * numbers[2] - across.hypot(down.mT)
        disc = (inside > 0) * (numbers[3] - 0.5).sign()  # 1, -1, or 0 for the ground
        labels = (disc % 3).long().masked_fill(inside.abs() < 0.7, -100)
        return grappe.Arrays((disc + torch.randn(200, 24, 24, generator=g))[:, None], labels)

    def loss(self, output, target):
        return nn.functional.cross_entropy(output, target, reduction="none")

    def counts(self, target):
        return target != -100  # which cross_entropy ignores

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=0.01)

    def schedule(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)

    def metrics(self):
        return {"overlap": MulticlassJaccardIndex(3, ignore_index=-100)}

    def prediction(self, output):
        return output.argmax(1)

    def units(self, model):
        return list(model)
