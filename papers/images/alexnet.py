"""AlexNet, in the form with one tower: Krizhevsky 2014, One weird trick."""

from __future__ import annotations

from torch import nn

CLASSES = 1000
SHAPE = (3, 224, 224)  # of an image
_CONVOLUTIONS = (  # channels in and out, kernel, stride, padding, and whether a pooling follows
    (3, 64, 11, 4, 2, True),
    (64, 192, 5, 1, 2, True),
    (192, 384, 3, 1, 1, False),
    (384, 256, 3, 1, 1, False),
    (256, 256, 3, 1, 1, True),
)
_FEATURES = 256 * 6 * 6
_WIDTH = 4096


def alexnet() -> nn.Module:
    """Make AlexNet, with 61.1 million parameters."""
    layers: list[nn.Module] = []
    for inputs, outputs, kernel, stride, padding, pooled in _CONVOLUTIONS:
        layers += [nn.Conv2d(inputs, outputs, kernel, stride, padding), nn.ReLU()]
        layers += [nn.MaxPool2d(3, stride=2)] if pooled else []
    layers.append(nn.Flatten())
    for inputs in (_FEATURES, _WIDTH):
        layers += [nn.Dropout(), nn.Linear(inputs, _WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(_WIDTH, CLASSES))
