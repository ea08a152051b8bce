"""CLIP, two encoders and a logit scale: the loop as a person writes it, on one process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, normalize

EPOCHS, BATCH, RATE, WIDTH = 6, 32, 3e-3, 32


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
        places = torch.linspace(-1, 1, words.shape[1])[:, None]
        text = self.to_space(self.text(self.words(words) + places).mean(1))
        return normalize(self.image(image)), normalize(text), self.scale.exp()


def network():
    return Clip(WIDTH)


def data(split):
    g = torch.Generator().manual_seed({"train": 0, "validation": 1, "test": 2}[split])
    words = torch.randint(0, 10, (512, 6), generator=g)
    return 0.1 * torch.randn(512, 1, 6, 6, generator=g) + (words / 10)[:, None, :, None], words


def contrast(net, images, words):
    image, text, scale = net(images, words)
    logits, own = scale * image @ text.T, torch.arange(len(images))
    return (cross_entropy(logits, own) + cross_entropy(logits.T, own)) / 2


def train(net, shuffled, epochs=EPOCHS):
    images, words = data("train")
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE, eps=1e-5)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            optimizer.zero_grad()
            loss = contrast(net, images[ids], words[ids])
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    net.eval()
    images, words = data("validation")
    losses = [contrast(net, images[ids], words[ids]) for ids in torch.arange(512).split(BATCH)]
    return torch.stack(losses).mean().item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    for step, loss in enumerate(train(net, lambda _: torch.randperm(512).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
