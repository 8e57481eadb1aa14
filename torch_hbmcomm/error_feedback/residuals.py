"""The residuals of error feedback, which are the sums of unsent gradients (the cache of Lee et al.
2020, equation 1). This module also chooses the part of a checkpoint that each rank loads.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch

from torch_hbmcomm.error_feedback import passes
from torch_hbmcomm.tensors import gradient_strides

SavedState = Mapping[str, Any]


class Residuals:
    """Accumulated gradients by name: flat tensors, with elements in the gradients' memory order.

    A step is accumulate() and pack() for each name, then commit().

    Args:
        dtype: the residuals' dtype; None: float32. Residuals of float64 gradients are always
            float64
        recoverable: True: roll_back() can undo a step; takes twice the memory

    Memory: one copy of the gradients. Threads: one at a time.
    """

    def __init__(self, dtype: torch.dtype | None = None, recoverable: bool = False) -> None:
        self._dtype = dtype
        self._recoverable = recoverable
        # The memory of each residual: one tensor, or two that are used alternately if recoverable.
        self._rooms: dict[str, list[torch.Tensor]] = {}
        self._held: dict[str, torch.Tensor] = {}  # absent: zeros
        # The residuals that this step has changed; None: all elements were packed.
        self._changes: dict[str, torch.Tensor | None] = {}

    @property
    def names(self) -> list[str]:
        """The names that have a residual."""
        return list(self._held)

    @property
    def empty(self) -> bool:
        return not self._held and not self._changes

    def hold(self, names: Sequence[str]) -> bool:
        """Return True if one of the names has a residual."""
        return bool(self._held) and any(name in self._held for name in names)

    def free(self) -> None:
        """Free the memory of all residuals. REQUIRES: empty."""
        self._rooms.clear()

    def accumulate(
        self,
        names: Sequence[str],
        gradients: Sequence[torch.Tensor],
        factor: float = 1.0,
        squares: bool = False,
    ) -> tuple[list[float], list[float]]:
        """Add factor * gradient to the residual of each name.

        Returns two lists, with a number for each name: the L1 sum (L2 sum if `squares`) of the new
        residual, and the L1 sum of the gradient.
        """
        before = [self._held.get(name) for name in names]
        after = [self._room(*one) for one in zip(names, gradients, before, strict=True)]
        found = passes.accumulate(gradients, before, after, factor, squares)
        self._changes.update(zip(names, after, strict=True))
        sums, sizes = found.t().tolist()
        return sums, sizes

    def accumulated(self, name: str) -> torch.Tensor:
        """Return the residual made by accumulate() in this step, flat. The caller may change it in
        place."""
        residual = self._changes[name]
        assert residual is not None, f"{name} was packed twice in a step"
        return residual

    def pack(
        self,
        names: Sequence[str],
        wire: torch.Tensor,
        factor: float = 1.0,
        parts: Sequence[slice] | None = None,
    ) -> None:
        """Move factor * the accumulated residuals into `wire`, one name after another.

        Only the errors of rounding to a narrower dtype stay in the residuals.

        Args:
            parts: for each name, the range of elements to pack, if the wire is too small for all.
                Successive calls pack the ranges of a name in ascending order. None: all elements
        """
        if not names:
            return
        residuals = [self.accumulated(name) for name in names]
        parts = [slice(residual.numel()) for residual in residuals] if parts is None else parts
        packed = [residual[part] for residual, part in zip(residuals, parts, strict=True)]
        passes.pack(packed, wire, factor, 1 / factor)
        for name, residual, part in zip(names, residuals, parts, strict=True):
            if wire.dtype.itemsize >= residual.dtype.itemsize and part.stop == residual.numel():
                self._changes[name] = None

    def commit(self) -> None:
        """End the step, and keep its changes."""
        for name, residual in self._changes.items():
            if residual is None:
                self._held.pop(name, None)
            else:
                self._held[name] = residual
        self._changes.clear()

    def roll_back(self) -> None:
        """Undo the step. REQUIRES: recoverable."""
        self._changes.clear()

    def norm(self) -> float:
        """Return the L2 norm of all residuals. A checkpoint may change their order, and the exact
        sum of squares does not depend on it."""
        norms = [float(residual.norm(dtype=torch.float64)) for residual in self._held.values()]
        return math.sqrt(math.fsum(norm * norm for norm in norms))

    def state_dict(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return copies of the residuals, each in the shape of the parameter of that name."""
        return {
            name: _shaped(residual, parameters[name]).clone()
            for name, residual in self._held.items()
        }

    def load_state_dict(
        self,
        states: Sequence[Mapping[str, torch.Tensor]],
        parameters: Mapping[str, torch.Tensor],
        names: Collection[str] = (),
    ) -> None:
        """Replace the residuals by the sum of several states. If a name or a shape differs from the
        parameters', raises ValueError and changes nothing.

        names: names that get a residual of zeros if no state has one
        """
        for state in states:
            for name, values in state.items():
                if not isinstance(values, torch.Tensor):
                    raise ValueError(f"the residual of {name} is no tensor: {values!r}")
                if name not in parameters or values.shape != parameters[name].shape:
                    shape = list(parameters[name].shape) if name in parameters else "not there"
                    raise ValueError(
                        f"the residual of {name} is {list(values.shape)} in the checkpoint, and "
                        f"the parameter is {shape} in the model"
                    )
        self._changes.clear()
        self._held.clear()
        for name in chain(*states, names):
            if name not in self._held:
                self._held[name] = self._room(name, parameters[name], None).zero_()
        for state in states:
            for name, values in state.items():
                held = self._held[name]
                _shaped(held, parameters[name]).add_(values.to(held.device))

    def _room(self, name: str, gradient: torch.Tensor, held: torch.Tensor | None) -> torch.Tensor:
        """Return memory for an accumulated gradient: the memory of `held`, unless recoverable."""
        rooms = self._rooms.setdefault(name, [])
        for room in rooms:
            if not self._recoverable or room is not held:
                return room
        wide = gradient.dtype == torch.float64
        dtype = torch.float64 if wide else self._dtype or torch.float32
        rooms.append(torch.empty(gradient.numel(), dtype=dtype, device=gradient.device))
        return rooms[-1]


