"""Masked language model of transformers: a frozen backbone below, two learning rates above, a warm-up."""

import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM

import grappe

MASK, IGNORED = 1, -100


class MaskedLM(grappe.Task):
    """A small BERT whose embeddings and first layer are frozen, fine-tuned on sequences that repeat."""

    epochs: int = 2
    batch_size: int = 16
    lr: float = 3e-3
    masked: float = 0.15

    def model(self):
        config = BertConfig(
            vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64
        )
        config.tie_word_embeddings = False
        model = BertForMaskedLM(config)
        model.bert.embeddings.requires_grad_(False)
        model.bert.encoder.layer[0].requires_grad_(False)
        model.cls.predictions.bias.requires_grad_(False)  # the decoder has one of its own
        return model

    def data(self, split, folder):
        seed = {"train": 0, "validation": 1, "test": 2}[split]
        tokens = torch.randint(2, 64, (256, 4), generator=torch.Generator().manual_seed(seed)).repeat(1, 4)
        return grappe.Arrays({"input_ids": tokens}, tokens)

    def augment(self, inputs, targets, keys, training):
        chosen = grappe.draw(keys, targets.shape[1]) < self.masked
        chosen[:, 0] = True  # each sample has something to learn
        return {"input_ids": inputs["input_ids"].masked_fill(chosen, MASK)}, targets.masked_fill(~chosen, IGNORED)

    def loss(self, output, target):
        return nn.functional.cross_entropy(
            output.logits.transpose(1, 2), target, reduction="none", ignore_index=IGNORED
        )

    def counts(self, target):
        return target != IGNORED

    def optimizer(self, named_parameters):
        rules = {"cls.*": {"lr": 3 * self.lr}}
        return torch.optim.AdamW(grappe.optimizers.by_name(named_parameters, rules), lr=self.lr, eps=1e-5)

    def schedule(self, optimizer, total_steps):
        return torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=max(1, total_steps // 10))

    def prediction(self, output):
        return output.logits.argmax(2)
