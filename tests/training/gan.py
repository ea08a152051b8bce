"""A GAN in a loop of its own, as a script that torchrun starts: PLAN OUT [FOLDER [STOP_AT [SIGNAL]]]."""

import os
import signal
import sys

import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import softplus
from torch.utils.data import TensorDataset

import grappe

plan, out, *more = sys.argv[1:]
folder = more[0] if more else None
stop_at = int(more[1]) if len(more) > 1 else -1

torch.manual_seed(0)
points, noise = torch.randn(100, 2), torch.randn(100, 4)
generator = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.0), nn.ReLU(), nn.Linear(16, 2))
critic = nn.Sequential(nn.Linear(2, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
optimizers = [torch.optim.Adam(model.parameters(), lr=0.01) for model in (generator, critic)]

own = torch.Generator().manual_seed(5)

loop = grappe.Loop(plan, folder, save_every=4)
loop.keep(own=own)
generators, generator_step = loop.parallelize(generator, optimizers[0])
critics, critic_step = loop.parallelize(critic, optimizers[1])
seen = []
for real, latent in loop.batches(TensorDataset(points, noise), batch_size=27, epochs=3):  # a last batch of 19
    fake = generators(latent)
    critic_step.zero_grad()
    loss = (softplus(-critics(real)) + softplus(critics(fake.detach()) * torch.rand((), generator=own))).mean()
    loss.backward()
    critic_step.step()
    generator_step.zero_grad()
    softplus(-critics(fake)).mean().backward()
    generator_step.step()
    seen.append(loss.item())
    if loop.step == stop_at:
        loop._folder.wait()  # for a checkpoint, where a process is killed at once
        os.kill(os.getpid(), signal.Signals[more[2]] if more[2:] else signal.SIGTERM)

weights = {
    f"{which}.{name}": p.full_tensor() if isinstance(p, DTensor) else p.detach()
    for which, model in (("g", generator), ("c", critic))
    for name, p in model.named_parameters()
}
if loop.world.rank == 0:
    save_file({**weights, "losses": torch.tensor(seen, dtype=torch.float64)}, out)
