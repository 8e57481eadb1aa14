"""Blocks of a flat tensor: reads them into one tensor, and writes them back."""

from __future__ import annotations

import torch


class Rows:
    """Some blocks of a tensor of `numel` elements. The last block of the tensor may be shorter.

    indices: the blocks, int64 in ascending order, on the tensor's device
    size: elements of a block
    """

    def __init__(self, indices: torch.Tensor, numel: int, size: int) -> None:
        self._size = size
        self._full = numel // size  # blocks of `size` elements
        self._tail = numel % size  # elements of the last block, if it is shorter
        has_tail = bool(self._tail) and indices.numel() > 0 and int(indices[-1]) == self._full
        self._indices = indices[:-1] if has_tail else indices
        self._has_tail = has_tail
        self.numel = self._indices.numel() * size + (self._tail if has_tail else 0)

    @property
    def counts(self) -> torch.Tensor:
        """The number of elements of each block, int64."""
        found = torch.full_like(self._indices, self._size)
        return torch.cat([found, found.new_tensor([self._tail])]) if self._has_tail else found

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """Return the elements of the blocks, flat, one block after another."""
        body, tail = self._cut(flat)
        rows = body.index_select(0, self._indices).view(-1)
        return torch.cat([rows, tail]) if self._has_tail else rows

    def put(self, flat: torch.Tensor, values: torch.Tensor) -> None:
        """Write the elements of the blocks, as take() returns them."""
        body, tail = self._cut(flat)
        end = self._indices.numel() * self._size
        body.index_copy_(0, self._indices, values[:end].view(-1, self._size))
        if self._has_tail:
            tail.copy_(values[end:])

    def spread(self, values: torch.Tensor) -> torch.Tensor:
        """Return the value of each element's block. values: a value for each of the blocks"""
        end = self._indices.numel()
        body = values[:end].repeat_interleave(self._size)
        return torch.cat([body, values[end:].expand(self._tail)]) if self._has_tail else body

    def _cut(self, flat: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = self._full * self._size
        return flat[:end].view(self._full, self._size), flat[end:]

    @staticmethod
    def norms(flat: torch.Tensor, size: int) -> torch.Tensor:
        """Return the L2 norm of each block of a flat tensor, float32 or wider."""
        dtype = torch.promote_types(flat.dtype, torch.float32)
        end = flat.numel() // size * size
        found: torch.Tensor = torch.linalg.vector_norm(
            flat[:end].view(-1, size), dim=1, dtype=dtype
        )
        if end == flat.numel():
            return found
        last = torch.linalg.vector_norm(flat[end:], dtype=dtype)
        return torch.cat([found, last.view(1)])
