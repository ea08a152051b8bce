"""Variational autoencoder: the loop as a person writes it, on one process."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

EPOCHS, BATCH, RATE, LATENT = 10, 64, 3e-3, 4


class Network(nn.Module):
    def __init__(self, latent):
        super().__init__()
        self.encode = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 2 * latent))
        self.decode = nn.Sequential(nn.Linear(latent, 128), nn.ReLU(), nn.Linear(128, 64))

    def forward(self, image, randn_like):
        mean, log_variance = self.encode(image).chunk(2, 1)
        latent = mean + randn_like(mean) * (log_variance / 2).exp()
        return self.decode(latent), mean, log_variance


def network():
    return Network(LATENT)


def data(split):
    images = torch.from_numpy(load_digits().data / 16).float()
    place = torch.arange(len(images)) % 10
    return images[place % 5 != 0 if split == "train" else place == 0]


def loss_of(net, images, randn_like=torch.randn_like):
    output, mean, log_variance = net(images, randn_like)
    wrong = binary_cross_entropy_with_logits(output, images, reduction="none").sum(1)
    divergence = (mean**2 + log_variance.exp() - 1 - log_variance).sum(1) / 2
    return (wrong + divergence).mean()


def train(net, shuffled, epochs=EPOCHS, randn_like=torch.randn_like):
    images = data("train")
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = loss_of(net, images[ids], randn_like)
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    return loss_of(net.eval(), data("validation")).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    count = len(data("train"))
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
