"""Distillation from a frozen teacher: the loop as a person writes it, on one process."""

from itertools import pairwise

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, kl_div

EPOCHS, BATCH, RATE, HEAT = 4, 64, 0.05, 3.0


def layers(*sizes):
    hidden = [nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes[:-1])]
    return nn.Sequential(*hidden, nn.Linear(*sizes[-2:]))


def network():
    teacher = layers(64, 512, 512, 10)
    return nn.ModuleDict({"student": layers(64, 64, 10), "teacher": teacher.requires_grad_(False)})


def data(split):
    images, labels = load_digits(return_X_y=True)
    place = torch.arange(len(labels)) % 10
    keep = place % 5 != 0 if split == "train" else place == 0
    return torch.tensor(images).float()[keep] / 8 - 1, torch.tensor(labels)[keep]


def losses(net, images, labels):
    output = net["student"](images)
    said, told = [(one / HEAT).log_softmax(1) for one in (output, net["teacher"](images))]
    soft = HEAT**2 * kl_div(said, told, reduction="none", log_target=True).sum(1)
    return 0.5 * soft + 0.5 * cross_entropy(output, labels, reduction="none")


def train(net, shuffled, epochs=EPOCHS):
    images, labels = data("train")
    optimizer = torch.optim.SGD(net["student"].parameters(), lr=RATE, momentum=0.9)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = losses(net, images[ids], labels[ids]).mean()
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    return losses(net.eval(), *data("validation")).mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    net["teacher"].load_state_dict(torch.load("teacher.pt", weights_only=True))
    count = len(data("train")[0])
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
