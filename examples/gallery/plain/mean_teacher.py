"""Mean teacher: the loop as a person writes it, on one process."""

import copy

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH, RATE, AGREEMENT, WIDTH = 10, 64, 0.05, 1.0, 256


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        hidden = nn.Linear(64, WIDTH), nn.ReLU(), nn.Dropout(0.5)
        self.student = nn.Sequential(*hidden, nn.Linear(WIDTH, 10))
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, image):
        return self.student(image), self.teacher(image)


def network():
    return Pair()


def data(split):
    images, labels = [torch.from_numpy(one) for one in load_digits(return_X_y=True)]
    place, train = torch.arange(len(labels)) % 10, split == "train"
    labels = labels.masked_fill((place != 1) & train, -100)
    keep = place % 5 != 0 if train else place == 0
    return (images[keep] / 8 - 1).float(), labels[keep]


def losses(output, target):
    student, teacher = [logits.softmax(1) for logits in output]
    wrong = cross_entropy(output[0], target, reduction="none")
    return wrong + AGREEMENT * (student - teacher).square().sum(1)


def train(net, shuffled, epochs=EPOCHS):
    images, labels = data("train")
    optimizer = torch.optim.SGD(net.student.parameters(), lr=RATE, momentum=0.9)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = losses(net(images[ids]), labels[ids]).mean()
            loss.backward()
            optimizer.step()
            with torch.no_grad():
                for teacher, student in zip(net.teacher.parameters(), net.student.parameters(), strict=True):
                    teacher.lerp_(student, 0.02)
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    images, labels = data("validation")
    output = net.eval()(images)
    return losses(output, labels).mean().item(), (output[1].argmax(1) == labels).float().mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    count = len(data("train")[0])
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print("validation loss {:.4f}, accuracy of the teacher {:.4f}".format(*evaluate(net)))
