"""The membership table: the workers of a job, their clocks, and which are alive."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import seeds
from harness.box_process import TOKEN as BOX_TOKEN
from harness.box_process import BoxProcess
from harness.ps_workers import TOKEN, Boxes, together

from torch_hbmcomm import smb
from torch_hbmcomm.parameter_server.membership import (
    SPARE_ENTRIES,
    JobCell,
    MembershipTable,
    WorkerCell,
    _at,
)

pytestmark = pytest.mark.usefixtures("nothing_left")

TIMEOUT = 60.0


def connect(boxes: Boxes) -> smb.Box:
    return smb.connect(
        boxes.servers[0].url, TOKEN, transport=boxes.transport, connect_timeout=TIMEOUT
    )


def join(box: smb.Box, timeout: float = TIMEOUT) -> MembershipTable:
    return MembershipTable(box, "job", timeout, temporary=True)


def begin(box: smb.Box) -> MembershipTable:
    """Join as the first worker, and become active."""
    membership = join(box)
    assert membership.leads()
    membership.publish(17)
    assert membership.activate() == 0
    return membership


def test_one_of_many_leads(boxes: Boxes) -> None:
    def work(worker: int, barrier: threading.Barrier) -> tuple[int, bool]:
        with connect(boxes) as box:
            barrier.wait()
            membership = join(box)
            leads = membership.leads()
            if leads:
                time.sleep(0.01)
                membership.publish(17)
            assert membership.ready() == 17
            membership.activate()
            membership.wait_for_workers(6)
            barrier.wait()
            membership.leave()
            return membership.index, leads

    results = together(6, work)
    assert sum(leads for _, leads in results) == 1
    assert len({index for index, _ in results}) == 6
    assert boxes.rows() == []


def test_the_next_leads_if_the_first_dies_before_writing(boxes: Boxes) -> None:
    with connect(boxes) as second_box:
        with connect(boxes) as first_box:
            first = join(first_box)
            assert first.leads()
            second = join(second_box)
            found: list[bool] = []
            waiting = threading.Thread(target=lambda: found.append(second.leads()))
            waiting.start()
            time.sleep(0.1)
            assert found == []
        waiting.join()
        assert found == [True]


def test_a_worker_that_claims_an_entry_while_it_is_closed_counts(
    boxes: Boxes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The late worker reads the end of the table before another worker closes the entry."""
    with connect(boxes) as one, connect(boxes) as other:
        first = join(one)
        first._segment.fetch_add(_at(0, JobCell.END), 2)  # two entries without a worker
        closing = join(one)
        first.leave()
        assert closing.index == 3
        late: list[MembershipTable] = []
        write, read = MembershipTable._write, MembershipTable._read

        def claim_first(table: MembershipTable, entry: int, *cells: int, worker: bool) -> None:
            if entry == 2 and not late:
                late.append(table)  # so that join() below does not come here again
                ends = {JobCell.END: 2}
                monkeypatch.setattr(
                    MembershipTable, "_read", lambda one, cell: ends.get(cell) or read(one, cell)
                )
                late[0] = join(other)
                late[0].activate()
            write(table, entry, *cells, worker=worker)

        monkeypatch.setattr(MembershipTable, "_write", claim_first)
        assert closing.leads()
        assert [line.index for line in closing.active()] == [late[0].index]


def test_a_late_worker_starts_with_the_foremost(boxes: Boxes) -> None:
    with connect(boxes) as one, connect(boxes) as other:
        first = begin(one)
        first.set_pushed(5)
        late = join(other)
        assert not late.leads()
        assert late.activate() == 5
        assert [(line.index, line.pushed) for line in first.active()] == [(0, 5), (1, 5)]
        late.leave()
        assert [line.index for line in first.active()] == [0]
        again = join(other)
        assert again.index == 2  # no entry is used twice


def test_the_dead_are_not_waited_for(boxes: Boxes) -> None:
    with connect(boxes) as one:
        first = begin(one)
        with connect(boxes) as other:
            join(other).activate()
        first.set_pushed(3)
        first.wait_pushed(3)
        assert [line.index for line in first.active()] == [0]


def test_deaths_are_noticed_without_waiting(boxes: Boxes) -> None:
    with connect(boxes) as one:
        first = begin(one)
        with connect(boxes) as other:
            join(other).activate()
            assert len(first.live()) == 2
        assert len(first.active()) == 2
        deadline = time.monotonic() + TIMEOUT
        while len(live := first.live()) == 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert live == first.active()


