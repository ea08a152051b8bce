"""Pretraining of a small transformer on a mixture of two corpora: documents packed by best fit, each by itself."""

import json
import string
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

import grappe
from grappe.data import Corpus, Packed, document_mask, tokenize

VOCABULARY = 128  # ASCII's characters are the tokens


def characters(texts):
    return [[ord(character) for character in text if ord(character) < VOCABULARY] for text in texts]


class Block(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden, mask):
        query, key, value = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.first(hidden)).chunk(3, -1)
        )
        mixed = scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.mlp(self.second(hidden))


class Transformer(nn.Module):
    def __init__(self, width, length):
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, input_ids, position_ids, documents):
        hidden, mask = self.tokens(input_ids) + self.places(position_ids), document_mask(documents)
        for block in self.blocks:
            hidden = block(hidden, mask)
        return self.head(hidden)


class Pretraining(grappe.Task):
    """Characters of Python's help and of counted words, more of the words as training goes on."""

    epochs: int = 2
    batch_size: int = 8
    lr: float = 3e-3
    width: int = 64
    length: int = 128  # tokens of a sample

    def prepare(self, folder):
        texts = {"help": list(topics.values())[:40], "words": [f"{n} {word} " * 9 for n, word in enumerate(WORDS)]}
        for name, documents in texts.items():
            lines = [json.dumps({"text": text[:2000]}) for text in documents]
            for split, chosen in (("train", lines[4:]), ("validation", lines[:4])):
                text = Path(folder) / f"{name}-{split}.jsonl"
                if not text.exists():
                    text.write_text("\n".join(chosen))
                tokenize(Corpus(text), Path(folder) / f"{name}-{split}", characters, end=0, name="characters")

    def data(self, split, folder):
        split = "train" if split == "train" else "validation"
        help_texts, words = (Packed(Corpus(folder / f"{name}-{split}"), self.length) for name in ("help", "words"))
        if split == "validation":
            return torch.utils.data.ConcatDataset([help_texts, words])
        return Corpus.mix({help_texts: 0.8, words: {0: 0.0, 100: 0.4}}, samples=400)

    def model(self):
        return Transformer(self.width, self.length)

    def loss(self, output, target):
        return cross_entropy(output.transpose(1, 2), target, reduction="none", ignore_index=-100)

    def counts(self, target):
        return target != -100  # padding and last tokens count nothing

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=self.lr)


WORDS = [a + b + a for a in string.ascii_lowercase[:8] for b in string.ascii_lowercase[:8]]
