"""Packs small whole numbers into int32, so that an allreduce adds up the numbers of all ranks."""

from __future__ import annotations

import torch

_MOST = 2**31 - 1  # the largest int32


class Packing:
    """Numbers from -levels to levels, as digits of integers of int32.

    A digit is a number plus `levels`. The base is larger than the sum of such digits over the
    ranks. So no digit carries into the next one, and the sum of the ranks' integers has the sums of
    their digits. REQUIRES: 2 * levels * ranks < 2**31
    """

    dtype = torch.int32

    def __init__(self, levels: int, ranks: int) -> None:
        self.levels = levels
        self.ranks = ranks
        self._base = 2 * levels * ranks + 1
        self._digits = 1  # of an integer
        while self._base ** (self._digits + 1) - 1 <= _MOST:
            self._digits += 1

    @property
    def element_bytes(self) -> float:
        """The bytes of a number."""
        return self.dtype.itemsize / self._digits

    def numel(self, count: int) -> int:
        """Return the number of integers that have `count` numbers."""
        return -(-count // self._digits)

    def pack(self, numbers: torch.Tensor, wire: torch.Tensor) -> None:
        """Write numbers (int32, flat) to the integers of the wire."""
        count = wire.numel()
        padding = count * self._digits - numbers.numel()
        digits = torch.nn.functional.pad(numbers + self.levels, (0, padding)).view(-1, count)
        wire.zero_()
        for digit in digits:
            wire.mul_(self._base).add_(digit)

    def sums(self, wire: torch.Tensor, count: int) -> torch.Tensor:
        """Return the sums over the ranks of `count` numbers, int32, from the sum of the wires."""
        rest = wire.clone()
        digits = torch.empty(self._digits, wire.numel(), dtype=self.dtype, device=wire.device)
        for digit in reversed(digits.unbind()):
            torch.remainder(rest, self._base, out=digit)
            rest.div_(self._base, rounding_mode="floor")
        return digits.view(-1)[:count] - self.levels * self.ranks
