"""Diffusion with an average of the weights: the loop as a person writes it, on one process."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import dropout, mse_loss

EPOCHS, BATCH, RATE, DECAY, STEPS = 10, 64, 2e-3, 0.99, 100
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


def network():
    return Denoiser()


def data(split):
    images = torch.from_numpy(load_digits().data / 8 - 1).float()
    place = torch.arange(len(images)) % 10
    return images[place % 5 != 0 if split == "train" else place == 0]


def loss_of(net, image, noise, time):
    kept = KEPT[time, None]
    return mse_loss(net(kept.sqrt() * image + (1 - kept).sqrt() * noise, time), noise)


def train(net, shuffled, epochs=EPOCHS, randn_like=torch.randn_like, rand_like=torch.rand_like, average=None):
    images, average = data("train"), average or copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            image = images[ids]
            noise, time = randn_like(image), (rand_like(image[:, 0]) * STEPS).long()
            optimizer.zero_grad()
            loss = loss_of(net, image, noise, time)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for kept, new in zip(average.parameters(), net.parameters(), strict=True):
                    kept.mul_(DECAY).add_(new, alpha=1 - DECAY)
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    images = data("validation")
    return loss_of(net.eval(), images, torch.randn_like(images), torch.randint(STEPS, (len(images),))).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    average, count = copy.deepcopy(net), len(data("train"))
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH), average=average)):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(average):.4f}")
