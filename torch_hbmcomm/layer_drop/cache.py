"""Gradients that were not sent yet, added up (Lee et al. 2020, equation 1)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from torch_hbmcomm import native


class Cache:
    """Flat tensors by name, in the order in which the gradients lie in memory.

    A step is accumulate() and pack() for each name, and commit().

    Args:
        dtype: of the cache; None: float32, for gradients of float64 float64
        recoverable: a step can be given up by roll_back(); takes twice the memory

    Memory: a gradient's, once. Threads: one at a time.
    """

    def __init__(self, dtype: torch.dtype | None = None, recoverable: bool = False) -> None:
        self._native = native.load()
        self._dtype = dtype
        self._recoverable = recoverable
        self._rooms: dict[str, list[torch.Tensor]] = {}  # memory: one room, or two in turn
        self._held: dict[str, torch.Tensor] = {}  # what is in the cache; absent: nothing
        self._changes: dict[str, torch.Tensor | None] = {}  # that this step makes

    @property
    def names(self) -> list[str]:
        """Of what is cached."""
        return list(self._held)

    @property
    def empty(self) -> bool:
        return not self._held and not self._changes

    def accumulate(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        factor: float = 1.0,
        squares: bool = False,
    ) -> tuple[list[float], list[bool]]:
        """Adds factor * gradient. Returns of each name the moment, the sum of absolute values (or
        of squares) of what is cached now, and whether the gradient is zero everywhere."""
        before = [self._held.get(name) for name in names]
        after = [self._room(*one) for one in zip(names, gradients, before, strict=True)]
        found = self._native.layerdrop_accumulate(list(gradients), before, after, factor, squares)
        self._changes.update(zip(names, after, strict=True))
        moments, nonzero = found.t().tolist()
        return moments, [flag == 0 for flag in nonzero]

    def pack(
        self,
        names: Sequence[str],
        wire: torch.Tensor,
        factor: float = 1.0,
        parts: Sequence[slice] | None = None,
    ) -> None:
        """Puts factor times what was accumulated under the names into `wire`, one after another.
        It is no longer cached, but for what rounding to a narrower type left.

        parts: where the wire is too small for all: these elements of each. The parts of one name
        come in order, until all of it was packed.
        """
        if not names:
            return
        caches = [self._changed(name) for name in names]
        parts = [slice(cache.numel()) for cache in caches] if parts is None else parts
        packed = [cache[part] for cache, part in zip(caches, parts, strict=True)]
        self._native.layerdrop_pack(packed, wire, factor, 1 / factor)
        for name, cache, part in zip(names, caches, parts, strict=True):
            if wire.dtype.itemsize >= cache.dtype.itemsize and part.stop == cache.numel():
                self._changes[name] = None

    def commit(self) -> None:
        """The step counts."""
        for name, cache in self._changes.items():
            if cache is None:
                self._held.pop(name, None)
            else:
                self._held[name] = cache
        self._changes.clear()

    def roll_back(self) -> None:
        """The cache is as it was before the step. REQUIRES: recoverable."""
        self._changes.clear()

    def norm(self) -> float:
        """The L2 norm of all that is cached."""
        if not self._held:
            return 0.0
        return float(
            torch.stack([cache.norm(dtype=torch.float64) for cache in self._held.values()]).norm()
        )

    def state_dict(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies of what is cached, each in the shape of the parameter of that name."""
        return {
            name: _shaped(cache, parameters[name]).clone() for name, cache in self._held.items()
        }

    def load_state_dict(
        self, states: Sequence[Mapping[str, torch.Tensor]], parameters: Mapping[str, torch.Tensor]
    ) -> None:
        """The sum of several states replaces what is cached. Raises ValueError for a name or a
        shape that is not the parameters'; then nothing has changed."""
        for state in states:
            for name, values in state.items():
                if name not in parameters or values.shape != parameters[name].shape:
                    shape = list(parameters[name].shape) if name in parameters else "not there"
                    raise ValueError(
                        f"the cache of {name} is {list(values.shape)} in the checkpoint, and the "
                        f"parameter is {shape} in the model"
                    )
        self._changes.clear()
        self._held.clear()
        for state in states:
            for name, values in state.items():
                parameter = parameters[name]
                held = self._held.get(name)
                if held is None:
                    held = self._room(name, parameter, None).zero_()
                    self._held[name] = held
                _shaped(held, parameter).add_(values)

    def _room(self, name: str, gradient: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        """Where the accumulated gradient goes: over what is held, if that need not be kept."""
        rooms = self._rooms.setdefault(name, [])
        for room in rooms:
            if not self._recoverable or room is not held:
                return room
        wide = gradient.dtype == torch.float64
        dtype = torch.float64 if wide else self._dtype or torch.float32
        rooms.append(torch.empty(gradient.numel(), dtype=dtype))
        return rooms[-1]

    def _changed(self, name: str) -> torch.Tensor:
        cache = self._changes[name]
        assert cache is not None, f"{name} was packed twice in a step"
        return cache


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """A view of a flat tensor that lies in memory as `like` does, if that has no gaps."""
    strides = torch.empty_like(like).stride()
    return flat.as_strided(like.shape, strides)


def check_names(found: Sequence[str], expected: Sequence[str]) -> None:
    """Of a checkpoint and of a model. Raises ValueError saying which differ."""
    unlike: list[Any] = sorted(set(found) ^ set(expected))
    if unlike:
        raise ValueError(
            f"the checkpoint is of another model: {len(unlike)} names are in one of them only, "
            f"such as {', '.join(unlike[:5])}"
        )
