"""Causal language model of transformers, from a configuration: text packed into windows, next tokens learned."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

import grappe

END = 256  # beside the 256 bytes, a token that ends each text


def packed(texts: list[str], window: int) -> torch.Tensor:
    """Texts as bytes, one after the other, cut into windows [N, window + 1] of which nothing is padding."""
    tokens = [token for text in texts for token in (*text.encode(), END)]
    count = (len(tokens) - 1) // window
    starts = torch.arange(count)[:, None] * window
    return torch.tensor(tokens)[starts + torch.arange(window + 1)]


class CausalLM(grappe.Task):
    """A small GPT-2 that learns to count in words."""

    epochs: int = 2
    batch_size: int = 16
    lr: float = 3e-3
    window: int = 32

    def model(self):
        sizes = {"vocab_size": END + 1, "n_positions": self.window, "n_embd": 32, "n_layer": 2, "n_head": 2}
        config = GPT2Config(**sizes, use_cache=False, eos_token_id=END, bos_token_id=END)
        return GPT2LMHeadModel(config)

    def data(self, split, folder):
        words = ["one", "two", "three", "four", "five", "six", "seven"]
        first = {"train": 0, "validation": 100, "test": 120}[split]
        texts = [" ".join(words[(start + i) % 7] for i in range(12)) for start in range(first, first + 100)]
        windows = packed(texts, self.window)
        return grappe.Arrays({"input_ids": windows[:, :-1]}, windows[:, 1:])

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.logits.transpose(1, 2), target, reduction="none")

    def optimizer(self, named_parameters):  # eps: a key's bias has a gradient of rounding alone
        return torch.optim.AdamW(
            named_parameters, lr=self.lr, eps=1e-5
        )  # a key's bias has a gradient of rounding alone

    def prediction(self, output):
        return output.logits.argmax(2)
