"""The costs that the records of a profile give, its page, and its trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from torch_hbmcomm.cli import app
from torch_hbmcomm.profiling.clocks import align
from torch_hbmcomm.profiling.costs import advice, costs
from torch_hbmcomm.profiling.drift import MOST_DRIFT
from torch_hbmcomm.profiling.ranks import VERSION, load

MS = 1_000_000  # ns
MIB = 1 << 20


def operation(sequence: int, begin: float, end: float, **changes: Any) -> dict[str, Any]:
    """Return a record of an all_reduce of 1 MiB. begin, end: ms."""
    return {
        "group": 0,
        "kind": "all_reduce",
        "sequence": sequence,
        "peer": -1,
        "bytes": MIB,
        "path": "shm",
        "place": "segment",
        "data": "zero-copy",
        "begin": int(begin * MS),
        "end": int(end * MS),
        "waited": int((end - begin) * MS),
        "busy": 0,
        **changes,
    }


def write(
    folder: Path,
    rank: int,
    operations: list[dict[str, Any]],
    size: int = 2,
    clock: str = "one",
    **changes: Any,
) -> None:
    """Write the file of a rank. Its profile lasts from 0 to 100 ms."""
    record = {
        "version": VERSION,
        "rank": rank,
        "host": "host",
        "process": 1000 + rank,
        "clock": clock,
        "begin": 0,
        "end": 100 * MS,
        "lost": 0,
        "written": 1000.1,
        "first_group": "k",
        "groups": [
            {
                "key": "k",
                "name": 'group "0"',
                "ranks": list(range(size)),
                "nodes": [0] * size,
                "rank": rank,
            }
        ],
        "operations": operations,
    }
    (folder / f"rank-{rank}.json").write_text(json.dumps({**record, **changes}))


def page(folder: Path) -> str:
    result = CliRunner().invoke(app, ["profile", str(folder)], env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.output
    return " ".join(result.output.split())


def test_a_late_rank_is_named(tmp_path: Path) -> None:
    """Rank 2 of 3 issues ten collectives 4 ms after the others, and rank 1 one of them by 1 ms."""
    for rank in range(3):
        late = [10 * n + (4 if rank == 2 and n < 9 else 1 if rank == 1 and n == 9 else 0)
                for n in range(10)]  # fmt: skip
        ends = [10 * n + (5 if n < 9 else 2) for n in range(10)]
        write(tmp_path, rank, [operation(n + 1, late[n], ends[n]) for n in range(10)], size=3)
    profiles, _ = load(tmp_path)
    found = costs(profiles, align(profiles))
    assert [found.late[rank].times for rank in range(3)] == [0, 1, 9]
    assert found.late[2].waiting == 2 * 9 * 4 * MS
    assert found.late[1].waiting == 2 * MS
    assert found.waiting == {0: 37 * MS, 1: 36 * MS, 2: 1 * MS}
    assert found.unhidden == {0: 10 * MS, 1: 10 * MS, 2: 10 * MS}
    shown = page(tmp_path)
    assert "1. 97% of the waiting for late ranks is for rank 2 (24% of the time). Others" in shown
    assert (
        "waited for it in 9 of 10 collectives. Half of its delay is in 5 of them, by 4 ms" in shown
    )
    assert "or more (at most 4 ms)." in shown


def test_short_delays_do_not_hide_a_rank_that_evaluates(tmp_path: Path) -> None:
    """Rank 1 is 0.1 ms late in 46 collectives, and evaluates for 20 ms before four more."""
    for rank in range(2):
        ops = []
        for n in range(50):
            delay = (20 if n % 12 == 11 else 0.1) * rank
            ops.append(operation(n + 1, 30 * n + delay, 30 * n + 21))
        write(tmp_path, rank, ops, end=1500 * MS)
    shown = page(tmp_path)
    assert (
        "Others waited for it in 50 of 50 collectives. Half of its delay is in 3 of them, by"
        in shown
    )
    assert "20 ms or more (at most 20 ms)" in shown
    assert "work that it does in some steps only, such as evaluating" in shown
    assert "│1│50 of 50│3│20.00│20.00│" in shown.replace(" │", "│").replace("│ ", "│")


def test_a_long_wait_has_no_exponent(tmp_path: Path) -> None:
    for rank in range(2):
        late = [operation(1, 123 * rank, 200), operation(2, 300 + 1234 * rank, 2000)]
        write(tmp_path, rank, late, end=2000 * MS)
    assert "by 1,234 ms or more (at most 1,234 ms)" in page(tmp_path)


def test_a_staged_operation_is_compared_with_zero_copy(tmp_path: Path) -> None:
    for rank in range(2):
        ordinary = [
            operation(n + 1, 10 * n, 10 * n + 6, place="ordinary", data="staged") for n in range(5)
        ]
        shared = [operation(n + 6, 50 + 5 * n, 50 + 5 * n + 2) for n in range(5)]
        write(tmp_path, rank, ordinary + shared)
    shown = page(tmp_path)
    assert (
        "all_reduce, to 1 MiB, of tensors outside of the segment takes 30% of the time (10" in shown
    )
    assert (
        "calls, whose data is staged), 3.0 times as long for each call as zero-copy, which" in shown
    )
    assert "zero-copy, which saves 20%." in shown
    assert "Other communication that no computation hides takes 10% of the time" in shown
    profiles, _ = load(tmp_path)
    assert [one.share for one in advice(costs(profiles, align(profiles)))] == [0.2, 0.1]


def test_a_rank_whose_tensor_stages_the_data_of_all_is_named(tmp_path: Path) -> None:
    """The tensors of ranks 0 and 1 are in the segment. Rank 2 has an ordinary tensor."""
    for rank in range(3):
        place = "ordinary" if rank == 2 else "segment"
        ops = [operation(n + 1, 10 * n, 10 * n + 6, place=place, data="staged") for n in range(5)]
        write(tmp_path, rank, [*ops, operation(6, 50, 52)], size=3)
    shown = page(tmp_path)
    assert (
        "1. all_reduce, to 1 MiB, of tensors outside of the segment on rank 2 takes 30% of the "
        "time (15 calls, whose data is staged), 3.0 times as long for each call as zero-copy"
    ) in shown
    assert "2. Other communication that no computation hides takes 2% of the time" in shown


def test_many_ranks_whose_tensors_stage_data_are_counted(tmp_path: Path) -> None:
    for rank in range(10):
        place = "ordinary" if rank else "segment"
        write(tmp_path, rank, [operation(1, 0, 9, place=place, data="staged")], size=10)
    assert "of tensors outside of the segment on 9 ranks takes 9% of the time" in page(tmp_path)


def test_operations_that_a_line_names_count_in_no_other_line(tmp_path: Path) -> None:
    """FSDP gathers parameters and scatters gradients through tensors outside of the segment."""
    kinds = ("all_gather_into_tensor", "reduce_scatter_tensor")
    ordinary: dict[str, Any] = {"place": "ordinary", "data": "staged"}
    for rank in range(2):
        ops = [operation(n + 1, 10 * n, 10 * n + 6, kind=kinds[n % 2], **ordinary)
               for n in range(10)]  # fmt: skip
        write(tmp_path, rank, ops)
    shown = page(tmp_path)
    for kind in kinds:
        assert f"{kind}, to 1 MiB, of tensors outside of the segment takes 30% of" in shown
    assert "If the tensors live for many operations, allocate them" in shown
    assert "that no computation hides" not in shown


def test_a_late_root_of_a_broadcast_is_named(tmp_path: Path) -> None:
    """Rank 0 reads a batch for 4 ms and sends it. The others wait in the broadcast."""
    for rank in range(3):
        late = 4 * (rank == 0)
        ops = [operation(n + 1, 10 * n + late, 10 * n + 4.2, kind="broadcast", bytes=1000)
               for n in range(10)]  # fmt: skip
        write(tmp_path, rank, ops, size=3)
    profiles, _ = load(tmp_path)
    found = costs(profiles, align(profiles))
    assert found.waiting == {0: 0, 1: 40 * MS, 2: 40 * MS}
    assert [found.late[rank].times for rank in range(3)] == [10, 0, 0]
    shown = page(tmp_path)
    assert "1. 100% of the waiting for late ranks is for rank 0 (27% of the time)." in shown
    assert "2. 30 calls of broadcast, to 4 KiB, take 2% of the time." in shown
    assert "that no computation hides" not in shown


def test_a_rank_waits_for_no_rank_that_comes_after_its_end(tmp_path: Path) -> None:
    """The root of a broadcast and rank 1 have ended when rank 2 issues the operation."""
    times = [(10, 12), (11, 12), (50, 51)]
    for rank, (begin, end) in enumerate(times):
        write(tmp_path, rank, [operation(1, begin, end, kind="broadcast")], size=3)
    profiles, _ = load(tmp_path)
    found = costs(profiles, align(profiles))
    assert found.waiting == {0: MS, 1: 0, 2: 0}
    assert [found.late[rank].times for rank in range(3)] == [0, 1, 0]


def test_hidden_and_queued_operations_are_no_staged_ones_to_save(tmp_path: Path) -> None:
    """A step issues 20 operations; each waits for those before it. Computation hides all."""
    for rank in range(2):
        ops = [
            operation(n + 1, 0, 4 * n + 4, place="ordinary", data="staged", waited=0, busy=100 * MS)
            for n in range(20)
        ]
        write(tmp_path, rank, ops)
    assert "Nothing takes 1 % of the time." in page(tmp_path)


def test_a_rank_waits_only_from_the_end_of_the_operation_before(tmp_path: Path) -> None:
    """Rank 1 issues the second operation 4 ms late, while the first is in transit on both."""
    write(tmp_path, 0, [operation(1, 0, 10), operation(2, 1, 12)])
    write(tmp_path, 1, [operation(1, 0, 10), operation(2, 5, 12)])
    profiles, _ = load(tmp_path)
    found = costs(profiles, align(profiles))
    assert found.waiting == {0: 0, 1: 0}
    assert [found.late[rank].times for rank in range(2)] == [0, 0]


def test_groups_are_told_apart(tmp_path: Path) -> None:
    """Rank 2 is late in a group of two ranks, whose numbers are those of the other group."""
    groups = [
        {"key": "all", "name": "all", "ranks": [0, 1, 2], "nodes": [0] * 3},
        {"key": "two", "name": "two", "ranks": [1, 2], "nodes": [0] * 2},
    ]
    for rank in range(3):
        of_rank = [{**groups[0], "rank": rank}, {**groups[1], "rank": rank - 1}]
        ops = [operation(1, 0, 2)]
        if rank:
            ops.append(operation(1, 20 + 5 * (rank == 2), 30, group=1))
        write(tmp_path, rank, ops, groups=of_rank)
    profiles, _ = load(tmp_path)
    found = costs(profiles, align(profiles))
    assert found.waiting == {0: 0, 1: 5 * MS, 2: 0}
    assert [found.late[rank].collectives for rank in range(3)] == [1, 2, 2]


def test_the_time_begins_at_the_oldest_record(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [operation(1, 90, 95)], lost=7)
    assert "Communication that no computation hides takes 50% of the time" in page(tmp_path)


def test_ranks_that_are_late_in_turn_are_not_blamed(tmp_path: Path) -> None:
    """Each of 4 ranks is 4 ms late in 2 of 8 collectives, and rank 3 in one more."""
    for rank in range(4):
        late = [10 * n + 4 * ((n if n < 8 else 3) % 4 == rank) for n in range(9)]
        write(tmp_path, rank, [operation(n + 1, late[n], 10 * n + 5) for n in range(9)], size=4)
    shown = page(tmp_path)
    assert "1. Waiting for late ranks takes 27% of the time, and no rank is late much" in shown
    assert "more than others (most waiting: rank 3, 33%)." in shown


def test_columns_of_numbers_are_whole_on_a_narrow_terminal(tmp_path: Path) -> None:
    for rank in range(2):
        changes = {"path": "shm, MPI", "data": "staged, zero-copy", "bytes": MIB << 20}
        write(tmp_path, rank, [operation(1, 10 + rank, 90, **changes)])
    result = CliRunner().invoke(app, ["profile", str(tmp_path)], env={"COLUMNS": "80"})
    row = next(line for line in result.output.splitlines() if "2,097,152.0" in line)
    assert [one.strip() for one in row.split("│")[6:-1]] == [
        "2", "2,097,152.0", "79.5", "0.0", "0.5", "1 (100%)",
    ]  # fmt: skip


def group(key: str, ranks: list[int], rank: int) -> dict[str, Any]:
    nodes = [0] * len(ranks)
    return {"key": key, "name": key, "ranks": ranks, "nodes": nodes, "rank": ranks.index(rank)}


def test_a_file_of_another_run_is_left_out(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [operation(1, 10, 20)])
    earlier: dict[str, Any] = {"groups": [group("earlier", [0, 1, 2], 2)], "first_group": "earlier"}
    times: dict[str, Any] = {"begin": -200 * MS, "end": 0, "written": 1000.0}
    write(tmp_path, 2, [operation(1, -190, -180)], **earlier, **times)
    shown = page(tmp_path)
    assert shown.startswith("2 ranks on 1 node,")
    assert "rank-2.json is of another run, and is left out" in shown


def test_ranks_of_one_run_belong_together_whatever_their_clocks_show(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [operation(1, 10, 20)], written=1000.0 - 500 * rank)
    assert load(tmp_path)[1] == []


def test_ranks_that_record_at_one_time_belong_together(tmp_path: Path) -> None:
    """Two groups of hbm have no rank in common. The default group is of another backend."""
    for rank in range(4):
        name = "high" if rank > 1 else "low"
        groups = [group(name, [rank // 2 * 2, rank // 2 * 2 + 1], rank)]
        write(tmp_path, rank, [operation(1, 10, 20)], groups=groups, first_group=name)
    profiles, others = load(tmp_path)
    assert ([one.rank for one in profiles], others) == ([0, 1, 2, 3], [])


def test_groups_without_a_common_rank_are_of_one_run(tmp_path: Path) -> None:
    """Ranks 0 and 1, and ranks 2 and 3, have a group each. Rank 4 came later, and formed its first
    group with rank 3."""
    for rank, last in ((0, 1), (1, 1), (2, 3), (3, 3)):
        groups = [group(f"up to {last}", [last - 1, last], rank)]
        if rank == 3:
            groups.append(group("new", [3, 4], 3))
        operations = [operation(1, 10, 20, group=one) for one in range(len(groups))]
        write(tmp_path, rank, operations, groups=groups, clock=f"{rank}")
    new = group("new", [3, 4], 4)
    write(tmp_path, 4, [operation(1, 10, 20)], groups=[new], first_group="new", clock="4")
    profiles, others = load(tmp_path)
    assert ([one.rank for one in profiles], others) == ([0, 1, 2, 3, 4], [])


def test_two_late_ranks_of_another_machine_are_not_excused(tmp_path: Path) -> None:
    """Ranks 2 and 3 are 20 ms late, 0.1 ms apart. The clocks' error is 0.5 ms."""
    for rank in range(4):
        far = rank >= 2
        late = operation(3, 30 + far * 20 + (rank == 3) * 0.1, 52)
        near = operation(1, 10 + far * 2.5, 13), operation(2, 22 - far, 23 - far * 0.5)
        clock = {"clock": "two"} if far else {}
        write(tmp_path, rank, [*near, late], size=4, **clock)
    profiles, _ = load(tmp_path)
    clocks = align(profiles)
    error = clocks[2].error
    assert error is not None
    assert 0.5 * MS <= error <= 0.5 * MS + MOST_DRIFT * 50 * MS
    found = costs(profiles, clocks)
    assert found.waiting[0] >= 20 * MS
    assert found.late[3].waiting >= 2 * 20 * MS


