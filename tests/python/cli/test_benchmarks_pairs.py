"""benchmarks.pairs."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from benchmarks import pairs
from torch_hbmcomm.bench.result import Result, describe_machine

STATES = ("off", "on")


def test_a_ratio_is_of_the_two_samples_of_a_pair() -> None:
    """The machine gets slower by and by. In each pair the second state costs a tenth."""
    found = pairs.measurements(
        {"work": "step"}, STATES, [(float(n), 1.1 * n) for n in range(1, 12)]
    )
    assert [one.contender for one in found] == ["off", "on"]
    assert found[0].median == 6
    assert all(value == pytest.approx(1.1) for value in found[1].values.values())
    console = Console(width=160)
    with console.capture() as shown:
        console.print(pairs.table("Calls", "work", STATES, found))
    assert "1.1000 to 1.1000" in shown.get()
    result = Result("profile_cost", describe_machine(), {"pairs": 11}, measurements=found)
    (off, on) = json.loads(result.to_json())["measurements"]
    assert "values" not in off
    assert on["values"]["ratio_median"] == pytest.approx(1.1)


def test_the_order_of_a_pair_alternates() -> None:
    order: list[str] = []

    def first() -> float:
        order.append("first")
        return 1.0

    def second() -> float:
        order.append("second")
        return 2.0

    assert pairs.take(first, second, 3) == [(1.0, 2.0)] * 3
    assert order == ["first", "second", "second", "first", "first", "second"]


def test_a_sample_of_a_job_is_of_its_slowest_rank() -> None:
    assert pairs.slowest([[(1.0, 5.0), (2.0, 2.0)], [(3.0, 4.0), (1.0, 6.0)]]) == [
        (3.0, 5.0),
        (2.0, 6.0),
    ]
