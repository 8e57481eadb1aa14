"""ResNet-50 (He et al. 2016) with 161 parameter tensors. The 3x3 convolutions have the stride."""

from __future__ import annotations

import torch
from torch import nn

WIDTH = 64
PARAMETERS = 25_557_032  # at that width
_BLOCKS = (3, 4, 6, 3)
_EXPANSION = 4
_CLASSES = 1000


def resnet50(width: int = WIDTH) -> nn.Module:
    """Make the net. width: channels of the first stage; every width has the same layers."""
    stages: list[nn.Module] = []
    channels = width
    for number, blocks in enumerate(_BLOCKS):
        inner = width << number
        for block in range(blocks):
            stride = 2 if number > 0 and block == 0 else 1
            stages.append(_Bottleneck(channels, inner, stride))
            channels = inner * _EXPANSION
    return nn.Sequential(
        _convolution(3, width, 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1),
        *stages,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, _CLASSES),
    )  # fmt: skip


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outer = inner * _EXPANSION
        self.body = nn.Sequential(
            _convolution(channels, inner, 1), nn.ReLU(inplace=True),
            _convolution(inner, inner, 3, stride), nn.ReLU(inplace=True),
            _convolution(inner, outer, 1),
        )  # fmt: skip
        same = channels == outer and stride == 1
        self.shortcut = nn.Identity() if same else _convolution(channels, outer, 1, stride)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(images) + self.shortcut(images))


def _convolution(channels: int, outer: int, size: int, stride: int = 1) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(channels, outer, size, stride, size // 2, bias=False), nn.BatchNorm2d(outer)
    )
