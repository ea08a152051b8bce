"""A pandas frame: the loop as a person writes it, on one process."""

import torch
from sklearn.datasets import load_diabetes
from torch import nn
from torch.nn.functional import mse_loss

EPOCHS, BATCH, RATE = 20, 32, 3e-3


def network():
    blocks = [nn.Sequential(nn.Linear(size, 64), nn.ReLU(), nn.Dropout(0.1)) for size in (10, 64)]
    return nn.Sequential(*blocks, nn.Linear(64, 1))


def data(split):
    frame, target = load_diabetes(return_X_y=True, as_frame=True)
    rows, target = (
        torch.tensor(20 * frame.to_numpy()).float(),
        torch.tensor((target / 100).to_numpy()).float(),
    )
    place = torch.arange(len(rows)) % 10
    keep = place % 5 != 0 if split == "train" else place == 0
    return rows[keep], target[keep]


def train(net, shuffled, epochs=EPOCHS):
    rows, target = data("train")
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = mse_loss(net(rows[ids])[:, 0], target[ids])
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    rows, target = data("validation")
    return mse_loss(net.eval()(rows)[:, 0], target).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    count = len(data("train")[0])
    for step, loss in enumerate(train(net, lambda _: torch.randperm(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
