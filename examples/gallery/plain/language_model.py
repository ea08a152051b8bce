"""Truncated backpropagation through time: the loop as a person writes it, on one process."""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

EPOCHS, BATCH, RATE, CLIP, WIDTH, LENGTH = 6, 20, 2.0, 0.25, 64, 35


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, WIDTH), nn.Linear(WIDTH, 128)
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True, dropout=0.2)
        self.drop = nn.Dropout(0.2)

    def forward(self, tokens, state):
        output, state = self.lstm(self.drop(self.embed(tokens)), state)
        return self.head(self.drop(output)), tuple(part.detach() for part in state)


def network():
    return Network()


def data(split):
    text = "".join(topics.values()).encode("ascii", "replace")
    text = text[:54_000] if split == "train" else text[54_000:60_000]
    size = (len(text) // BATCH - 1) // LENGTH * LENGTH + 1
    columns = torch.tensor(list(text)).unfold(0, size, size)[:BATCH]
    rows = columns.unfold(1, LENGTH + 1, LENGTH).transpose(0, 1).clone()
    rows[0, :, 0] = 0
    return rows.flatten(0, 1)


def start():
    return (torch.zeros(2, BATCH, WIDTH), torch.zeros(2, BATCH, WIDTH))


def losses(net, rows, state):
    output, state = net(rows[:, :-1], state)
    return cross_entropy(output.transpose(1, 2), rows[:, 1:], reduction="none").mean(1), state


def train(net, shuffled, epochs=EPOCHS):
    rows = data("train")
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE)
    net.train()
    for epoch in range(epochs):
        state = start()
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            each, state = losses(net, rows[ids], state)
            loss = each.mean()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), CLIP)
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    net.eval()
    state, values = start(), []
    for rows in data("validation").split(BATCH):
        each, state = losses(net, rows, state)
        values.append(each)
    return torch.cat(values).mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    count = len(data("train"))
    for step, loss in enumerate(train(net, lambda _: torch.arange(count).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
