"""Scikit-learn's handwritten digits, for workers that share the training images."""

from collections.abc import Iterator

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor, nn


class Digits:
    """The share of one worker in the handwritten digits.

    steps: number of this worker's batches in an epoch.
    """

    def __init__(self, rank: int, world: int, batch: int) -> None:
        self._rank, self._world, self._batch = rank, world, batch
        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        split = train_test_split(images, torch.tensor(labels), test_size=0.2, random_state=0,
                                 stratify=labels)  # fmt: skip
        self._images, self._test_images, self._labels, self._test_labels = split
        self.steps = len(self._labels) // (batch * world)

    def batches(self, shuffling: torch.Generator) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield this worker's images and labels of an epoch. `shuffling` alone sets the order."""
        shuffled = torch.randperm(len(self._labels), generator=shuffling)
        mine = shuffled[self._rank :: self._world]
        for step in range(self.steps):
            chosen = mine[step * self._batch : (step + 1) * self._batch]
            yield self._images[chosen], self._labels[chosen]

    def accuracy(self, model: nn.Module) -> float:
        """Return the percentage of the test images that the model recognises."""
        with torch.no_grad():
            right = model(self._test_images).argmax(dim=1) == self._test_labels
        return 100 * float(right.double().mean())
