"""Messages by which the ranks of a SyncParameterServer agree before they send tensors.

At the start the ranks compare their models and configs. In each round they compare their calls, and
tell each other which parameters have gradients.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import torch
import torch.distributed as dist
from torch import nn

from torch_hbmcomm.agreement import together
from torch_hbmcomm.error_feedback.buckets import check_dtype
from torch_hbmcomm.parameter_server.config import SyncConfig
from torch_hbmcomm.parameter_server.packing import TensorSpec
from torch_hbmcomm.parameter_server.shared_model import check_optimizer
from torch_hbmcomm.tensors import check_fills_memory

_NONE = -1


def agree(
    group: dist.ProcessGroup,
    config: SyncConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
) -> Sequence[TensorSpec]:
    """Check that all ranks have the same model and config. Collective. Returns the model's
    parameters, then its buffers.

    Raises ValueError on every rank, naming a rank and the mismatch. If a rank finds its own model
    or arguments wrong, raises the errors of together().
    """

    def introduce() -> tuple[SyncConfig, tuple[TensorSpec, ...]]:
        config.check(group.size())
        if group.rank() == config.server:
            check_optimizer("the server", model, optimizer)
        if config.drop is not None:
            for name, parameter in model.named_parameters():
                check_dtype(name, parameter.dtype)
        return config, tuple(_specs(model))

    introductions = together(group, introduce, "a SyncParameterServer")
    first_config, first_tensors = introductions[0]
    for rank, (other, tensors) in enumerate(introductions):
        mismatch = _config_mismatch(other, first_config) or _tensor_mismatch(tensors, first_tensors)
        if mismatch is not None:
            ours, theirs = mismatch
            raise ValueError(
                f"rank {rank} has {ours}, rank 0 has {theirs}; a parameter server needs the same "
                "on every rank"
            )
    return first_tensors


def _specs(model: nn.Module) -> Iterator[TensorSpec]:
    tensors: dict[str, Iterable[tuple[str, torch.Tensor]]] = {
        "parameter": model.named_parameters(),
        "buffer": model.named_buffers(),
    }
    for kind, named in tensors.items():
        for name, tensor in named:
            if nn.parameter.is_lazy(tensor):
                raise ValueError(f"{kind} {name} has no shape yet; run the model on an input first")
            check_fills_memory(kind, name, tensor)
            yield TensorSpec.of(name, tensor, kind)


def _config_mismatch(ours: SyncConfig, theirs: SyncConfig) -> tuple[str, str] | None:
    for field in fields(SyncConfig):
        mine, other = getattr(ours, field.name), getattr(theirs, field.name)
        if mine != other:
            return f"{field.name}={mine!r}", f"{field.name}={other!r}"
    return None


def _tensor_mismatch(
    ours: Sequence[TensorSpec], theirs: Sequence[TensorSpec]
) -> tuple[str, str] | None:
    for mine, other in zip(ours, theirs, strict=False):
        if mine != other:
            return str(mine), str(other)
    if len(ours) != len(theirs):
        return f"{len(ours)} parameters and buffers", f"{len(theirs)}"
    return None


class SyncCall(IntEnum):
    """The call of a rank in a round."""

    FOLLOW = 0  # joins the others' call: a serving server, or a worker that has closed
    STEP = 1
    PULL = 2
    LOAD = 3
    FLUSH = 4  # sends the residuals of layer dropping, once no rank calls anything else


_UPDATES = (SyncCall.STEP, SyncCall.FLUSH)
_METHODS = {SyncCall.STEP: "step()", SyncCall.PULL: "pull()", SyncCall.LOAD: "load_state_dict()"}


@dataclass(frozen=True)
class Offer:
    """A rank's contribution to a round. A parameter is given by its index; None: no parameter.

    batches: steps whose gradients the rank has added up; 0 for a rank that only follows
    changed: the error, if the model is not as it was at the start
    sparse: the first parameter whose gradient is sparse
    broken: the first parameter whose gradient is not finite
    has_gradient: for each parameter, True if it has a gradient on this rank
    """

    call: SyncCall
    batches: int
    changed: str | None
    sparse: int | None
    broken: int | None
    has_gradient: Sequence[bool]


@dataclass(frozen=True)
class SyncRound:
    """The common action of all ranks of the group.

    call: FOLLOW when every rank only follows; STEP and FLUSH are updates
    workers: the ranks whose gradients the update averages
    batches: the sum of the workers' batches; 0 for FLUSH
    parameters: indices of parameters that have a gradient on some worker
    broken: (rank, parameter) of the first gradient that is not finite
    """

    call: SyncCall
    workers: tuple[int, ...]
    batches: int
    parameters: tuple[int, ...]
    broken: tuple[int, int] | None


def meet(group: dist.ProcessGroup, server: int, names: Sequence[str], offer: Offer) -> SyncRound:
    """Exchange offers, and derive the common action. Collective.

    names: the parameters' names, by index

    Raises, on every rank:
        TypeError: a gradient is sparse
        RuntimeError: ranks call different methods, workers load without the server, or a model has
            changed
    """
    # A row is the call and the numbers of the offer, then a flag for each parameter.
    changed = offer.changed is not None
    lead = [offer.call, offer.batches, changed, _index(offer.sparse), _index(offer.broken)]
    row = torch.tensor([*lead, *offer.has_gradient], dtype=torch.int64)
    table = torch.empty((group.size(), row.numel()), dtype=torch.int64)
    dist.all_gather(list(table), row, group=group)
    calls, batches, changes, sparse, broken = table[:, : len(lead)].t().tolist()
    call = _common_call([SyncCall(value) for value in calls], server)
    if any(changes):
        _raise_changes(group, offer.changed)
    for rank, index in enumerate(sparse):
        if index != _NONE:
            raise TypeError(
                f"the gradient of parameter {names[index]} on rank {rank} is sparse; "
                "SyncParameterServer sends dense gradients: make the layer with sparse=False"
            )
    workers = tuple(rank for rank, value in enumerate(calls) if call in _UPDATES and value == call)
    some = table[list(workers), len(lead) :].any(dim=0)
    return SyncRound(
        call=call,
        workers=workers,
        batches=sum(batches[rank] for rank in workers),
        parameters=tuple(some.nonzero().flatten().tolist()),
        broken=next(((r, broken[r]) for r in workers if broken[r] != _NONE), None),
    )


def _raise_changes(group: dist.ProcessGroup, own: str | None) -> None:
    """Raise RuntimeError with the first rank's error, on every rank. Collective."""
    errors: list[str | None] = [None] * group.size()
    dist.all_gather_object(errors, own, group=group)
    for rank, error in enumerate(errors):
        if error is not None:
            raise RuntimeError(f"rank {rank}: {error}")