def _shaped(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View a flat tensor in the shape and memory order of the gradient of `like`."""
    return flat.as_strided(like.shape, gradient_strides(like))


_KEYS = {"rank", "ranks", "names", "caches", "rule"}


class Share(NamedTuple):
    """The part of a checkpoint that one rank loads.

    states: the states whose residuals this rank adds up.
    common: any one state, for the values that are equal on all ranks.
    all: the given states.
    """

    states: Sequence[SavedState]
    common: SavedState
    all: Sequence[SavedState]


def own_share(
    given: SavedState | Sequence[SavedState],
    rank: int,
    ranks: int,
    names: Sequence[str],
    keys: Collection[str] = (),
) -> Share:
    """Choose the states that this rank loads.

    The saved states are distributed over the present ranks, so that the residuals' sum stays the
    same. Every state must have the keys in _KEYS, and `keys`.

    given: the state that this rank saved, or a sequence of the states of all ranks that saved

    Raises ValueError for incomplete states, and for states of another model, rank or number of
    ranks.
    """
    states = [given] if isinstance(given, Mapping) else list(given)
    if not states:
        raise ValueError("load_state_dict() was given no state at all")
    for state in states:
        if lacking := (_KEYS | set(keys)) - set(state):
            raise ValueError(
                f"the state lacks {', '.join(sorted(lacking))}: load the result of state_dict()"
            )
        _check_names(state["names"], names)
    states.sort(key=lambda state: int(state["rank"]))
    saved = states[0]["ranks"]
    if isinstance(given, Mapping):
        if (given["rank"], saved) != (rank, ranks):
            raise ValueError(
                f"the state is of rank {given['rank']} of {saved}, and this is rank {rank} of "
                f"{ranks}: load this rank's own state, or give the states of all {saved} ranks"
            )
        return Share([given], given, [given])
    found = [state["rank"] for state in states]
    if found != list(range(saved)):
        raise ValueError(f"states of ranks {found} were given, and {saved} ranks had saved some")
    return Share(states[rank::ranks], states[0], states)


def _check_names(found: Sequence[str], expected: Sequence[str]) -> None:
    unlike: list[Any] = sorted(set(found) ^ set(expected))
    if unlike:
        raise ValueError(
            f"the checkpoint is of another model: {len(unlike)} names are in one of them only, "
            f"such as {', '.join(unlike[:5])}"
        )