def test_an_active_worker_has_not_joined_yet(boxes: Boxes) -> None:
    """Until a worker has received the weights, no other worker may begin because of it."""
    with connect(boxes) as one, connect(boxes) as other:
        first, second = begin(one), join(other, timeout=0.3)
        second.activate()
        with pytest.raises(TimeoutError, match=r"for 2 workers \(1 have joined\)"):
            second.wait_for_workers(2)
        assert [line.index for line in first.wait_for_workers(2)] == [0, 1]
        first.leave()
        assert [line.index for line in second.wait_for_workers(2)] == [1]


def test_more_workers_join_than_a_read_expects(boxes: Boxes) -> None:
    with connect(boxes) as one, connect(boxes) as other:
        first = begin(one)
        assert len(first.active()) == 1
        for _ in range(SPARE_ENTRIES + 4):
            join(other).activate()
        assert len(first.active()) == 1 + SPARE_ENTRIES + 4


def test_the_living_are_waited_for_and_named(boxes: Boxes) -> None:
    with connect(boxes) as one, connect(boxes) as other:
        first = begin(one)
        begun = join(other, timeout=0.3)
        begun.activate()
        with pytest.raises(TimeoutError, match=r"worker 1 of 'job' .* exchange 2 of workers 0 \("):
            begun.set_pulled(2)
            begun.wait_pulled(2)
        assert len(first.active()) == 2


def test_a_pull_is_counted_after_the_loads(boxes: Boxes, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over shm, where the weights are loaded from the box's memory, a fence orders the two."""
    with connect(boxes) as one:
        first = begin(one)
        calls: list[Any] = []
        monkeypatch.setattr(MembershipTable, "_fence", lambda table: calls.append("fence"))
        monkeypatch.setattr(
            MembershipTable, "_write_own", lambda table, cell, clock: calls.append((cell, clock))
        )
        first.set_pulled(1)
        fence = ["fence"] if boxes.transport == "shm" else []
        assert calls == [*fence, (WorkerCell.PULLED, 1)]


def test_the_end_of_the_living_is_waited_for(boxes: Boxes) -> None:
    with connect(boxes) as one, connect(boxes) as other:
        first, second = begin(one), join(other, timeout=0.3)
        second.activate()
        with connect(boxes) as third:
            join(third).activate()
        second.retire()
        said = (
            r"worker 1 of 'job' .* the end of workers 0 \(.*\); a dead one counts until its lease"
        )
        with pytest.raises(TimeoutError, match=said):
            second.wait_retired()
        first.wait_retired()
        first.retire()
        second.wait_retired()


@pytest.mark.parametrize("joins", [15, pytest.param(40, marks=pytest.mark.full)])
def test_workers_do_not_pass_a_joining_one(boxes: Boxes, joins: int) -> None:
    """Two workers each write to the table, then read it. At least one of them sees both entries."""
    with connect(boxes) as one, connect(boxes) as other:
        first = begin(one)
        reached = [0]
        stop = threading.Event()

        def advance() -> None:
            while not stop.is_set():
                clock = reached[0] + 1
                first.set_pushed(clock)
                first.wait_pushed(clock)
                reached[0] = clock

        advancing = threading.Thread(target=advance)
        advancing.start()
        delays = seeds.draws(0)
        try:
            for _ in range(joins):
                late = join(other)
                clock = late.activate()
                time.sleep(delays.random() * 4e-3)
                assert reached[0] <= clock
                late.leave()
        finally:
            stop.set()
            advancing.join()


def test_a_life_segment_survives_a_check(boxes: Boxes) -> None:
    with connect(boxes) as one, connect(boxes) as other:
        first, second = begin(one), join(other)
        second.activate()
        for _ in range(20):
            first._retire_dead([1])
            second._retire_dead([0])
        assert len(first.active()) == 2


def test_lives_outlast_a_restart_of_the_box(transport: Any, tmp_path: Path) -> None:
    """Check that a worker that reconnects early does not retire the other worker as dead."""
    with (
        BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process,
        smb.connect(process.url, BOX_TOKEN, transport=transport) as one,
        smb.connect(process.url, BOX_TOKEN, transport=transport) as other,
    ):
        first, second = begin(one), join(other)
        second.activate()
        for _ in range(3):
            process.kill()
            process.start()
            first._retire_dead([1])
            second._retire_dead([0])
        assert len(first.active()) == 2
        second.leave()
        first.leave()
