"""Changes to a model or its optimizer that a parameter server refuses once it has been made."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

Undo = Callable[[], object]
Change = Callable[["Images", torch.optim.Optimizer], Undo]


class Images(nn.Module):
    """A convolution, a matrix, a shared buffer and a frozen parameter."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, bias=False)
        self.head = nn.Linear(6, 5)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        self.register_buffer("mean", torch.zeros(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.arange(parameter.numel()).view_as(parameter))

    def give(self, gradient: float = 1.0) -> None:
        for parameter in self.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.full_like(parameter, gradient)


def _channels_last(model: Images, _: torch.optim.Optimizer) -> Undo:
    weight = model.conv.weight
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return lambda: setattr(weight, "data", weight.data.contiguous())


def _data(values: Callable[[torch.Tensor], torch.Tensor]) -> Change:
    def change(model: Images, _: torch.optim.Optimizer) -> Undo:
        weight, before = model.head.weight, model.head.weight.data
        weight.grad = None
        weight.data = values(before)

        def undo() -> None:
            weight.grad = None
            weight.data = before

        return undo

    return change


def _of_other_type(model: Images, _: torch.optim.Optimizer) -> Undo:
    model.zero_grad()
    model.double()
    return model.float


def _trained_layer(model: Images, optimizer: torch.optim.Optimizer) -> Undo:
    undo = _layer(model, optimizer)
    optimizer.add_param_group({"params": model.get_submodule("more").parameters()})

    def undo_both() -> None:
        undo()
        optimizer.param_groups.pop()

    return undo_both


def _layer(model: Images, _: torch.optim.Optimizer) -> Undo:
    model.more = nn.Linear(2, 2)
    return lambda: delattr(model, "more")


def _stranger(_: Images, optimizer: torch.optim.Optimizer) -> Undo:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(3))]})
    return optimizer.param_groups.pop


def _replaced(model: Images, _: torch.optim.Optimizer) -> Undo:
    before = model.head.weight
    model.head.weight = nn.Parameter(before.detach().clone())
    return lambda: setattr(model.head, "weight", before)


def _removed(model: Images, _: torch.optim.Optimizer) -> Undo:
    before = model.head.bias
    model.head.register_parameter("bias", None)
    return lambda: setattr(model.head, "bias", before)


def _buffer(model: Images, _: torch.optim.Optimizer) -> Undo:
    before = model.mean
    model.mean = torch.zeros(7)
    return lambda: setattr(model, "mean", before)


_NOW = r"the model has parameter {} now, and had parameter {}: a parameter server shares the model"

MODEL: dict[str, tuple[Change, str]] = {
    "channels_last": (
        _channels_last,
        r"conv.weight \(float32 \[4, 3, 3, 3\], strides \[27, 1, 9, 3\]\) now, and had parameter "
        r"conv.weight \(float32 \[4, 3, 3, 3\], strides \[27, 9, 3, 1\]\): a parameter server",
    ),
    "strides": (_data(lambda it: it.t().contiguous().t()), r"head.weight .*strides \[1, 5\]\) now"),
    "gaps": (
        _data(lambda it: torch.zeros(5, 12)[:, ::2]),
        r"head.weight .*strides \[12, 2\]\) now",
    ),
    "size": (
        _data(lambda it: torch.zeros(5, 7)),
        r"head.weight \(float32 \[5, 7\], .* now, and had",
    ),
    "type": (_of_other_type, r"\(float64 .* now, and had"),
    "layer": (_layer, "parameter more.weight is new in the model"),
    "trained-layer": (_trained_layer, "parameter more.weight is new in the model"),
    "removed": (_removed, "parameter head.bias .* is not in the model any more"),
    "buffer": (_buffer, r"buffer mean \(float32 \[7\], .* now, and had"),
}
"""By name: a change of a model, and a pattern of the error's text."""

OPTIMIZER: dict[str, tuple[Change, str]] = {
    "stranger": (_stranger, "group 1 of the optimizer has a parameter now that is not the model's"),
    "replaced": (_replaced, "group 0 of the optimizer has a parameter now that is not the model's"),
}
"""By name: a change after which the optimizer is not of this model, and the error's text."""