def test_hidden_communication_costs_nothing(tmp_path: Path) -> None:
    """The issuing thread computes during 8 of 10 ms, then waits for 2 ms."""
    for rank in range(2):
        ops = [operation(n + 1, 10 * n, 10 * n + 10, waited=2 * MS, busy=8 * MS) for n in range(10)]
        write(tmp_path, rank, ops)
    profiles, _ = load(tmp_path)
    found = costs(profiles, align(profiles))
    assert found.unhidden == {0: 20 * MS, 1: 20 * MS}
    assert found.rows[0].hidden == 2 * 80 * MS
    assert "Communication that no computation hides takes 20% of the time" in page(tmp_path)


def test_overlapping_operations_count_once(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [operation(1, 0, 50), operation(2, 25, 75)])
    profiles, _ = load(tmp_path)
    assert costs(profiles, align(profiles)).unhidden == {0: 75 * MS, 1: 75 * MS}


def test_clocks_of_two_machines_are_compared(tmp_path: Path) -> None:
    """Rank 1's clock is 1 s ahead. The collectives bound the difference within 0.5 ms."""
    ahead = 1000
    write(tmp_path, 0, [operation(1, 10, 12.5), operation(2, 21.5, 23)])
    write(
        tmp_path,
        1,
        [operation(1, ahead + 12, ahead + 13), operation(2, ahead + 20, ahead + 22)],
        clock="two",
        begin=ahead * MS,
        end=(ahead + 100) * MS,
    )
    profiles, _ = load(tmp_path)
    clock = align(profiles)[1]
    assert clock.error is not None
    assert 0.5 * MS <= clock.error <= 0.5 * MS + MOST_DRIFT * 20 * MS
    for time in (10 * MS, 23 * MS):
        assert abs(clock.own(time) - time - ahead * MS) <= clock.error
        assert abs(clock.shared(clock.own(time)) - time) <= 1
    found = costs(profiles, align(profiles))
    assert [found.late[rank].times for rank in range(2)] == [1, 1]
    shown = page(tmp_path)
    assert "Times of different machines are compared to 5" in shown
    assert "drift" not in shown  # less than its error


