"""The tensors that a rank communicates with."""

from collections.abc import Callable
from functools import cached_property

import torch


class Buffers:
    """Made on first use, and shared by all contenders that communicate from this kind of memory.

    They hold zeros that were written, so that reducing in place never leaves the ordinary numbers
    and no two pages are the kernel's one zero page.

    empty: `torch.empty`, `torch_hbmcomm.memory.empty`, or the like.
    """

    def __init__(self, empty: Callable[..., torch.Tensor], size: int, dtype: str, ranks: int):
        self._empty = empty
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._size = size
        self._ranks = ranks
        self._made: list[torch.Tensor] = []

    @cached_property
    def whole(self) -> torch.Tensor:
        """All `size` bytes."""
        return self._zeros(self._size)

    @cached_property
    def other(self) -> torch.Tensor:
        """As large as `whole`, for a collective with two such sides."""
        return self._zeros(self._size)

    @cached_property
    def share(self) -> torch.Tensor:
        """One rank's equal part of `whole`, elsewhere."""
        return self._zeros(self._size // self._ranks)

    def shares(self) -> list[torch.Tensor]:
        """`whole`, as one view for each rank."""
        return list(self.whole.chunk(self._ranks))

    def fill(self, value: int) -> None:
        for tensor in self._made:
            tensor.fill_(value)

    def _zeros(self, size: int) -> torch.Tensor:
        tensor = self._empty(size // self._dtype.itemsize, dtype=self._dtype).fill_(0)
        self._made.append(tensor)
        return tensor
