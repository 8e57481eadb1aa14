"""Trains a graph network of PyTorch Geometric, whose nodes are pixels, under DDP."""

from __future__ import annotations

from typing import Any

import digits
import evidence
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from torch_geometric.data import Batch, Data
from torch_geometric.loader import DataLoader
from torch_geometric.nn import BatchNorm, GCNConv, GINConv, global_add_pool
from torch_geometric.utils import grid


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self._first = GCNConv(3, 32)
        self._norm = BatchNorm(32)
        self._second = GINConv(nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32)))
        self._scores = nn.Linear(32, 10)

    def forward(self, graphs: Batch) -> torch.Tensor:
        nodes = self._norm(self._first(graphs.x, graphs.edge_index)).relu()
        nodes = self._second(nodes, graphs.edge_index).relu()
        scores: torch.Tensor = self._scores(global_add_pool(nodes, graphs.batch) / 64)
        return scores


def dataset() -> list[Data]:
    edges, places = grid(8, 8)
    return [
        Data(x=torch.cat([pixels[:, None], places / 8], 1), edge_index=edges, y=label)
        for pixels, label in zip(*digits.dataset().tensors, strict=True)
    ]


def main() -> None:
    options = evidence.options()
    dist.init_process_group(options.backend or "gloo")
    model = DistributedDataParallel(Network())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    graphs: Any = dataset()  # a list, where PyTorch's types ask for a Dataset
    sampler: DistributedSampler[Data] = DistributedSampler(graphs)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for batch in DataLoader(graphs, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            loss = cross_entropy(model(batch), batch.y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    evidence.write(options.folder, losses, model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