def drifting(folder: Path, shown: Callable[[float], float], seconds: int) -> None:
    """Write two ranks with a collective in each 0.1 s. When rank 0's clock shows `time`, in ms,
    rank 1's shows `shown(time)`. Each collective lasts 1 ms, but every third one 21 ms, since
    rank 0 or rank 1 is 20 ms late in it."""
    near, far = [], []
    for n in range(10 * seconds):
        late = [20 * (n % 6 == 0), 20 * (n % 6 == 3)]
        begins, end = [100 * n + each for each in late], 100 * n + max(late) + 1
        near.append(operation(n + 1, begins[0], end))
        far.append(operation(n + 1, shown(begins[1]), shown(end)))
    write(folder, 0, near, end=seconds * 1000 * MS)
    write(folder, 1, far, clock="two", end=int(shown(seconds * 1000) * MS))


@pytest.mark.parametrize("rate", [1e-4, -2e-4])
def test_clocks_that_drift_are_compared(rate: float, tmp_path: Path) -> None:
    """Within 60 s the drift of 100 ppm is 6 ms. It is found, and the error stays below 1 ms."""

    def shown(time: float) -> float:
        return 5000 + time * (1 + rate)

    drifting(tmp_path, shown, 60)
    profiles, _ = load(tmp_path)
    clock = align(profiles)[1]
    assert clock.error is not None
    assert clock.error <= 1.1 * MS  # each collective alone bounds the difference to 1 ms
    assert clock.drift == pytest.approx(abs(rate), abs=2 * 1.1 / 60_000)
    for time in range(0, 60_000, 1000):
        assert abs(clock.own(time * MS) - shown(time) * MS) <= clock.error + 1
        assert abs(clock.shared(int(shown(time) * MS)) - time * MS) <= clock.error + 1
    found = costs(profiles, align(profiles))
    assert [found.late[rank].times for rank in range(2)] == [100, 100]
    assert f"Their clocks drift by up to {clock.drift * 1e6:,.1f} µs in a second." in page(tmp_path)


