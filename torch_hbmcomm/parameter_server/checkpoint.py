"""Checks of a checkpoint, and its loading into a model: whole or not at all."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_COUNTERS = {"ParameterServer": "steps", "SyncParameterServer": "updates"}  # keys of a state


def check_kind(state: object, owner: str, right: str) -> None:
    """Raise TypeError for a state that is no mapping, ValueError for a state of the other class.

    owner: the name of the class that loads the state. right: a description of the state that it
    can load, for the errors
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a mapping, not {type(state).__name__}; load {right}")
    for kind, counter in _COUNTERS.items():
        if counter in state and _COUNTERS[owner] not in state:
            raise ValueError(f"the state is of a {kind}, and this is a {owner}; load {right}")


def part(state: Mapping[str, Any], key: str, right: str) -> Any:
    """Return state[key]. Raises ValueError if there is none. right: as in check_kind()"""
    if key not in state:
        raise ValueError(f"the state has no {key!r}; load {right}")
    return state[key]


def count(state: Mapping[str, Any], key: str, right: str) -> int:
    """Return state[key], which must be a number of steps or updates, from 0 up. Otherwise raises
    ValueError. right: as in check_kind()"""
    value = part(state, key, right)
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if number < 0:
        raise ValueError(f"the state's {key!r} is {value!r}, and no number of steps; load {right}")
    return number


@contextmanager
def restored_on_error(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> Iterator[None]:
    """Restore the state of the model and of the optimizer if the block raises.

    Needs memory for a copy of the model. The block may load a state into the optimizer, but must
    not step it.
    """
    before = {name: tensor.detach().clone() for name, tensor in _tensors(model)}
    optimizers = None if optimizer is None else optimizer.state_dict()
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for name, tensor in _tensors(model):
                tensor.copy_(before[name])
        if optimizer is not None and optimizers is not None:
            optimizer.load_state_dict(optimizers)
        raise


def _tensors(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()
