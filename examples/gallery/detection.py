"""Detection without anchors: images with one to three boxes each; two losses, one over images and one over boxes."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss, max_pool2d

import grappe

STRIDE, CLASSES = 4, 2


def scene(number):
    """An image [1, 32, 32] of boxes [n, 5]: centre's x and y, width, height, class (0 is bright, 1 dark)."""
    g = torch.Generator().manual_seed(number)
    image, boxes = 0.1 * torch.randn(1, 32, 32, generator=g), torch.rand(1 + number % 3, 5, generator=g)
    boxes = boxes * torch.tensor([22, 22, 6, 6, 2]) + torch.tensor([5, 5, 4, 4, 0])
    boxes[:, 4].floor_()
    for x, y, w, h, kind in boxes:
        image[:, int(y - h / 2) : int(y + h / 2), int(x - w / 2) : int(x + w / 2)] += 1 - 2 * kind
    return image, boxes


class Detection(grappe.Task):
    """Bright boxes and dark ones: [B, 6, 8, 8] says where centres of each class are, and the box around each."""

    epochs: int = 8
    batch_size: int = 16
    lr: float = 1e-2

    def model(self):
        layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
        return nn.Sequential(*layers, nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, CLASSES + 4, 1))

    def data(self, split, folder):
        numbers = {"train": range(300), "validation": range(1000, 1060), "test": range(2000, 2060)}
        return [scene(number) for number in numbers[split]]

    def collate(self, samples):
        return torch.stack([image for image, _ in samples]), [boxes for _, boxes in samples]

    def loss(self, output, target):
        boxes = torch.cat(target)
        image = torch.tensor([row for row, some in enumerate(target) for _ in some], device=output.device)
        (x, y), heat = (boxes[:, :2] / STRIDE).long().T, torch.zeros_like(output[:, :CLASSES])
        heat[image, boxes[:, 4].long(), y, x] = 1.0
        found = binary_cross_entropy_with_logits(output[:, :CLASSES], heat, reduction="none").sum((1, 2, 3))
        off = l1_loss(output[image, CLASSES:, y, x], boxes[:, :4] / 32, reduction="none")
        return {"class": found, "box": off.sum(1)}  # [images], [boxes]

    def counts(self, target):  # each loss is a mean of its own
        return {"class": target[0].new_ones(len(target)), "box": target[0].new_ones(sum(map(len, target)))}

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=self.lr)

    def prediction(self, output):  # peaks of the heat
        heat = output[:, :CLASSES].sigmoid()
        peaks = (heat > 0.3) & (heat == max_pool2d(heat, 3, 1, 1))
        boxes = (32 * output[:, None, CLASSES:]).expand(-1, CLASSES, -1, -1, -1).permute(0, 1, 3, 4, 2)
        return [{"boxes": boxes[row][one], "classes": one.nonzero()[:, 0]} for row, one in enumerate(peaks)]
