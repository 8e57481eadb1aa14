"""A small network that recognises handwritten digits, which the programs train."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

IMAGES = 512  # of 8 x 8 pixels from 0 to 16


def dataset() -> TensorDataset:
    images, labels = load_digits(return_X_y=True)
    pixels = torch.tensor(images[:IMAGES], dtype=torch.float32) / 16
    return TensorDataset(pixels, torch.tensor(labels[:IMAGES]))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
