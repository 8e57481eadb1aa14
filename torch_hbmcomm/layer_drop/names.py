"""The parameters that a state has to do with, by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from torch_hbmcomm.tensors import check_dense

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Names:
    """model: None: parameters are numbered as they come, in the first step, and cannot be saved.

    Raises TypeError and ValueError for a parameter whose gradients cannot be carried.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.known = model is not None
        self._closed = False  # whether a whole step was seen
        self._parameters: dict[str, torch.Tensor] = {}
        self._names: dict[int, str] = {}
        if model is not None:
            check_dense(model)
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    check_dtype(name, parameter.dtype)
                    self._add(name, parameter)

    def of(self, parameters: Iterable[torch.Tensor]) -> tuple[str, ...]:
        """Raises ValueError for one that is not the model's."""
        return tuple(self._name(parameter) for parameter in parameters)

    def close(self) -> bool:
        """All parameters have been seen. Whether for the first time."""
        first, self._closed = not self._closed, True
        return first

    @property
    def parameters(self) -> Mapping[str, torch.Tensor]:
        return self._parameters

    def _name(self, parameter: torch.Tensor) -> str:
        found = self._names.get(id(parameter))
        if found is None:
            if self.known or self._closed:
                raise ValueError(
                    f"a parameter of shape {list(parameter.shape)} is not of the model that this "
                    "LayerDropState works for: each model has a state of its own"
                )
            found = f"parameter {len(self._names)}"
            self._add(found, parameter)
        return found

    def _add(self, name: str, parameter: torch.Tensor) -> None:
        self._parameters[name] = parameter
        self._names[id(parameter)] = name


def check_dtype(name: str, dtype: torch.dtype) -> None:
    if dtype not in DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise TypeError(f"the gradient of {name} is {dtype}; layers are dropped of {allowed}")
