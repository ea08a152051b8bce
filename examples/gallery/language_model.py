"""Language model with truncated backpropagation through time: an LSTM's state passes from batch to batch."""

from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import grappe


class Network(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.embed, self.head = nn.Embedding(128, width), nn.Linear(width, 128)
        self.lstm = nn.LSTM(width, width, 2, batch_first=True, dropout=0.2)
        self.drop, self.state = nn.Dropout(0.2), None

    def forward(self, tokens):
        if self.state is None or self.state[0].shape[1] != len(tokens):
            self.state = [self.embed.weight.new_zeros(2, len(tokens), self.lstm.hidden_size)] * 2
        begins = (tokens[:, 0] == 0)[:, None]
        state = tuple(part.masked_fill(begins, 0) for part in self.state)
        output, state = self.lstm(self.drop(self.embed(tokens)), state)
        self.state = [part.detach() for part in state]
        return self.head(self.drop(output))


class LanguageModel(grappe.Task):
    """Characters of Python's help, in as many columns as a batch has rows."""

    epochs: int = 6
    batch_size: int = 20
    lr: float = 2.0
    clip: float | None = 0.25
    width: int = 64
    length: int = 35  # characters through which gradients go back
    consecutive_batches = True

    def model(self):
        return Network(self.width)

    def data(self, split, folder):
        first, last = {"train": (0, 54), "validation": (54, 60), "test": (60, 66)}[split]
        text = "".join(topics.values()).encode("ascii", "replace")[first * 1000 : last * 1000]
        size = (len(text) // self.batch_size - 1) // self.length * self.length + 1
        columns = torch.tensor(list(text)).unfold(0, size, size)[: self.batch_size]
        rows = columns.unfold(1, self.length + 1, self.length).transpose(0, 1).clone()
        rows[0, :, 0] = 0  # here a column begins
        rows = rows.flatten(0, 1)  # the first chunk of all columns, then the second ones
        return grappe.Arrays(rows[:, :-1], rows[:, 1:])

    def sampling(self, dataset):
        return grappe.Sampling(shuffle=False)

    def loss(self, output, target):
        return cross_entropy(output.transpose(1, 2), target, reduction="none").mean(1)

    def optimizer(self, named_parameters):
        return torch.optim.SGD(named_parameters, lr=self.lr)
