"""CTC over packed sequences: the loop as a person writes it, on one process."""

import torch
from torch import nn
from torch.nn.functional import ctc_loss, dropout1d
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

BLANK, TOKENS, EPOCHS, BATCH, RATE = 0, 6, 8, 16, 0.01


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(4, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, TOKENS)

    def forward(self, frames, lengths):
        packed = pack_padded_sequence(frames, lengths, batch_first=True, enforce_sorted=False)
        hidden = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]
        return self.head(dropout1d(hidden.mT, 0.2, self.training).mT)


def network():
    return Network()


def utterance(number):
    """Two to five tokens, each seen for two to four frames: [T, 4] and [L]."""
    g = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, TOKENS, (2 + number % 4,), generator=g)
    each = tokens.repeat_interleave(torch.randint(2, 5, tokens.shape, generator=g))
    return torch.sin(each[:, None] * torch.arange(1.0, 5.0)), tokens


def data(split):
    first = {"train": 0, "validation": 1000, "test": 2000}[split]
    return [utterance(first + number) for number in range(200)]


def losses(net, samples):
    frames, tokens = [[one[part] for one in samples] for part in (0, 1)]
    lengths, counts = [torch.tensor([len(one) for one in some]) for some in (frames, tokens)]
    told = net(pad_sequence(frames, True), lengths).log_softmax(2).transpose(0, 1)
    return ctc_loss(told, pad_sequence(tokens, True), lengths, counts, BLANK, "none")


def train(net, shuffled, epochs=EPOCHS):
    samples = data("train")
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = losses(net, [samples[number] for number in ids.tolist()]).mean()
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    return losses(net.eval(), data("validation")).mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    for step, loss in enumerate(train(net, lambda _: torch.randperm(200).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
