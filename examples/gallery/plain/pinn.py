"""A physics-informed network and L-BFGS: the loop as a person writes it, on one process."""

import math

import torch
from torch import nn

EPOCHS, BATCH, WIDTH = 40, 512, 24


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        wide = nn.Linear(2, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        self.net = nn.Sequential(*wide, nn.Linear(width, 1))

    def forward(self, places):
        x, t = places.unbind(1)
        with torch.enable_grad():
            x, t = x.detach().requires_grad_(), t.detach().requires_grad_()
            u = torch.sin(math.pi * x) + t * x * (1 - x) * self.net(torch.stack([x, t], 1)).squeeze(1)
            u_x, u_t = torch.autograd.grad(u.sum(), (x, t), create_graph=True)
            (u_xx,) = torch.autograd.grad(u_x.sum(), x, create_graph=True)
        return torch.stack([u, u_t - u_xx / math.pi**2], 1)


def network():
    return Network(WIDTH)


def data(split):
    g = torch.Generator().manual_seed({"train": 0, "validation": 1}[split])
    return torch.rand(512, 2, generator=g)


def loss_of(net, places):
    return net(places)[:, 1].square().mean()


def train(net, shuffled, epochs=EPOCHS):
    places = data("train")
    optimizer = torch.optim.LBFGS(net.parameters(), lr=0.1, max_iter=4)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):

            def closure(batch=places[ids]):
                optimizer.zero_grad()
                loss = loss_of(net, batch)
                loss.backward()
                return loss

            yield optimizer.step(closure).item()


def evaluate(net):
    return loss_of(net.eval(), data("validation")).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    for step, loss in enumerate(train(net, lambda _: torch.randperm(BATCH).split(BATCH))):
        print(f"step {step}  loss {loss:.2e}")
    print(f"validation loss {evaluate(net):.2e}")
