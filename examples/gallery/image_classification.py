"""Image classification: mixup or cutmix on each pair of a batch, and an average of the weights that is evaluated."""

import torch
import torchmetrics
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

import grappe


def block(before: int, after: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


class ImageClassification(grappe.Task):
    """Handwritten digits of 8 x 8."""

    epochs: int = 4
    batch_size: int = 64
    lr: float = 0.1
    ema: float | None = 0.95  # evaluated, saved, loaded and exported instead of the weights

    def model(self):
        head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 10))
        return nn.Sequential(block(1, 16), nn.Sequential(block(16, 32), nn.MaxPool2d(2)), block(32, 32), head)

    def data(self, split, folder):
        images, labels = load_digits(return_X_y=True)
        place = torch.arange(len(labels)).numpy() % 10
        keep = {"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]
        return grappe.Arrays((images[keep].reshape(-1, 1, 8, 8) / 8 - 1).astype("float32"), labels[keep])

    def augment(self, images, labels, keys):
        other = grappe.mixup_pairs(len(keys), keys.device)
        share, row, column, kind = grappe.draw(keys, 4).T[..., None]
        places = torch.arange(8, device=keys.device)
        side = 8 * (1 - share).sqrt()  # of cutmix's square, from the other image
        rows, columns = [(places + 0.5 - 8 * one).abs() < side / 2 for one in (row, column)]
        cut = 1 - (rows[:, :, None] & columns[:, None]).float()
        kept = torch.where(kind[..., None] < 0.5, cut, share[..., None])[:, None]  # of each pixel
        part, classes = kept.mean((2, 3)), one_hot(labels, 10).float()
        mixed = images * kept + images[other] * (1 - kept)
        return mixed, classes * part + classes[other] * (1 - part)

    def loss(self, output, target):  # classes in evaluation, their shares in training
        return cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=self.lr, momentum=0.9, weight_decay=5e-4)

    def metrics(self):
        return {"accuracy": torchmetrics.classification.MulticlassAccuracy(10, average="micro")}

    def prediction(self, output):
        return {"class": output.argmax(1), "probability": output.softmax(1).amax(1)}

    def units(self, model):
        return list(model)
