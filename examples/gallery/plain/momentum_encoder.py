"""Momentum contrast: the loop as a person writes it, on one process."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, normalize

EPOCHS, BATCH, RATE, MOMENTUM, HEAT, WIDTH = 10, 64, 0.3, 0.98, 0.2, 128


class Encoders(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 32))
        self.key = copy.deepcopy(self.query).requires_grad_(False)

    def forward(self, views):
        return normalize(self.query(views), dim=2), normalize(self.key(views), dim=2)


def network():
    return Encoders()


def data(split):
    images = torch.from_numpy(load_digits().data / 8 - 1).float()
    place = torch.arange(len(images)) % 10
    return images[place % 5 != 0 if split == "train" else place == 0]


def contrast(net, images, numbers):
    views = images[:, None].expand(-1, 2, -1).masked_fill(numbers.view(-1, 2, 64) < 0.3, 0)
    (query, key), own = net(views), torch.arange(len(images))
    return sum(cross_entropy(query[:, one] @ key[:, 1 - one].T / HEAT, own) for one in (0, 1)) / 2


def train(net, shuffled, epochs=EPOCHS, rand=torch.rand):
    images = data("train")
    optimizer = torch.optim.SGD(net.query.parameters(), lr=RATE, momentum=0.9)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = contrast(net, images[ids], rand(len(ids), 128))
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for key, query in zip(net.key.parameters(), net.query.parameters(), strict=True):
                    key.lerp_(query, 1 - MOMENTUM)
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    images = data("validation")
    return contrast(net.eval(), images, torch.rand(len(images), 128)).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    count = len(data("train"))
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
