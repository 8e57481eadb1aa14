"""The loop over steps of the programs whose library has no trainer."""

from __future__ import annotations

from collections.abc import Iterable

import torch


def train(optimizer: torch.optim.Optimizer, losses: Iterable[torch.Tensor]) -> list[float]:
    """Do a step for each loss, before the iterator computes the next, and return the losses."""
    values = []
    for loss in losses:
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        values.append(loss.item())
    return values
