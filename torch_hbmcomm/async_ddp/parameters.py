"""The model's parameters, and flat tensors in the order of their spaces."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from torch_hbmcomm.async_ddp.places import Space
from torch_hbmcomm.async_ddp.spread import wire_dtype
from torch_hbmcomm.parameter_server.tensors import flat

Flats = dict[torch.dtype, torch.Tensor]  # by the parameters' dtype, in the order of its space


class Parameters:
    """Named parameters whose elements fill a range of memory, a space for each dtype."""

    def __init__(self, named: Mapping[str, nn.Parameter], boxes: int) -> None:
        self._named = named
        self.smallest = min(named.values(), key=torch.Tensor.numel)
        self._names = {id(parameter): name for name, parameter in named.items()}
        self.spaces = {
            dtype: Space({n: p.numel() for n, p in named.items() if p.dtype == dtype}, boxes)
            for dtype in {parameter.dtype: None for parameter in named.values()}
        }

    def names(self, parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Raises ValueError for one that is not among them."""
        try:
            return tuple(self._names[id(parameter)] for parameter in parameters)
        except KeyError:
            raise ValueError(
                "the hook was given a parameter that is not of the model which AsyncState was made "
                "for: each model has a state of its own"
            ) from None

    def bytes(self, ranks: int, published: bool) -> int:
        """That each box has to have, for totals, the ranks' slots, and a publication."""
        return sum(
            space.room * (8 + ranks * wire_dtype(dtype).itemsize)
            + (space.room * (8 + wire_dtype(dtype).itemsize) if published else 0)
            for dtype, space in self.spaces.items()
        )

    def weights(self) -> Flats:
        """As they travel."""
        found = self.empty()
        for place, _, parameter in self._places(found):
            place.copy_(flat(parameter))
        return {dtype: values.to(wire_dtype(dtype)) for dtype, values in found.items()}

    def set_weights(self, weights: Flats) -> None:
        for place, _, parameter in self._places(weights):
            flat(parameter).copy_(place)

    def set_gradients(self, gradients: Flats) -> None:
        """Those that are zero are None: the optimizer leaves their parameters alone."""
        for place, _, parameter in self._places(gradients):
            parameter.grad = None
            if place.any():
                parameter.grad = torch.empty_like(parameter)
                flat(parameter.grad).copy_(place)

    def by_name(self, flats: Flats) -> dict[str, torch.Tensor]:
        """In the parameters' shapes."""
        found = {}
        for place, name, parameter in self._places(flats):
            found[name] = torch.empty_like(parameter, dtype=place.dtype, requires_grad=False)
            flat(found[name]).copy_(place)
        return found

    def flattened(self, named: Mapping[str, torch.Tensor]) -> Flats:
        """The reverse of by_name(), in float64. Raises ValueError for what does not fit."""
        if unlike := sorted(named.keys() ^ self._named.keys()):
            raise ValueError(f"checkpoint and model differ in {', '.join(unlike[:5])}")
        found = {d: torch.empty(s.count, dtype=torch.float64) for d, s in self.spaces.items()}
        for place, name, parameter in self._places(found):
            if named[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} is {list(named[name].shape)} in the checkpoint and "
                    f"{list(parameter.shape)} in the model"
                )
            like = torch.empty_like(parameter, dtype=torch.float64, requires_grad=False)
            place.copy_(flat(like.copy_(named[name])))
        return found

    def empty(self) -> Flats:
        """In the parameters' dtypes."""
        return {dtype: torch.empty(s.count, dtype=dtype) for dtype, s in self.spaces.items()}

    def _places(self, flats: Flats) -> Iterator[tuple[torch.Tensor, str, nn.Parameter]]:
        """Of each parameter the place in the flat tensors, the name, and itself."""
        for name, parameter in self._named.items():
            yield flats[parameter.dtype][self.spaces[parameter.dtype].ranges[name]], name, parameter