def test_clocks_that_drift_unevenly_are_compared(tmp_path: Path) -> None:
    """After 20 s the clock of rank 1 gains 300 ppm, and after 40 s it loses them again."""

    def shown(time: float) -> float:
        return time + 3e-4 * (max(0, time - 20_000) - 2 * max(0, time - 40_000))

    drifting(tmp_path, shown, 60)
    profiles, _ = load(tmp_path)
    clock = align(profiles)[1]
    assert clock.error is not None
    assert len(clock.differences) > 1
    assert clock.error <= 2 * MS  # the difference changes by 6 ms
    for time in range(0, 60_000, 1000):
        # Uneven drift that keeps the bounds is not seen. They are 1 ms wide, with drift in between.
        assert abs(clock.own(time * MS) - shown(time) * MS) <= clock.error + 1.1 * MS


def test_a_difference_below_the_clocks_error_blames_no_rank(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(1, 10, 20)])
    write(tmp_path, 1, [operation(1, 11, 21)], clock="two")
    profiles, _ = load(tmp_path)
    found = costs(profiles, align(profiles))
    assert [found.late[rank].times for rank in range(2)] == [0, 0]


def test_without_a_common_collective_no_rank_is_blamed(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(1, 10, 20, kind="broadcast")])
    write(tmp_path, 1, [operation(1, 11, 21, kind="broadcast")], clock="two")
    assert "their clocks are not compared" in page(tmp_path)


