"""The model's parameters, and copies of them or of their gradients in flat tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import nn

from torch_hbmcomm.async_ddp.layout import FlatLayout, wire_dtype
from torch_hbmcomm.tensors import Orders, flat

# A flat tensor for each dtype of the parameters, in the order of this dtype's layout.
Flats = dict[torch.dtype, torch.Tensor]


class Parameters:
    """Named parameters, each of which fills a range of memory, and a layout for each dtype."""

    def __init__(self, named: Mapping[str, nn.Parameter], boxes: int) -> None:
        self.named = named
        self.smallest = min(named.values(), key=lambda one: (one.numel() == 0, one.numel()))
        self._orders = Orders()
        for name, parameter in named.items():
            self._orders.add(name, parameter)
        self._names = {id(parameter): name for name, parameter in named.items()}
        self.layouts = {
            dtype: FlatLayout(
                {n: p.numel() for n, p in named.items() if p.dtype == dtype}, dtype, boxes
            )
            for dtype in {parameter.dtype: None for parameter in named.values()}
        }

    def names(self, parameters: Sequence[torch.Tensor]) -> tuple[str, ...]:
        """Return the parameters' names. Raises ValueError for a parameter of another model."""
        try:
            return tuple(self._names[id(parameter)] for parameter in parameters)
        except KeyError:
            raise ValueError(
                "the hook was given a parameter that is not of the model which AsyncState was made "
                "for: each model has a state of its own"
            ) from None

    def check_orders(self) -> None:
        """Raise ValueError if a parameter's shape or memory order has changed."""
        for name, parameter in self.named.items():
            self._orders.check(name, parameter)

    def check_bucket(
        self, names: Sequence[str], buffer: torch.Tensor, *, arranged_again: bool
    ) -> None:
        """Raise ValueError if a parameter of a bucket has changed its shape or memory order.

        Args:
            arranged_again: True for a new bucket: raise ValueError also if a parameter's part of
                the bucket has another memory order than the parameter
        """
        at = 0
        for name in names:
            parameter = self.named[name]
            self._orders.check(name, parameter)
            if arranged_again:
                self._orders.check_bucket(name, parameter, buffer[at : at + parameter.numel()])
            at += parameter.numel()

    def bytes(self, published: bool) -> tuple[list[int], list[int]]:
        """Return two lists of the bytes that each box has to hold. The first is for the totals and,
        if `published`, for a publication. The second is for the delta buffers of one rank."""
        totals = [layout.totals for layout in self.layouts.values()]
        weights = [layout.weights for layout in self.layouts.values()]
        shared = [*totals, *totals, *weights] if published else totals
        return (
            [sum(sizes) for sizes in zip(*(one.weights_bytes for one in shared), strict=True)],
            [sum(sizes) for sizes in zip(*(one.delta_bytes for one in totals), strict=True)],
        )

    def weights(self) -> Flats:
        """Return copies of the parameters as flat tensors, in the dtypes on the wire."""
        found = self.empty()
        for values, _, parameter in self._parts(found):
            values.copy_(flat(parameter))
        return {dtype: values.to(wire_dtype(dtype)) for dtype, values in found.items()}

    def set_weights(self, weights: Flats) -> None:
        """Copy weights into the parameters."""
        for values, _, parameter in self._parts(weights):
            flat(parameter).copy_(values)

    def set_gradients(self, gradients: Flats) -> None:
        """Set each parameter's .grad. If all elements of a gradient are zero, .grad is None, and
        the optimizer does not change the parameter."""
        for values, _, parameter in self._parts(gradients):
            parameter.grad = None
            if values.any():
                parameter.grad = torch.empty_like(parameter)
                flat(parameter.grad).copy_(values)

    def by_name(self, flats: Flats) -> dict[str, torch.Tensor]:
        """Return copies of the parameters' parts of `flats`, by name, in the parameters' shapes."""
        found = {}
        for values, name, parameter in self._parts(flats):
            found[name] = torch.empty_like(parameter, dtype=values.dtype, requires_grad=False)
            flat(found[name]).copy_(values)
        return found

    def flattened(self, named: Mapping[str, torch.Tensor]) -> Flats:
        """Flatten `named`, a result of by_name(), in float64. Raises ValueError if its names or
        shapes differ from the model's."""
        if unlike := sorted(named.keys() ^ self.named.keys()):
            raise ValueError(f"checkpoint and model differ in {', '.join(unlike[:5])}")
        found = {d: torch.empty(s.count, dtype=torch.float64) for d, s in self.layouts.items()}
        for values, name, parameter in self._parts(found):
            if named[name].shape != parameter.shape:
                raise ValueError(
                    f"{name} is {list(named[name].shape)} in the checkpoint and "
                    f"{list(parameter.shape)} in the model"
                )
            like = torch.empty_like(parameter, dtype=torch.float64, requires_grad=False)
            values.copy_(flat(like.copy_(named[name])))
        return found

    def empty(self) -> Flats:
        """Return uninitialised flat tensors in the parameters' dtypes."""
        return {dtype: torch.empty(s.count, dtype=dtype) for dtype, s in self.layouts.items()}

    def _parts(self, flats: Flats) -> Iterator[tuple[torch.Tensor, str, nn.Parameter]]:
        """Yield each parameter's part of the flat tensors, its name, and the parameter."""
        self.check_orders()
        for name, parameter in self.named.items():
            yield (
                flats[parameter.dtype][self.layouts[parameter.dtype].ranges[name]],
                name,
                parameter,
            )
