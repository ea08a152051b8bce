"""Distillation: a small network learns from a large, frozen one, whose weights come from a run of its own."""

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

import grappe


def layers(*sizes):
    hidden = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes[:-1])]
    return nn.Sequential(*hidden, nn.Linear(*sizes[-2:]))


class Pair(nn.Module):
    def __init__(self, student, teacher):
        super().__init__()
        self.student, self.teacher = student, teacher.requires_grad_(False)

    def forward(self, image):
        return self.student(image), self.teacher(image)


class Distillation(grappe.Task):
    """Digits. First: grappe train distillation.py student=false --run teacher."""

    epochs: int = 4
    batch_size: int = 64
    student: bool = True
    teacher: str = ""  # its run; without it the teacher has its first weights
    heat: float = 3.0

    def model(self):
        network = layers(64, 512, 512, 10)
        if not self.student:
            return network
        teacher = grappe.load(self.teacher, Distillation(student=False)) if self.teacher else network
        return Pair(layers(64, 64, 10), teacher)

    def data(self, split, folder):
        images, labels = load_digits(return_X_y=True)
        place = torch.arange(len(labels)).numpy() % 10
        keep = {"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]
        return grappe.Arrays((images[keep] / 8 - 1).astype("float32"), labels[keep])

    def loss(self, output, target):
        if not self.student:
            return cross_entropy(output, target, reduction="none")
        said, told = [(one / self.heat).log_softmax(1) for one in output]
        soft = self.heat**2 * kl_div(said, told, reduction="none", log_target=True).sum(1)
        return 0.5 * soft + 0.5 * cross_entropy(output[0], target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=0.05, momentum=0.9)

    def prediction(self, output):
        return (output[0] if self.student else output).argmax(1)
