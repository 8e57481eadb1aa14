"""A model as it was when its parameter server was made, and the errors if it has changed since."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import nn

from torch_hbmcomm.parameter_server.packing import TensorSpec

_REMEDY = (
    "a parameter server shares the model as it was when the server was made. Undo the change, or "
    "make the server after it, on every worker"
)


class SharedModel:
    """Finds the tensors of a model by name, because modules and users may replace tensors.

    specs: all of the model's parameters and buffers, as they were at the start
    optimizer: find() checks that it has only parameters of the model; None: no check
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        specs: Sequence[TensorSpec],
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._specs = specs
        self._names = {spec.name for spec in specs}
        self._right: dict[str, tuple[object, ...]] = {}  # dtype, shape and strides that fit

    def find(self, everything: bool = False) -> list[torch.Tensor]:
        """Return the tensors in the order of the specs. Constants are replaced by empty tensors,
        unless `everything`. Changes nothing.

        Raises RuntimeError, naming the tensor, if a tensor is not as its spec says, or if a
        parameter is new or no longer frozen. Raises it also if the optimizer has a parameter that
        is not the model's.
        """
        parameters = dict(self._model.named_parameters())
        for name in parameters:
            if name not in self._names:
                raise RuntimeError(f"parameter {name} is new in the model: {_REMEDY}")
        found: dict[str, torch.Tensor] = {**parameters, **dict(self._model.named_buffers())}
        tensors = []
        for spec in self._specs:
            if spec.kind == "constant":
                self._check_frozen(spec, parameters.get(spec.name))
            if spec.kind != "constant" or everything:
                tensors.append(self._same(spec, found.get(spec.name)))
            else:
                tensors.append(torch.empty(0))
        self._check_optimizer(parameters)
        return tensors

    def _check_frozen(self, spec: TensorSpec, parameter: nn.Parameter | None) -> None:
        if parameter is not None and parameter.requires_grad:
            raise RuntimeError(
                f"parameter {spec.name} was frozen when the parameter server was made, and now "
                "requires a gradient: make the server after unfreezing, on every worker"
            )

    def _same(self, spec: TensorSpec, tensor: torch.Tensor | None) -> torch.Tensor:
        """Return the tensor, if it is as the spec says."""
        if tensor is None:
            raise RuntimeError(f"{spec} is not in the model any more: {_REMEDY}")
        if tensor.layout != torch.strided or not tensor.is_cpu:
            raise RuntimeError(f"{spec} is {tensor.layout} on {tensor.device} now: {_REMEDY}")
        geometry = tensor.dtype, tensor.shape, tensor.stride()
        if geometry != self._right.get(spec.name):
            now = TensorSpec.of(spec.name, tensor, spec.kind)
            if now != spec:
                raise RuntimeError(f"the model has {now} now, and had {spec}: {_REMEDY}")
            self._right[spec.name] = geometry
        return tensor

    def _check_optimizer(self, parameters: dict[str, nn.Parameter]) -> None:
        if self._optimizer is None:
            return
        if (index := _group_with_a_stranger(parameters.values(), self._optimizer)) is not None:
            raise RuntimeError(
                f"group {index} of the optimizer has a parameter now that is not the model's, and "
                f"would not be shared: {_REMEDY}"
            )


def check_optimizer(owner: str, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Raise ValueError if there is no optimizer, or if it has a parameter that is not the model's.

    owner: the name of the optimizer's owner, for the error
    """
    if optimizer is None:
        raise ValueError(f"{owner} needs an optimizer, and got None")
    if (index := _group_with_a_stranger(model.parameters(), optimizer)) is not None:
        raise ValueError(
            f"group {index} of the optimizer has a parameter that is not the model's: it would "
            "not be shared"
        )


def _group_with_a_stranger(
    parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer
) -> int | None:
    """Return the index of the optimizer's first group with a parameter that is not in `parameters`;
    None if there is no such group."""
    own = {id(parameter) for parameter in parameters}
    for index, group in enumerate(optimizer.param_groups):
        if any(id(parameter) not in own for parameter in group["params"]):
            return index
    return None