def exchange_ages(group: dist.ProcessGroup, ages: Sequence[int]) -> list[list[int]]:
    """Exchange numbers of steps. Collective. Returns every rank's numbers, by rank."""
    row = torch.tensor(ages, dtype=torch.int32)
    table = torch.empty((group.size(), row.numel()), dtype=torch.int32)
    dist.all_gather(list(table), row, group=group)
    return table.tolist()


def _index(index: int | None) -> int:
    return _NONE if index is None else index


def _common_call(calls: list[SyncCall], server: int) -> SyncCall:
    """Return the call of the ranks that neither follow nor flush.

    If all ranks follow or flush, returns FLUSH if any rank flushes, else FOLLOW. Raises
    RuntimeError if ranks call different methods, or load without the server.
    """
    wanted = sorted(set(calls) - {SyncCall.FOLLOW, SyncCall.FLUSH})
    if len(wanted) > 1 or (wanted == [SyncCall.LOAD] and calls[server] != SyncCall.LOAD):
        who = "; ".join(
            f"{_METHODS.get(call, 'none, or close() or serve()')} by ranks "
            f"{[rank for rank, value in enumerate(calls) if value == call]}"
            for call in sorted(set(calls), reverse=True)
        )
        raise RuntimeError(
            f"the ranks of the parameter server disagree on the call: {who}. Workers make the same "
            "calls in the same order until they close, and load_state_dict() needs the server too"
        )
    if wanted:
        return wanted[0]
    return SyncCall.FLUSH if SyncCall.FLUSH in calls else SyncCall.FOLLOW
