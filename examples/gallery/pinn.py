"""Physics-informed network: solves a differential equation by L-BFGS, with several evaluations of the loss a step."""

import math

import torch
from torch import nn
from torchmetrics import MeanSquaredError

import grappe


class Solution(nn.Module):
    """u(x, t), with u = 0 at both ends and u = sin(pi x) at first; and what is left of u_t - u_xx / pi^2."""

    def __init__(self, width):
        super().__init__()
        wide = nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        self.net = nn.Sequential(*wide, nn.Linear(width, 1))

    def forward(self, places):
        x, t = places.unbind(1)
        with torch.enable_grad():  # in evaluation, too
            x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
            u = torch.sin(math.pi * x) + t * x * (1 - x) * self.net(torch.stack([x, t], 1)).squeeze(1)
            u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return torch.stack([u, u_t - u_xx / math.pi**2], 1)


class Error(MeanSquaredError):
    def update(self, output, target):
        super().update(output[:, 0], target)


class Heat(grappe.Task):
    """A rod's temperature, which falls as exp(-t) sin(pi x); the network learns the equation, and sees no solution."""

    epochs: int = 40
    batch_size: int = 512  # all places in each step, as the line search needs
    width: int = 24

    def model(self):
        return Solution(self.width)

    def data(self, split, folder):
        g = torch.Generator().manual_seed({"train": 0, "validation": 1, "test": 2}[split])
        places = torch.rand(512, 2, generator=g)
        return grappe.Arrays(places, torch.exp(-places[:, 1]) * torch.sin(math.pi * places[:, 0]))

    def loss(self, output, target):
        return output[:, 1].square()

    def optimizer(self, named_parameters):
        return torch.optim.LBFGS(named_parameters, lr=0.1, max_iter=4)

    def metrics(self):
        return {"error": Error()}

    def prediction(self, output):
        return output[:, 0]
