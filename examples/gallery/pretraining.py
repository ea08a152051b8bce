"""Pretraining of a small transformer on a mixture of two corpora: documents packed by best fit, each by itself."""

import json
from pydoc_data.topics import topics

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

import grappe
from grappe.data import Corpus, Packed, document_mask, tokenize

VOCABULARY = 128  # ASCII's characters are the tokens; the first one ends a document


def characters(texts):
    return [list(text.encode("ascii", "ignore")) for text in texts]


class Pretraining(grappe.Task):
    """Characters of Python's help and of counted numbers, more of the numbers as training goes on."""

    epochs: int = 2
    batch_size: int = 8
    lr: float = 3e-3
    width: int = 64
    length: int = 128  # tokens of a sample

    def prepare(self, folder):
        texts = {"help": list(topics.values())[:40], "numbers": [f"{n} and {n + 1} " * 9 for n in range(64)]}
        for name, documents in texts.items():
            for split, chosen in (("train", documents[4:]), ("validation", documents[:4])):
                text = folder / f"{name}-{split}.jsonl"
                if not text.exists():
                    text.write_text("\n".join(json.dumps({"text": each[:2000]}) for each in chosen))
                tokenize(Corpus(text), folder / f"{name}-{split}", characters, end=0)

    def data(self, split, folder):
        split = "train" if split == "train" else "validation"
        topic, numbers = (Packed(Corpus(folder / f"{name}-{split}"), self.length) for name in ("help", "numbers"))
        if split == "validation":
            return torch.utils.data.ConcatDataset([topic, numbers])
        return Corpus.mix({topic: 0.8, numbers: {0: 0.0, 100: 0.4}}, samples=400)

    def model(self):
        sizes = {"hidden_size": self.width, "intermediate_size": 2 * self.width, "num_hidden_layers": 2}
        return LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, num_attention_heads=4, use_cache=False, **sizes))

    def forward(self, model, inputs):
        mask = document_mask(inputs["documents"])
        return model(inputs["input_ids"], attention_mask=mask, position_ids=inputs["position_ids"]).logits

    def loss(self, output, target):
        return cross_entropy(output.transpose(1, 2), target, reduction="none", ignore_index=-100)

    def counts(self, target):
        return target != -100  # padding and last tokens count nothing

    def optimizer(self, named_parameters):
        return torch.optim.AdamW(named_parameters, lr=self.lr)
