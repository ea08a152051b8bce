"""Tasks with small models of transformers, and no word of their own on how they are split; targets with -100."""

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from grappe import Arrays, Task

SIZES: dict[str, Any] = {
    "vocab_size": 32, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
}  # fmt: skip
SAMPLES = 29


class Words(Task):
    """Text of uneven length: some samples have much padding, most have none, and one counts nothing at all."""

    epochs: int = 2
    batch_size: int = 8

    def data(self, split: str, folder: Path) -> Arrays:
        tokens = torch.randint(0, 32, (SAMPLES, 8), generator=torch.Generator().manual_seed(0))
        mask = torch.ones_like(tokens)
        mask[::5, 3:] = 0
        labels = torch.where(mask > 0, tokens, -100)
        labels[7] = -100
        return Arrays({"input_ids": tokens, "attention_mask": mask}, labels)

    def loss(self, output: Any, target: Tensor) -> Tensor:
        return F.cross_entropy(output.logits[:, :-1].transpose(1, 2), target[:, 1:], reduction="none")

    def counts(self, target: Tensor) -> Tensor:
        return target[:, 1:] != -100

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.AdamW(named_parameters, lr=1e-2, eps=1e-4)


class Llama(Words):
    """Two key-value heads for four; the mask, the positions' embeddings and the cache are the model's own."""

    def model(self) -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig(**SIZES, num_key_value_heads=2))


class TiedLlama(Words):
    """The output's matrix is the embeddings'."""

    def model(self) -> LlamaForCausalLM:
        return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True))


class NeoX(Words):
    """Queries, keys and values in one matrix."""

    def model(self) -> GPTNeoXForCausalLM:
        return GPTNeoXForCausalLM(GPTNeoXConfig(**SIZES, hidden_dropout=0.0, attention_dropout=0.0))


class SlidingQwen(Words):
    """Layers of two kinds, with two masks."""

    def model(self) -> Qwen2ForCausalLM:
        kinds = ["full_attention", "sliding_attention", "full_attention"]
        config = Qwen2Config(
            **SIZES, num_key_value_heads=2, use_sliding_window=True, sliding_window=4, layer_types=kinds
        )
        return Qwen2ForCausalLM(config)


class GPT2(Words):
    """Neither a tensor plan nor one for pipelines; tied."""

    def model(self) -> GPT2LMHeadModel:
        sizes = {"vocab_size": 32, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 16}
        rest = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
        return GPT2LMHeadModel(GPT2Config(**sizes, **rest))


class Bert(Words):
    """Embeddings that must not be split, and that share their matrix with the head outside of them."""

    def model(self) -> BertForMaskedLM:
        return BertForMaskedLM(BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0))
