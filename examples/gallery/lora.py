"""LoRA with peft: a frozen model of transformers, of which only low-rank additions are trained."""

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import grappe


class Lora(grappe.Task):
    """A small Llama that learns to copy, by adapters of rank 4 at its queries and values."""

    epochs: int = 2
    batch_size: int = 16
    lr: float = 1e-2
    rank: int = 4

    def model(self):
        config = LlamaConfig(
            vocab_size=32,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            use_cache=False,
        )
        adapters = LoraConfig(r=self.rank, lora_alpha=8, lora_dropout=0.05, target_modules=["q_proj", "v_proj"])
        return get_peft_model(LlamaForCausalLM(config), adapters)  # it freezes all but the adapters

    def data(self, split, folder):
        seed = {"train": 0, "validation": 1, "test": 2}[split]
        half = torch.randint(0, 32, (256, 8), generator=torch.Generator().manual_seed(seed))
        tokens = torch.cat([half, half], 1)
        return grappe.Arrays({"input_ids": tokens[:, :-1]}, tokens[:, 1:])

    def loss(self, output, target):
        return nn.functional.cross_entropy(output.logits.transpose(1, 2), target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=self.lr, weight_decay=0.0, eps=1e-5)

    def prediction(self, output):
        return output.logits.argmax(2)
