"""Variational autoencoder: a latent with noise of each sample's own, the same under every plan."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

import grappe


class Network(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, image):
        mean, log_variance = self.encode(image).chunk(2, 1)
        latent = mean + grappe.randn_like(mean) * (log_variance / 2).exp()
        return {"image": self.decode(latent), "mean": mean, "log_variance": log_variance}


class Vae(grappe.Task):
    """Handwritten digits, each the target of itself."""

    epochs: int = 10
    batch_size: int = 64
    lr: float = 3e-3
    latent: int = 4

    def model(self):
        return Network(self.latent)

    def data(self, split, folder):
        images = torch.from_numpy(load_digits().data / 16).float()
        place = torch.arange(len(images)) % 10
        images = images[{"train": place % 5 != 0, "validation": place == 0, "test": place == 5}[split]]
        return grappe.Arrays(images, images)

    def loss(self, output, target):
        wrong = binary_cross_entropy_with_logits(output["image"], target, reduction="none").sum(1)
        mean, log_variance = output["mean"], output["log_variance"]
        divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1) / 2
        return wrong + divergence

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=self.lr)

    def prediction(self, output):
        return {"mean": output["mean"], "deviation": (output["log_variance"] / 2).exp()}
