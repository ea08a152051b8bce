"""Image classification with mixup, cutmix and an average of the weights: the loop as a person writes it."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

EPOCHS, BATCH, RATE, DECAY = 4, 64, 0.1, 0.95


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())


def network():
    head = nn.Sequential(nn.Flatten(), nn.Linear(32 * 16, 10))
    return nn.Sequential(block(1, 16), nn.Sequential(block(16, 32), nn.MaxPool2d(2)), block(32, 32), head)


def data(split):
    images, labels = load_digits(return_X_y=True)
    place = torch.arange(len(labels)) % 10
    keep = place % 5 != 0 if split == "train" else place == 0
    return torch.tensor(images).float().reshape(-1, 1, 8, 8)[keep] / 8 - 1, torch.tensor(labels)[keep]


def mixed(images, labels, numbers):
    other = (torch.arange(len(images)) ^ 1).clamp(max=len(images) - 1)  # neighbours in a shuffled batch
    share, row, column, kind = numbers.T[..., None]
    places, side = torch.arange(8), 8 * (1 - share).sqrt()
    rows, columns = [(places + 0.5 - 8 * one).abs() < side / 2 for one in (row, column)]
    cut = 1 - (rows[:, :, None] & columns[:, None]).float()
    kept = torch.where(kind[..., None] < 0.5, cut, share[..., None])[:, None]
    part, classes = kept.mean((2, 3)), one_hot(labels, 10).float()
    return images * kept + images[other] * (1 - kept), classes * part + classes[other] * (1 - part)


def train(net, shuffled, epochs=EPOCHS, rand=torch.rand, average=None):
    images, labels = data("train")
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.9, weight_decay=5e-4)
    average = average or copy.deepcopy(net)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            inputs, targets = mixed(images[ids], labels[ids], rand(len(ids), 4))
            optimizer.zero_grad()
            loss = cross_entropy(net(inputs), targets)
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for kept, new in zip(average.parameters(), net.parameters(), strict=True):
                    kept.mul_(DECAY).add_(new, alpha=1 - DECAY)
            yield loss.item()
    average.load_state_dict(dict(net.named_buffers()), strict=False)


@torch.no_grad()
def evaluate(net):
    images, labels = data("validation")
    output = net.eval()(images)
    return cross_entropy(output, labels).item(), (output.argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    average = copy.deepcopy(net)
    count = len(data("train")[0])
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH), average=average)):
        print(f"step {step}  loss {loss:.4f}")
    print("validation loss {:.4f}, accuracy {:.4f}".format(*evaluate(average)))
