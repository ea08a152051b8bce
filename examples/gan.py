"""A GAN with two optimizers that learns where a ring is: the same loop, under any plan.

grappe launch --plan replicate=2 examples/gan.py
"""

import sys

import torch
from torch import nn
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import grappe

torch.manual_seed(0)
angle, noise = torch.rand(2000) * 2 * torch.pi, torch.randn(2000, 8)
ring = TensorDataset(torch.stack([angle.cos(), angle.sin()], 1), noise)
generator = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
critic = nn.Sequential(nn.Linear(2, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
generator_step = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.99))
critic_step = torch.optim.Adam(critic.parameters(), lr=2e-3, betas=(0.5, 0.99))
loop = grappe.Loop(*sys.argv[1:])
generator, generator_step = loop.parallelize(generator, generator_step)
critic, critic_step = loop.parallelize(critic, critic_step)


def loss(scores: torch.Tensor, other_scores: torch.Tensor | float = -1e9) -> torch.Tensor:
    """How far real ones are from a high score, and others from a low one."""
    return torch.mean(softplus(-scores) + softplus(torch.as_tensor(other_scores)))


for real, latent in loop.batches(ring, batch_size=64, epochs=10):
    fake = generator(latent)
    critic_step.zero_grad()
    loss(critic(real), critic(fake.detach())).backward()
    critic_step.step()
    generator_step.zero_grad()
    loss(critic(fake)).backward()
    generator_step.step()

print(f"distance from the centre: {generator(noise).norm(dim=1).mean():.3f}")
