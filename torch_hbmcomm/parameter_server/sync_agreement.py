"""Before the first exchange: all ranks must have the same model and the same terms."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.layer_drop.names import check_dtype
from torch_hbmcomm.layer_drop.terms import LayerDrop
from torch_hbmcomm.parameter_server import layout
from torch_hbmcomm.parameter_server.tensors import described

BUFFERS = ("shared", "local")


@dataclass(frozen=True)
class Terms:
    """What the caller chose; the same on every rank."""

    server: int
    dedicated: bool
    buffers: str
    push_every: int
    drop: LayerDrop | None = None

    def trouble(self, ranks: int) -> str | None:
        """What is wrong with them in a group of so many ranks."""
        if not 0 <= self.server < ranks:
            return f"server={self.server} is no rank of the group, which has ranks 0 to {ranks - 1}"
        if self.dedicated and ranks == 1:
            return "dedicated=True leaves a group of 1 rank no worker; start 2 ranks or more"
        if self.buffers not in BUFFERS:
            return f"buffers={self.buffers!r} is none of {', '.join(BUFFERS)}"
        if self.push_every < 1:
            return f"push_every={self.push_every}; it is a number of steps, at least 1"
        if not isinstance(self.drop, LayerDrop | None):
            return f"drop={self.drop!r} is no hbmcomm.LayerDrop"
        return None


@dataclass(frozen=True)
class _Rank:
    """What a rank tells the others: that it cannot take part, or what it has."""

    trouble: str | None
    terms: Terms
    tensors: tuple[layout.Tensor, ...]


def agree(
    group: dist.ProcessGroup,
    terms: Terms,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Collective. Raises ValueError, on every rank alike, naming the rank and what is wrong."""
    ranks: list[_Rank | None] = [None] * group.size()
    dist.all_gather_object(ranks, _describe(group, terms, model, optimizer), group=group)
    everyone = [rank for rank in ranks if rank is not None]
    for number, rank in enumerate(everyone):
        if rank.trouble is not None:
            raise ValueError(f"rank {number}: {rank.trouble}")
    first = everyone[0]
    for number, rank in enumerate(everyone):
        difference = _terms_differ(rank.terms, first.terms) or _tensors_differ(
            rank.tensors, first.tensors
        )
        if difference is not None:
            ours, theirs = difference
            raise ValueError(
                f"rank {number} has {ours}, rank 0 has {theirs}; a parameter server needs the same "
                "on every rank"
            )


def _describe(
    group: dist.ProcessGroup,
    terms: Terms,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> _Rank:
    trouble = terms.trouble(group.size())
    if trouble is None and group.rank() == terms.server:
        trouble = _optimizer_trouble(model, optimizer)
    if trouble is not None:
        return _Rank(trouble, terms, ())
    try:
        if terms.drop is not None:
            for name, parameter in model.named_parameters():
                check_dtype(name, parameter.dtype)
        return _Rank(None, terms, tuple(_described(model)))
    except (TypeError, ValueError) as error:
        return _Rank(str(error), terms, ())


def _described(model: nn.Module) -> Iterator[layout.Tensor]:
    tensors: dict[str, Iterable[tuple[str, torch.Tensor]]] = {
        "parameter": model.named_parameters(),
        "buffer": model.named_buffers(),
    }
    for kind, named in tensors.items():
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise ValueError(f"{kind} {name} has no shape yet; run the model on an input first")
            yield described(name, tensor, kind)


def _optimizer_trouble(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> str | None:
    if optimizer is None:
        return "the server needs an optimizer, and got None"
    known = set(model.parameters())
    strangers = sum(
        parameter not in known for group in optimizer.param_groups for parameter in group["params"]
    )
    if strangers:
        return (
            f"{strangers} parameters of the optimizer are not the model's, which alone are sent; "
            "put them into the model"
        )
    return None


def _terms_differ(ours: Terms, theirs: Terms) -> tuple[str, str] | None:
    for field in fields(Terms):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            return f"{field.name}={mine!r}", f"{field.name}={other!r}"
    return None


def _tensors_differ(
    ours: Sequence[layout.Tensor], theirs: Sequence[layout.Tensor]
) -> tuple[str, str] | None:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return str(mine), str(other)
    if len(ours) != len(theirs):
        return f"{len(ours)} parameters and buffers", f"{len(theirs)}"
    return None
