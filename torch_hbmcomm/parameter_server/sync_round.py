"""The start of a round: every rank says what it calls and what gradients it has, and all draw the
same conclusion, before anything large moves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

import torch
import torch.distributed as dist

_NONE = -1


class Call(IntEnum):
    FOLLOW = 0  # takes part in whatever the others do: a server that serves, a worker that closed
    STEP = 1
    PULL = 2
    LOAD = 3
    FLUSH = 4  # sends what layer dropping has cached, once nobody wants anything else


_UPDATES = (Call.STEP, Call.FLUSH)
_METHODS = {Call.STEP: "step()", Call.PULL: "pull()", Call.LOAD: "load_state_dict()"}


@dataclass(frozen=True)
class Offer:
    """What one rank brings. Parameters are named by their index; None: there is none.

    batches: steps whose gradients it has added up; 0 for a rank that only follows
    sparse: the first parameter whose gradient is sparse
    broken: the first parameter whose gradient is not finite
    has_gradient: by parameter
    """

    call: Call
    batches: int
    sparse: int | None
    broken: int | None
    has_gradient: Sequence[bool]


@dataclass(frozen=True)
class Round:
    """What all ranks of the group do together.

    call: FOLLOW when nobody wants anything any more; STEP and FLUSH are updates
    workers: the ranks that bring gradients
    batches: of all workers together; 0 for FLUSH
    parameters: indices of those that have a gradient on some worker
    broken: (rank, parameter) of the first gradient that is not finite
    """

    call: Call
    workers: tuple[int, ...]
    batches: int
    parameters: tuple[int, ...]
    broken: tuple[int, int] | None


def meet(group: dist.ProcessGroup, server: int, names: Sequence[str], offer: Offer) -> Round:
    """Collective. `names` are those of the parameters.

    Raises, on every rank alike:
        TypeError: a gradient is sparse
        RuntimeError: ranks call different methods
    """
    # Lengths first, then a flag for each parameter.
    lead = [offer.call, offer.batches, _index(offer.sparse), _index(offer.broken)]
    row = torch.tensor([*lead, *offer.has_gradient], dtype=torch.int64)
    table = torch.empty((group.size(), row.numel()), dtype=torch.int64)
    dist.all_gather(list(table), row, group=group)
    calls, batches, sparse, broken = table[:, : len(lead)].t().tolist()
    call = _common_call([Call(value) for value in calls], server)
    for rank, index in enumerate(sparse):
        if index != _NONE:
            raise TypeError(
                f"the gradient of parameter {names[index]} on rank {rank} is sparse; mode='sync' "
                "sends dense gradients: make the layer with sparse=False"
            )
    workers = tuple(rank for rank, value in enumerate(calls) if call in _UPDATES and value == call)
    some = table[list(workers), len(lead) :].any(dim=0)
    return Round(
        call=call,
        workers=workers,
        batches=sum(batches[rank] for rank in workers),
        parameters=tuple(some.nonzero().flatten().tolist()),
        broken=next(((r, broken[r]) for r in workers if broken[r] != _NONE), None),
    )


def tell(group: dist.ProcessGroup, flags: Sequence[bool]) -> list[list[bool]]:
    """Collective. Everyone's flags, by rank."""
    row = torch.tensor(flags, dtype=torch.uint8)
    table = torch.empty((group.size(), row.numel()), dtype=torch.uint8)
    dist.all_gather(list(table), row, group=group)
    return table.bool().tolist()


def load_together(group: dist.ProcessGroup, load: Callable[[], None] | None) -> None:
    """Collective. Where the load fails, its own error is raised, and RuntimeError elsewhere."""
    failure: Exception | None = None
    if load is not None:
        try:
            load()
        except Exception as error:
            failure = error
    failed = [rank for rank, (flag,) in enumerate(tell(group, [failure is not None])) if flag]
    if failure is not None:
        raise failure
    if failed:
        raise RuntimeError(f"load_state_dict() failed on ranks {failed}; their own errors say why")


def _index(index: int | None) -> int:
    return _NONE if index is None else index


def _common_call(calls: list[Call], server: int) -> Call:
    """What all do that do not merely follow."""
    wanted = sorted(set(calls) - {Call.FOLLOW, Call.FLUSH})
    if len(wanted) > 1 or (wanted == [Call.LOAD] and calls[server] != Call.LOAD):
        who = "; ".join(
            f"{_METHODS.get(call, 'none, or close() or serve()')} by ranks "
            f"{[rank for rank, value in enumerate(calls) if value == call]}"
            for call in sorted(set(calls), reverse=True)
        )
        raise RuntimeError(
            f"the ranks of the parameter server disagree on the call: {who}; workers make the same "
            "calls in the same order until they close, and load_state_dict() needs the server too"
        )
    if wanted:
        return wanted[0]
    return Call.FLUSH if Call.FLUSH in calls else Call.FOLLOW
