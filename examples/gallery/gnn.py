"""Graphs with torch_geometric: a batch is one large graph, made by the task's own collate."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_mean_pool

import grappe


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(GINConv(nn.Linear(size, 64)) for size in (4, 64))
        self.head = nn.Linear(64, 2)

    def forward(self, graph):
        x = graph.x
        for layer in self.layers:
            x = layer(x, graph.edge_index).relu()
        return self.head(dropout(global_mean_pool(x, graph.batch, graph.num_graphs), 0.5, self.training))


def graph(number):
    """A ring of 5 to 15 nodes, or a star."""
    nodes, ring = torch.arange(5 + number % 11), number % 2
    edges = torch.stack([nodes, (nodes + 1) % len(nodes) if ring else 0 * nodes])
    noise = 0.5 * torch.randn(len(nodes), 4, generator=torch.Generator().manual_seed(number))
    return Data(1 + noise, torch.cat([edges, edges.flip(0)], 1), y=torch.tensor(ring))


class Graphs(grappe.Task):
    """Is it a ring?"""

    epochs: int = 5
    batch_size: int = 32
    lr: float = 1e-2

    def model(self):
        return Network()

    def data(self, split, folder):
        first = {"train": 0, "validation": 1000, "test": 2000}[split]
        return [graph(first + number) for number in range(400)]

    def collate(self, samples):
        return (batch := Batch.from_data_list(samples)), batch.y

    def loss(self, output, target):
        return cross_entropy(output, target, reduction="none")

    def optimizer(self, named_parameters):
        return torch.optim.Adam(named_parameters, lr=self.lr, eps=1e-5)

    def prediction(self, output):
        return output.argmax(1)

    def units(self, model):
        return model.layers
