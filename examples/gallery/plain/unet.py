"""Segmentation by a U-Net with ignored pixels: the loop as a person writes it, on one process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torchmetrics.classification import MulticlassJaccardIndex

EPOCHS, BATCH, RATE = 10, 16, 0.01


def block(before, after):
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU())


class Level(nn.Module):
    def __init__(self, before, width, below):
        super().__init__()
        self.down, self.up = block(before, width), block(3 * width, width)
        self.below = nn.Sequential(nn.MaxPool2d(2), below, nn.Dropout2d(0.2), nn.Upsample(scale_factor=2))

    def forward(self, image):
        return self.up(torch.cat([self.below(fine := self.down(image)), fine], 1))


def network():
    return nn.Sequential(Level(1, 8, Level(8, 16, block(16, 32))), nn.Conv2d(8, 3, 1))


def data(split):
    g = torch.Generator().manual_seed({"train": 0, "validation": 1, "test": 2}[split])
    numbers = torch.rand(4, 200, 1, 1, generator=g)
    across, down = torch.arange(-6.0, 18) - 12 * numbers[:2]
    inside = 3 + 4 * numbers[2] - across.hypot(down.mT)
    disc = (inside > 0) * (numbers[3] - 0.5).sign()  # 1, -1, or 0 for the ground
    labels = (disc % 3).long().masked_fill(inside.abs() < 0.7, -100)
    return (disc + torch.randn(200, 24, 24, generator=g))[:, None], labels


def train(net, shuffled, epochs=EPOCHS):
    images, labels = data("train")
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=1)
    for epoch in range(epochs):
        net.train()
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = cross_entropy(net(images[ids]), labels[ids])
            loss.backward()
            optimizer.step()
            yield loss.item()
        schedule.step(evaluate(net)[0])


@torch.no_grad()
def evaluate(net):
    images, labels = data("validation")
    output = net.eval()(images)
    overlap = MulticlassJaccardIndex(3, ignore_index=-100)(output, labels)
    return cross_entropy(output, labels).item(), overlap.item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    for step, loss in enumerate(train(net, lambda _: torch.randperm(200).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print("validation loss {:.4f}, overlap {:.4f}".format(*evaluate(net)))
