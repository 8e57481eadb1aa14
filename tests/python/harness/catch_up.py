"""A second implementation of the step that makes up for the steps that a block missed."""

from __future__ import annotations

from typing import Any

import torch

RATE = 0.01
"""The learning rate."""


class Reference:
    """Takes the steps of one block that waited k steps one by one.

    Adam gets the mean gradient in each step. SGD gets the sum in the first one. Its momentum from
    before decays, and does not move the block until the last step.
    """

    def __init__(self, values: torch.Tensor, settings: dict[str, Any]) -> None:
        self.values = values
        self._settings = settings
        self._first, self._second, self._most = torch.zeros(3, *values.shape).double()

    def catch_up(self, total: torch.Tensor, k: int, step: int) -> None:
        """total: the sum of the last k gradients. step: the number of this step, from 1."""
        mean = -total / k if self._settings.get("maximize") else total / k
        decay = self._settings.get("weight_decay", 0.01 if self._adam_w else 0)
        if not self._adam_w:
            mean = mean + decay * self.values
        if "momentum" in self._settings:
            self.values = self.values - RATE * self._momentum(k * mean, k)
            return
        move = self._adam(mean, k, step)
        if self._adam_w:
            move = move + RATE * decay * self.values
        self.values = self.values - k * move

    @property
    def _adam_w(self) -> bool:
        return self._settings["kind"] is torch.optim.AdamW

    def _momentum(self, total: torch.Tensor, k: int) -> torch.Tensor:
        rate: float = self._settings["momentum"]
        gain = 1 - self._settings.get("dampening", 0) if self._first.any() else 1  # as torch's SGD
        if rate == 0:
            return total
        nesterov = self._settings.get("nesterov")
        before = rate**k * self._first
        new, moves = torch.zeros_like(total), torch.zeros_like(total)
        for step in range(k):
            new = rate * new + (0 if step else gain * total)
            moves += rate * new if nesterov else new
        self._first = before + new
        old: torch.Tensor = total + rate * before if nesterov else before
        return moves + old

    def _adam(self, mean: torch.Tensor, k: int, step: int) -> torch.Tensor:
        for _ in range(k):
            self._first = 0.9 * self._first + 0.1 * mean
            self._second = 0.999 * self._second + 0.001 * k * mean.square()
        second = self._second
        if self._settings.get("amsgrad"):
            self._most = second = torch.maximum(self._most, second)
        root = (second / (1 - 0.999**step)).sqrt() + 1e-8
        move: torch.Tensor = RATE * self._first / (1 - 0.9**step) / root
        return move
