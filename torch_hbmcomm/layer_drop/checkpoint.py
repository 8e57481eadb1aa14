"""Which part of a checkpoint a rank takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_hbmcomm.layer_drop.cache import check_names

State = Mapping[str, Any]


class Share(NamedTuple):
    """states: whose caches this rank adds up. common: one of them all, for what ranks agree on."""

    states: Sequence[State]
    common: State


def own_share(given: State | Sequence[State], rank: int, ranks: int, names: Sequence[str]) -> Share:
    """Raises ValueError for states of another model, rank or number of ranks."""
    states = [given] if isinstance(given, Mapping) else list(given)
    if not states:
        raise ValueError("load_state_dict() was given no state at all")
    for state in states:
        if unknown := {"rank", "ranks", "names", "caches"} - set(state):
            raise ValueError(
                f"the state lacks {', '.join(sorted(unknown))}: load what state_dict() returned"
            )
        check_names(state["names"], names)
    states.sort(key=lambda state: int(state["rank"]))
    saved = states[0]["ranks"]
    if isinstance(given, Mapping):
        if (given["rank"], saved) != (rank, ranks):
            raise ValueError(
                f"the state is of rank {given['rank']} of {saved}, and this is rank {rank} of "
                f"{ranks}: load what this rank saved, or give the states of all {saved} ranks"
            )
        return Share([given], given)
    found = [state["rank"] for state in states]
    if found != list(range(saved)):
        raise ValueError(f"states of ranks {found} were given, and {saved} ranks had saved some")
    return Share(states[rank::ranks], states[0])
