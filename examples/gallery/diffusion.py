"""Diffusion: a network that tells the noise from the image, at times and with noise of each sample's own."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import dropout

import grappe

STEPS = 100
KEPT = torch.cumprod(1 - torch.linspace(1e-3, 0.2, STEPS), 0)  # of the image's variance, after each step


class Denoiser(nn.Module):
    """Images [B, 64] and times [B] to the noise in them, with residual layers."""

    def __init__(self, width=256):
        super().__init__()
        self.first, self.time = nn.Linear(64, width), nn.Embedding(STEPS, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(3))
        self.last = nn.Linear(width, 64)

    def forward(self, image, time):
        x = self.first(image) + self.time(time)
        for layer in self.layers:
            x = x + layer(dropout(x.relu(), 0.1, self.training))
        return self.last(x)


class Diffusion(grappe.Task):
    """Handwritten digits."""

    epochs: int = 10
    batch_size: int = 64
    lr: float = 2e-3
    ema: float | None = 0.99

    def model(self):
        return Denoiser()

    def data(self, split, folder):
        images = torch.from_numpy(load_digits().data / 8 - 1).float()
        place = torch.arange(len(images)) % 10
        images = images[{"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]]
        return grappe.Arrays(images, torch.zeros(len(images)))

    def forward(self, model, image):
        noise, time = grappe.randn_like(image), (grappe.rand_like(image[:, 0], salt=1) * STEPS).long()
        kept = KEPT.to(image.device)[time, None]
        return model(kept.sqrt() * image + (1 - kept).sqrt() * noise, time) - noise

    def loss(self, output, target):  # the error is the output: what to find was drawn with it
        return output.square().mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=self.lr)

    def units(self, model):
        return model.layers
