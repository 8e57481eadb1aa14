"""The agreement of a group's ranks on a ParameterServer, before any tensor is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch.distributed as dist

from torch_hbmcomm.agreement import together
from torch_hbmcomm.parameter_server.layout import manifest_mismatch


@dataclass(frozen=True)
class AsyncOffer:
    """The model and the arguments that a rank passed to its ParameterServer.

    manifest: describes the model, and the settings that must be equal on all ranks
    name: the job's name; the name of rank 0 is taken
    node_terms: the settings that must be equal on the ranks of a node that are one worker
    """

    manifest: bytes
    name: str
    node_terms: dict[str, str]


def agree_on_server(
    group: dist.ProcessGroup,
    attempt: Callable[[], AsyncOffer],
    nodes: Callable[[], Sequence[Sequence[int]]],
) -> str:
    """Call attempt() on every rank, and compare the offers. Collective. Returns the job's name.

    nodes: returns the ranks of each node whose ranks are one worker, called after attempt()

    Raises, on every rank: ValueError, which names two ranks and their mismatch; DistBackendError,
    if a rank has died; and the errors of together().
    """
    try:
        offers = together(group, attempt, "a ParameterServer")
    except dist.DistBackendError as error:
        raise dist.DistBackendError(
            f"the ranks of the group cannot agree on a ParameterServer: {error}. If its box "
            "still serves, the live ranks can go on without the group: pass "
            "box=hbmcomm.smb.all_of(group), a name, and workers=, their number"
        ) from error
    for rank, offer in enumerate(offers):
        if why := manifest_mismatch(offers[0].manifest, offer.manifest):
            raise ValueError(
                f"the ParameterServers of rank 0 (here) and rank {rank} (there) do not fit "
                f"each other: {why}"
            )
    for first, *others in nodes():
        for rank in others:
            for term, here in offers[first].node_terms.items():
                there = offers[rank].node_terms[term]
                if here != there:
                    raise ValueError(
                        f"ranks {first} and {rank} of a node do not fit each other: {term} is "
                        f"{here} on rank {first}, and {there} on rank {rank}. With "
                        'aggregate="node" the ranks of a node pass the same'
                    )
    return offers[0].name