def test_nodes_are_those_of_the_groups(tmp_path: Path) -> None:
    """Ranks 0 and 1 share memory, and ranks 2 and 3 do. A group over MPI adds no node."""
    of_all = {"key": "all", "name": "all", "ranks": [0, 1, 2, 3], "nodes": [0, 0, 1, 1]}
    over_mpi = {"key": "mpi", "name": "mpi", "ranks": [0, 1, 2, 3], "nodes": [0, 1, 2, 3]}
    for rank in range(4):
        ops = [operation(1, 0, 1, path="shm, MPI"), operation(1, 2, 3, group=1, path="MPI")]
        write(tmp_path, rank, ops, groups=[{**each, "rank": rank} for each in (of_all, over_mpi)])
    shown = page(tmp_path)
    assert shown.startswith("4 ranks on 2 nodes,")
    assert "All ranks have one clock." in shown


def test_a_row_has_operations_of_one_data(tmp_path: Path) -> None:
    data = ["staged", "zero-copy", "staged, zero-copy", "none"]
    for rank in range(2):
        ops = [operation(n + 1, 10 * n, 10 * n + 5, data=each) for n, each in enumerate(data)]
        write(tmp_path, rank, ops)
    profiles, _ = load(tmp_path)
    rows = costs(profiles, align(profiles)).rows
    assert {row.data: row.calls for row in rows} == dict.fromkeys(data, 2)
    shown = page(tmp_path)
    for each in data:
        assert f"segment│{each}" in shown.replace(" │", "│").replace("│ ", "│")


