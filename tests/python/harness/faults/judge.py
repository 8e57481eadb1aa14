"""Compares the ranks' outcomes with the verdict of their cell."""

from __future__ import annotations

import re
from collections.abc import Sequence

from harness.faults.job import BOX_SHORT, SIZE, Outcome, victim
from harness.faults.matrix import (
    RANK_ENDS,
    RANK_GONE,
    Cell,
    Fault,
    Mode,
    Place,
    Verdict,
    verdict,
)
from harness.faults.ranks import BASE

# Seconds from the fault to the error of a notified rank: twenty times the bounds of
# docs/failures.md, 100 ms and one second.
SOON = {Place.ONE_NODE: 2.0, Place.TWO_NODES: 20.0}
LATE = 40.0  # seconds that an error may come after its timeout on a busy machine

_CODES = {Fault.RAISES: 1, Fault.EXITS: 0}


def assert_as_expected(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    """Raise AssertionError, which shows all outcomes, if they differ from the cell's verdict."""
    seen = "\n".join(str(outcome) for outcome in outcomes)
    try:
        {
            Verdict.NOTIFIED: _notified,
            Verdict.TIMEOUT: _timed_out,
            Verdict.CONTINUES: _went_on,
            Verdict.REFUSED: _refused,
            Verdict.ALONE: _alone,
        }[verdict(cell)](cell, outcomes)
        _assert_left(cell, outcomes)
    except AssertionError as error:
        expected = f"{cell.name}: expected {verdict(cell).value}"
        raise AssertionError(f"{expected}: {error}\n{seen}") from None


def survivors(cell: Cell, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the outcomes of the ranks that the fault did not end or stop."""
    gone = victim(cell) if cell.fault in RANK_GONE else None
    return [outcome for outcome in outcomes if outcome.rank != gone]


def _notified(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    for outcome in survivors(cell, outcomes):
        _, text, seconds = _error(outcome)
        rank = rf"\brank {victim(cell)}\b"
        named = rf"{rank}|the store" if cell.fault is Fault.HOST_KILLED else rank
        assert re.search(named, text), f"rank {outcome.rank}: the error names no rank"
        assert "timed out" not in text, f"rank {outcome.rank} had to wait for its timeout"
        assert seconds < SOON[cell.place], f"rank {outcome.rank} is notified after {seconds:.1f} s"


def _timed_out(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    for outcome in survivors(cell, outcomes):
        _, text, seconds = _error(outcome)
        assert seconds > BOX_SHORT * 0.5, f"rank {outcome.rank} did not wait for its timeout"
        assert seconds < BOX_SHORT + LATE, f"rank {outcome.rank} waited for {seconds:.1f} s"
        if cell.mode is Mode.ASYNCHRONOUS and (
            cell.fault is Fault.BOX_STOPPED or (cell.place is Place.ONE_NODE and _is_cut(cell))
        ):
            _names_box(outcome)
            continue
        beyond = _is_cut(cell) and outcome.rank == SIZE - 1
        missing = "[01]" if beyond else str(SIZE - 1)
        named = [rf"missing ranks: .*\b{missing}\b"]
        # The heartbeat over a cut link has the same limit as the operation, so it may fail first.
        # The cut also separates rank 2 from the store.
        if _is_cut(cell):
            named.append(rf"machine of rank {missing} .* has not answered")
            named += [r"the c10d store at \S+ did not answer"] * beyond
        assert re.search("|".join(named), text), f"rank {outcome.rank} does not know who is missing"


def _went_on(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    finished = survivors(cell, outcomes)
    for outcome in finished:
        assert outcome.error is None, f"rank {outcome.rank} had an error"
        assert outcome.finished, f"rank {outcome.rank} did not finish"
    if cell.mode is Mode.ASYNCHRONOUS:
        _assert_sums(finished, outcomes)


def _refused(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    for outcome in outcomes:
        _, text, _ = _error(outcome)
        if cell.fault is Fault.MEMORY_FULL:
            assert re.search(r"cannot (make|allocate|map)|limit", text), "the cause is not named"
            assert outcome.rank == victim(cell) or re.search(rf"\brank {victim(cell)}\b", text), (
                f"rank {outcome.rank}: the error names no rank"
            )
        elif cell.fault is Fault.DISK_FULL:
            assert re.search("No space left", text), "the cause is not named"
        else:
            _names_box(outcome)


def _alone(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    if cell.fault is Fault.MEMORY_FULL:
        for outcome in outcomes:
            assert outcome.finished, f"rank {outcome.rank} did not finish"
            assert (outcome.memory is not None) == (outcome.rank == victim(cell))
        memory = outcomes[victim(cell) or 0].memory
        assert memory is not None
        assert re.search("machine can|RLIMIT_AS|no gap", memory[1]), "the cause is not named"
        return
    _names_box(outcomes[SIZE - 1])
    for outcome in outcomes[: SIZE - 1]:
        assert outcome.finished, f"rank {outcome.rank} did not finish"
    _assert_sums(list(outcomes[: SIZE - 1]), outcomes)


def _names_box(outcome: Outcome) -> None:
    kind, text, _ = _error(outcome)
    assert kind in ("BoxUnreachable", "OperationTimeout"), f"rank {outcome.rank}: {kind}"
    assert re.search(r"\bbox\b|smb://", text), (
        f"rank {outcome.rank}: the error does not name the box"
    )


def _error(outcome: Outcome) -> tuple[str, str, float]:
    assert outcome.error is not None, f"rank {outcome.rank} had no error"
    return outcome.error


def _is_cut(cell: Cell) -> bool:
    return cell.fault is Fault.CUT


def _assert_sums(finished: Sequence[Outcome], outcomes: Sequence[Outcome]) -> None:
    """Check that the weights have every exchange of the ranks `finished` exactly once.

    They must have at least the reported exchanges of any other rank, because this rank may have
    ended between an exchange and its report.
    """
    known = {outcome.rank for outcome in finished}
    for outcome in finished:
        left = outcome.found
        for rank in reversed(range(SIZE)):
            times, left = divmod(left, BASE**rank)
            turns = outcomes[rank].turns
            assert times == turns if rank in known else times >= turns, (
                f"the weights have {times:.0f} exchanges of rank {rank}, which has done {turns}"
            )
        assert left == 0


def _assert_left(cell: Cell, outcomes: Sequence[Outcome]) -> None:
    for outcome in survivors(cell, outcomes):
        assert outcome.code == 0, f"rank {outcome.rank} left with {outcome.code}"
        assert not re.search("Traceback|terminate called", outcome.output), "see its output"
    if cell.fault in RANK_ENDS:
        code = outcomes[victim(cell) or 0].code
        assert code == _CODES.get(cell.fault, -9), f"the victim left with {code}"
