"""Graphs with torch_geometric: the loop as a person writes it, on one process."""

import torch
from torch import nn
from torch.nn.functional import cross_entropy, dropout
from torch_geometric.data import Batch, Data
from torch_geometric.nn import GINConv, global_mean_pool

EPOCHS, BATCH, RATE = 5, 32, 0.01


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


def network():
    return Network()


def graph(number):
    """A ring of 5 to 15 nodes, or a star."""
    nodes, ring = torch.arange(5 + number % 11), number % 2
    edges = torch.stack([nodes, (nodes + 1) % len(nodes) if ring else 0 * nodes])
    noise = 0.5 * torch.randn(len(nodes), 4, generator=torch.Generator().manual_seed(number))
    return Data(1 + noise, torch.cat([edges, edges.flip(0)], 1), y=torch.tensor(ring))


def data(split):
    first = {"train": 0, "validation": 1000, "test": 2000}[split]
    return [graph(first + number) for number in range(400)]


def train(net, shuffled, epochs=EPOCHS):
    graphs = data("train")
    optimizer = torch.optim.Adam(net.parameters(), lr=RATE, eps=1e-5)
    net.train()
    for epoch in range(epochs):
        for ids in shuffled(epoch):
            batch = Batch.from_data_list([graphs[number] for number in ids.tolist()])
            optimizer.zero_grad()
            loss = cross_entropy(net(batch), batch.y)
            loss.backward()
            optimizer.step()
            yield loss.item()


@torch.no_grad()
def evaluate(net):
    batch = Batch.from_data_list(data("validation"))
    return cross_entropy(net.eval()(batch), batch.y).item()


if __name__ == "__main__":
    torch.manual_seed(0)
    net = network()
    for step, loss in enumerate(train(net, lambda _: torch.randperm(400).split(BATCH))):
        print(f"step {step}  loss {loss:.4f}")
    print(f"validation loss {evaluate(net):.4f}")
