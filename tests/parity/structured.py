"""Tasks whose batches are no stacks of rows: graphs with all nodes in one tensor, lists of boxes, padded texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from grappe import Task


class Graph:
    """One graph, or several as one, with the protocol of torch_geometric's Data: neither a pair nor a sequence."""

    def __init__(self, x: Tensor, edges: Tensor, batch: Tensor, y: Tensor) -> None:
        self.x, self.edges, self.batch, self.y = x, edges, batch, y

    def to(self, device: Any, **options: Any) -> Graph:
        """The same on a device."""
        return Graph(*(one.to(device, **options) for one in (self.x, self.edges, self.batch, self.y)))


def together(graphs: list[Graph]) -> Graph:
    """Several as one: nodes after nodes."""
    firsts = torch.tensor([0, *[len(one.x) for one in graphs]]).cumsum(0)
    return Graph(
        torch.cat([one.x for one in graphs]),
        torch.cat([one.edges + first for one, first in zip(graphs, firsts[:-1], strict=True)], 1),
        torch.cat([torch.full((len(one.x),), number) for number, one in enumerate(graphs)]),
        torch.stack([one.y for one in graphs]),
    )


class Drawn(Dataset):
    """Graphs of 3 to 9 nodes."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Graph:
        draw = torch.Generator().manual_seed(index)
        nodes = int(torch.randint(3, 10, (), generator=draw))
        x = torch.randn(nodes, 4, generator=draw)
        edges = torch.randint(0, nodes, (2, 2 * nodes), generator=draw)
        return Graph(x, edges, torch.zeros(nodes, dtype=torch.long), (x.sum() > 0).long())


class Convolutions(nn.Module):
    """Two graph convolutions, and the mean over each graph's nodes."""

    def __init__(self, dropout: float, batchnorm: bool) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 16), nn.Linear(16, 16), nn.Linear(16, 2)
        self.norm = nn.BatchNorm1d(16) if batchnorm else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(self, graph: Graph) -> Tensor:
        x = self.norm(F.relu(self._spread(self.first(graph.x), graph.edges)))
        x = self.dropout(F.relu(self._spread(self.second(x), graph.edges)))
        count = torch.bincount(graph.batch, minlength=len(graph.y))
        return self.head(x.new_zeros(len(graph.y), 16).index_add(0, graph.batch, x) / count[:, None])

    @staticmethod
    def _spread(x: Tensor, edges: Tensor) -> Tensor:
        return x + 0.3 * torch.zeros_like(x).index_add(0, edges[1], x[edges[0]])


class Graphs(Task):
    """Samples that are objects; a batch is one object, with the targets in it."""

    epochs: int = 2
    batch_size: int = 12
    samples: int = 64
    dropout: float = 0.0
    batchnorm: bool = False
    rule: str = "adam"

    def model(self) -> nn.Module:
        return Convolutions(self.dropout, self.batchnorm)

    def data(self, split: str, folder: Path) -> Dataset:
        return Drawn(self.samples)

    def collate(self, samples: Any) -> Any:
        batch = together(list(samples))
        return batch, batch.y

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        rule = torch.optim.Adam if self.rule == "adam" else torch.optim.SGD
        return rule([p for _, p in named_parameters], lr=0.01)


class Boxed(Dataset):
    """Images, each with one to three boxes."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        boxes = torch.rand(1 + index % 3, 4, generator=draw)
        return {"image": torch.randn(3, 6, 6, generator=draw) + boxes.mean(), "boxes": boxes, "name": str(index)}


class Boxes(Task):
    """Detection's form: samples are dicts, targets a list of dicts with other numbers of boxes in each."""

    epochs: int = 2
    batch_size: int = 12
    samples: int = 64

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Flatten(), nn.Linear(108, 16), nn.Tanh(), nn.Linear(16, 4))

    def data(self, split: str, folder: Path) -> Dataset:
        return Boxed(self.samples)

    def collate(self, samples: Any) -> Any:
        targets = [{"boxes": one["boxes"], "name": one["name"]} for one in samples]
        return torch.stack([one["image"] for one in samples]), targets

    def loss(self, output: Tensor, target: list[dict[str, Any]]) -> Tensor:
        each = [F.l1_loss(one.expand_as(t["boxes"]), t["boxes"]) for one, t in zip(output, target, strict=True)]
        return torch.stack(each)

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for _, p in named_parameters], lr=0.01)


class Written(Dataset):
    """Texts of 2 to 8 words, as a Hugging Face dataset gives them: dicts of lists."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        draw = torch.Generator().manual_seed(index)
        length = int(torch.randint(2, 9, (), generator=draw))
        words = torch.randint(1, 11, (length,), generator=draw)
        return {"input_ids": words.tolist(), "label": int(words.sum()) % 3}


class Bag(nn.Module):
    """The mean of the words' embeddings, padding left out; takes keywords, and gives a dict with a scalar in it."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 16), nn.Linear(16, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        weights = attention_mask[..., None].float()
        x = torch.tanh((self.words(input_ids) * weights).sum(1) / weights.sum(1))
        return {"logits": self.scale * self.head(x), "scale": self.scale * 1.0}


class Texts(Task):
    """Hugging Face's form: dicts as samples, padded to the longest of a batch, keywords to the model."""

    epochs: int = 2
    batch_size: int = 12
    samples: int = 64

    def model(self) -> nn.Module:
        return Bag()

    def data(self, split: str, folder: Path) -> Dataset:
        return Written(self.samples)

    def collate(self, samples: Any) -> Any:
        ids = [torch.tensor(one["input_ids"]) for one in samples]
        padded = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        inputs = {"input_ids": padded, "attention_mask": padded.ne(0)}
        return inputs, torch.tensor([one["label"] for one in samples])

    def loss(self, output: dict[str, Tensor], target: Tensor) -> Tensor:
        return F.cross_entropy(output["logits"], target, reduction="none")

    def optimizer(self, named_parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for _, p in named_parameters], lr=0.01)


class Embedded(nn.Module):
    """The first unit of a pipeline takes the model's keywords."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 16)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        return self.words(input_ids), attention_mask


class Pooled(nn.Module):
    """The mean over the words that are none of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.head, self.scale = nn.Linear(16, 3), nn.Parameter(torch.tensor(1.5))

    def forward(self, given: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x, mask = given
        weights = mask[..., None].float()
        return {"logits": self.scale * self.head(torch.tanh((x * weights).sum(1) / weights.sum(1)))}


class Stages(nn.Sequential):
    """Both, and what is between them."""

    def forward(self, **inputs: Tensor) -> dict[str, Tensor]:  # pyrefly: ignore
        return self[1](self[0](**inputs))


class StagedTexts(Texts):
    """Texts for a pipeline."""

    def model(self) -> nn.Module:
        return Stages(Embedded(), Pooled())

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


class StagedBoxes(Boxes):
    """Boxes for a pipeline: a list of targets is cut as the images are."""

    def units(self, model: nn.Module) -> list[nn.Module]:
        return list(model.children())


TASKS = {"graphs": Graphs, "boxes": Boxes, "texts": Texts}