def test_a_zero_copy_operation_of_ordinary_tensors_needs_no_advice(tmp_path: Path) -> None:
    """Such a rank receives a broadcast from a tensor in another rank's segment."""
    for rank in range(2):
        write(tmp_path, rank, [operation(1, 0, 90, place="ordinary")])
    assert "outside of the segment" not in page(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(1, 10, 20), operation(2, 30, 0)], size=3, lost=7)
    write(tmp_path, 2, [operation(1, 10, 20)], size=3)
    shown = page(tmp_path)
    assert "rank 0: 7 earlier operations are not recorded" in shown
    assert "rank 0: 1 operations have not ended" in shown
    assert "rank 1: no file rank-1.json" in shown


def test_the_trace_has_every_operation_on_one_axis(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(1, 10, 12)])
    write(tmp_path, 1, [operation(1, 1010, 1012)], clock="two", begin=1000 * MS, end=1100 * MS)
    assert str(tmp_path / "trace.json") in page(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    begins = {one["pid"]: one["ts"] for one in events if one["ph"] == "b"}
    ends = {one["pid"]: one["ts"] for one in events if one["ph"] == "e"}
    drift = MOST_DRIFT * 2000  # within the 2 ms of the collective
    assert begins == {0: 10_000, 1: pytest.approx(10_000, abs=drift)}
    assert ends == {0: 12_000, 1: pytest.approx(12_000, abs=drift)}


def test_the_trace_has_the_waiting_and_the_last_rank(tmp_path: Path) -> None:
    for rank in range(2):
        write(tmp_path, rank, [operation(1, 10 + 4 * rank, 15)])
    page(tmp_path)
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    found = {one["pid"]: one["args"] for one in events if one["ph"] == "b"}
    assert (found[0]["waiting_us"], found[0]["last_rank"]) == (4000, 1)
    assert (found[1]["waiting_us"], found[1]["last_rank"]) == (0, -1)


def test_a_file_in_the_place_of_the_folder_is_an_error(tmp_path: Path) -> None:
    write(tmp_path, 0, [operation(1, 10, 15)])
    file = str(tmp_path / "rank-0.json")
    result = CliRunner().invoke(app, ["profile", file], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert "is a file: name the folder of the files" in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        (None, "has no files rank-N.json: run the program with HBMCOMM_PROFILE="),
        ("{", "is not a file of a profile"),
        ("[]", "is not a file of a profile"),
        ('{"version": 1}', "rank-0.json has version 1 of the format of profiles, and"),
        (
            '{"version": 1}',
            f"reads version {VERSION}: record the profile again, or show it with the release",
        ),
        ('{"version": "?"}', "rank-0.json has version ? of the format of profiles, and"),
        (f'{{"version": {VERSION}}}', "is not a file of a profile"),
    ],
)
def test_a_wrong_folder_is_an_error(text: str | None, cause: str, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "rank-0.json").write_text(text)
    result = CliRunner().invoke(app, ["profile", str(tmp_path)], env={"COLUMNS": "200"})
    assert result.exit_code == 1
    assert cause in " ".join(result.output.split())
