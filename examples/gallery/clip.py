"""CLIP: two encoders and a logit scale; each image is compared with each text of the global batch."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

import grappe


class Clip(nn.Module):
    def __init__(self, width):
        super().__init__()
        convolutions = nn.Conv2d(1, width, 3), nn.ReLU(), nn.Conv2d(width, width, 3, stride=2), nn.ReLU()
        self.image = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(width, 16))
        self.words = nn.Embedding(10, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True)
        self.text, self.to_space = nn.TransformerEncoder(layer, 1), nn.Linear(width, 16)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, image, words):
        places = torch.linspace(-1, 1, words.shape[1], device=words.device)[:, None]
        text = self.to_space(self.text(self.words(words) + places).mean(1))
        both = {"image": normalize(self.image(image)), "text": normalize(text)}
        return both | {"scale": self.scale.exp()}


class Contrastive(grappe.Task):
    """Images whose brightness at six places is six digits, and the digits as texts."""

    epochs: int = 6
    batch_size: int = 32
    lr: float = 3e-3
    width: int = 32
    whole_batch_loss = True

    def model(self):
        return Clip(self.width)

    def data(self, split, folder):
        g = torch.Generator().manual_seed({"train": 0, "validation": 1, "test": 2}[split])
        words = torch.randint(0, 10, (512, 6), generator=g)
        image = 0.1 * torch.randn(512, 1, 6, 6, generator=g) + (words / 10)[:, None, :, None]
        return grappe.Arrays({"image": image, "words": words}, torch.zeros(512))

    def loss(self, output, target):
        logits = output["scale"] * output["image"] @ output["text"].T
        own = torch.arange(len(logits), device=logits.device)
        to_text, to_image = [cross_entropy(one, own, reduction="none") for one in (logits, logits.T)]
        return (to_text + to_image) / 2

    def optimizer(self, named_parameters):  # eps: a key's bias has a gradient of rounding alone
        return torch.optim.AdamW(named_parameters, lr=self.lr, eps=1e-5)

    def prediction(self, output):
        return {"image": output["image"], "text": output["text"]}

    def units(self, model):
        return [model.image, *model.text.layers]
