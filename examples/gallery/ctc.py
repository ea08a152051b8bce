"""Speech's form: CTC over packed sequences, with frames and tokens of other lengths in each sample."""

import torch
from torch import nn
from torch.nn.functional import ctc_loss, dropout1d
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

import grappe

BLANK, TOKENS = 0, 6


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.recurrent = nn.GRU(4, 32, batch_first=True, bidirectional=True)
        self.head = nn.Linear(64, TOKENS)

    def forward(self, frames, lengths):  # [B, T, 4], [B]
        packed = pack_padded_sequence(frames, lengths.cpu(), batch_first=True, enforce_sorted=False)
        hidden = pad_packed_sequence(self.recurrent(packed)[0], batch_first=True)[0]
        return self.head(dropout1d(hidden.mT, 0.2, self.training).mT), lengths  # whole features, all frames


def utterance(number):
    """Two to five tokens, each seen for two to four frames: [T, 4] and [L]."""
    g = torch.Generator().manual_seed(number)
    tokens = torch.randint(1, TOKENS, (2 + number % 4,), generator=g)
    each = tokens.repeat_interleave(torch.randint(2, 5, tokens.shape, generator=g))
    return torch.sin(each[:, None] * torch.arange(1.0, 5.0)), tokens


class Ctc(grappe.Task):
    """Which tokens were said, and in which order."""

    epochs: int = 8
    batch_size: int = 16

    def model(self):
        return Network()

    def data(self, split, folder):
        first = {"train": 0, "validation": 1000, "test": 2000}[split]
        return [utterance(first + number) for number in range(200)]

    def collate(self, samples):
        frames, tokens = [[one[part] for one in samples] for part in (0, 1)]
        padded = {"frames": pad_sequence(frames, True), "lengths": torch.tensor([len(one) for one in frames])}
        return padded, (pad_sequence(tokens, True), torch.tensor([len(one) for one in tokens]))

    def loss(self, output, target):  # [B]
        (logits, lengths), (tokens, counts) = output, target
        return ctc_loss(logits.log_softmax(2).transpose(0, 1), tokens, lengths, counts, BLANK, "none")

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=0.01)

    def prediction(self, output):  # the best path, without repetitions and blanks
        paths = (one[:n].argmax(1).unique_consecutive() for one, n in zip(*output, strict=True))
        return [path[path != BLANK] for path in paths]
