"""Checks of a saved state, before anything is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch_hbmcomm.parameter_server.packing import TensorSpec

_KEYS = {
    *("rank", "ranks", "tensors", "model", "fragments", "transfer", "buffers", "counters"),
    *("steps", "meetings", "refused", "sent_bytes"),
}


class Offer(NamedTuple):
    """A rank's state, as the other ranks see it.

    meetings: the number of meetings whose results the rank has applied
    begun: the number of meetings for which the rank has sent its delta
    """

    meetings: int
    begun: int
    rank: int
    ranks: int


def check_same_tensors(saved: Sequence[str], present: Sequence[str]) -> None:
    """Raise ValueError if the texts of a state's tensors are not those of the model's."""
    if list(saved) != list(present):
        unlike = [*(set(saved) ^ set(present)), *saved]
        raise ValueError(f"the state is of another model: they differ in {min(unlike)}")


def offer_of(
    state: Mapping[str, Any] | None, specs: Sequence[TensorSpec], counts: Sequence[int]
) -> Offer | None:
    """Check a rank's state. None for a rank that has none.

    Args:
        specs: the model's tensors
        counts: the number of elements of each fragment

    Raises TypeError for a state that is no mapping. Raises ValueError for a state that lacks a
    part, or that is of another model or of other fragments.
    """
    if state is None:
        return None
    if not isinstance(state, Mapping):
        raise TypeError(f"a state is a mapping or None, not {type(state).__name__}")
    if lacking := sorted(_KEYS - set(state)):
        raise ValueError(f"the state lacks {', '.join(lacking)}: load the result of state_dict()")
    check_same_tensors(state["tensors"], [str(spec) for spec in specs])
    found = [len(one["weights"]) for one in state["fragments"]]
    if found != list(counts):
        raise ValueError(
            f"the state has fragments of {found} elements, and this OuterSteps of {list(counts)}: "
            f"load it with fragments={len(found)}"
        )
    meetings = int(state["meetings"])
    begun = meetings + (state["transfer"] is not None)
    return Offer(meetings, begun, int(state["rank"]), int(state["ranks"]))
