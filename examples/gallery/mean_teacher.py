"""Mean teacher: few images have labels; on all of them a student agrees with its slow copy, moved after each step."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torchmetrics.classification import MulticlassAccuracy

import grappe


class Pair(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.student = nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(0.5), nn.Linear(width, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, image):
        return self.student(image), self.teacher(image)


class TeachersAccuracy(MulticlassAccuracy):
    def update(self, output, target):
        super().update(output[1], target)


class MeanTeacher(grappe.Task):
    """Handwritten digits, of which every tenth has a label."""

    epochs: int = 10
    batch_size: int = 64
    agreement: float = 1.0

    def model(self):
        return Pair(256)

    def data(self, split, folder):
        images, labels = [torch.from_numpy(one) for one in load_digits(return_X_y=True)]
        place = torch.arange(len(labels)) % 10
        labels = labels.masked_fill((place != 1) & (split == "train"), -100)
        keep = {"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]
        return grappe.Arrays((images[keep] / 8 - 1).float(), labels[keep])

    def loss(self, output, target):
        gap = (output[0].softmax(1) - output[1].softmax(1)).square().sum(1)
        return nn.functional.cross_entropy(output[0], target, reduction="none") + self.agreement * gap

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.05, momentum=0.9)

    def metrics(self):
        return {"accuracy": TeachersAccuracy(10, average="micro")}

    def after_step(self, model):
        for teacher, student in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
            teacher.lerp_(student, 0.02)

    def prediction(self, output):
        return output[1].argmax(1)
