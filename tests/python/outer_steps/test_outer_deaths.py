"""A worker dies: the others raise, form the next group, and continue from their states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import beyond_gloo
from harness.members import Member, Members, all_call, assert_joined
from harness.outer_steps import Counting

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]


class _Own:
    """The objects that a member keeps between two calls."""

    model: Counting
    optimizer: Any
    outer: Any
    state: Any = None


# The functions that members call.


def start(options: dict[str, Any]) -> None:
    _Own.model = Counting()
    _Own.optimizer, _Own.outer = _Own.model.started(**options)


def train(steps: int) -> tuple[list[float], dict[str, int]]:
    for _ in range(steps):
        _Own.model.move(_Own.optimizer, 1)
        _Own.outer.step()
    return found()


def found() -> tuple[list[float], dict[str, int]]:
    """Return an element of the inner and of the outer weights, and the counters."""
    inner = float(_Own.model.weight.detach()[0])
    with _Own.outer.weights():
        outer = float(_Own.model.weight.detach()[0])
    return [inner, outer], _Own.outer.stats() | {"sent_bytes": 0}


def save() -> None:
    _Own.state = _Own.outer.state_dict()


def leave() -> None:
    dist.destroy_process_group()


def load() -> None:
    _Own.outer.load_state_dict(_Own.state)


def close() -> float:
    _Own.outer.close()
    return float(_Own.model.weight.detach()[0])


def assert_found(members: list[Member], inner: float, outer: float, **counts: int) -> None:
    counters = {"refused": 0, "sent_bytes": 0} | counts
    for weights, stats in all_call(members, found):
        assert (weights, stats) == ([inner, outer], counters)


def assert_died(errors: list[Any]) -> None:
    for error in errors:
        assert isinstance(error, RuntimeError) and "has died" in str(error), error


@pytest.mark.parametrize("dtype", [None, torch.int8], ids=str)
@pytest.mark.parametrize("delay", [0, 1])
def test_survivors_and_a_newcomer_continue(delay: int, dtype: Any) -> None:
    options = {"every": 3, "delay": delay, "dtype": dtype}
    with Members("again") as members:
        first = members.start("aaa")
        assert_joined(first, 1)
        all_call(first, start, options)
        all_call(first, train, 5)  # meets at step 3
        assert_found(first, 5, 3, steps=5, meetings=1)
        first[1].kill()
        living = [first[0], first[2]]
        assert_died(all_call(living, train, 1 + delay))
        waiting = 0.0
        for (inner, outer), stats in all_call(living, found):
            # With delay=1 the death may be noticed when the meeting begins, or a step later.
            assert 6 <= inner == stats["steps"] <= 6 + delay
            assert (outer, stats["meetings"]) == (3, 1)
            waiting += inner - outer
        all_call(living, save)
        now = [*members.start("a"), *living]
        assert_joined(now, 2)
        all_call(now, start, options)
        all_call(now, load)
        assert now[0].call(found)[0] == [3, 3]
        assert sum(inner - 3 for (inner, _), _ in all_call(living, found)) == waiting
        steps = [stats["steps"] for _, stats in all_call(now, found)]
        assert len(set(steps)) == 1
        all_call(now, train, 3)  # one meeting
        results = all_call(now, close)
        # The mean has all steps since the meeting at step 3, also the survivors' steps before the
        # death. With int8, close() loses rounding errors.
        accuracy = 1e-5 if dtype is None else 0.2
        assert results == [pytest.approx(3 + (waiting + 9) / 3, abs=accuracy)] * 3
        assert len(set(results)) == 1


def test_a_transfer_of_a_dead_worker_is_given_up() -> None:
    """state_dict() waits for the transfer, raises, and succeeds when it is called again."""
    with Members("again") as members:
        first = members.start("aa")
        assert_joined(first, 1)
        all_call(first, start, {"every": 2, "delay": 2})
        first[0].call(train, 2)  # the transfer begins, and the other member never comes
        first[1].kill()
        assert_died([first[0].call(save)])
        first[0].call(leave)
        assert first[0].call(save) is None
        assert_found(first[:1], 2, 0, steps=2, meetings=0)
