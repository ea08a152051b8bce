"""Detection without anchors: the loop as a person writes it, on one process."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits, l1_loss

STRIDE, CLASSES, EPOCHS, BATCH, RATE = 4, 2, 8, 16, 0.01


def network():
    layers = [nn.Conv2d(1, 16, 3, 2, 1), nn.ReLU(), nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU()]
    layers += [nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, CLASSES + 4, 1)]
    return nn.Sequential(*layers)


def scene(number):
    """An image [1, 32, 32] of boxes [n, 5]: centre's x and y, width, height, class (0 is bright, 1 dark)."""
    g = torch.Generator().manual_seed(number)
    image, boxes = 0.1 * torch.randn(1, 32, 32, generator=g), torch.rand(1 + number % 3, 5, generator=g)
    boxes = boxes * torch.tensor([22, 22, 6, 6, 2]) + torch.tensor([5, 5, 4, 4, 0])
    boxes[:, 4].floor_()
    for x, y, w, h, kind in boxes:
        image[:, int(y - h / 2) : int(y + h / 2), int(x - w / 2) : int(x + w / 2)] += 1 - 2 * kind
    return image, boxes


def data(split):
    first, count = {"train": (0, 300), "validation": (1000, 60), "test": (2000, 60)}[split]
    return [scene(number) for number in range(first, first + count)]


def losses(net, samples):
    output, boxes = (
        net(torch.stack([image for image, _ in samples])),
        torch.cat([some for _, some in samples]),
    )
    image = torch.tensor([row for row, (_, some) in enumerate(samples) for _ in some])
    x, y = (boxes[:, :2] / STRIDE).long().T
    heat = torch.zeros_like(output[:, :CLASSES])
    heat[image, boxes[:, 4].long(), y, x] = 1.0
    found = binary_cross_entropy_with_logits(output[:, :CLASSES], heat, reduction="none").sum()
    off = l1_loss(output[image, CLASSES:, y, x], boxes[:, :4] / 32, reduction="none").sum()
    return found / len(samples) + off / len(boxes)


def train(net, shuffled, epochs=EPOCHS):
    samples = data("train")
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = losses(net, [samples[number] for number in ids.tolist()])
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    return losses(net.eval(), data("validation")).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    for step, loss in enumerate(train(net, lambda _: torch.randperm(300).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
