"""Sharpness-aware minimisation: the loop as a person writes it, on one process."""

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH, RATE, RADIUS = 5, 64, 0.05, 0.05


def network():
    convolutions = nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU()
    return nn.Sequential(nn.Unflatten(1, (1, 8)), *convolutions, nn.Flatten(), nn.Linear(288, 10))


def data(split):
    images, labels = load_digits(return_X_y=True)
    place = torch.arange(len(labels)) % 10
    keep = place % 5 != 0 if split == "train" else place == 0
    return torch.tensor(images).float().reshape(-1, 8, 8)[keep] / 8 - 1, torch.tensor(labels)[keep]


def train(net, shuffled, epochs=EPOCHS):
    images, labels = data("train")
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(net(images[ids]), labels[ids])
            loss.backward()
            with torch.no_grad():
                before = [one.clone() for one in net.parameters()]
                norm = torch.stack([one.grad.norm() for one in net.parameters()]).norm().item()
                for one in net.parameters():
                    one.add_(one.grad, alpha=RADIUS / norm)
            optimizer.zero_grad()
            cross_entropy(net(images[ids]), labels[ids]).backward()
            with torch.no_grad():
                for one, kept in zip(net.parameters(), before, strict=True):
                    one.copy_(kept)
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    images, labels = data("validation")
    output = net.eval()(images)
    return cross_entropy(output, labels).item(), (output.argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    count = len(data("train")[0])
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print("validation loss {:.4f}, accuracy {:.4f}".format(*evaluate(net)))
