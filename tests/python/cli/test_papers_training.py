"""Sections of papers.async_sgd whose workers train: straggler and accuracy."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from rich.console import Console

from papers.async_sgd.__main__ import SECTIONS
from papers.async_sgd.plan import QUICK, Plan
from papers.async_sgd.straggler import DDP, SHM, of_turns
from torch_hbmcomm.bench.result import Measurement, run, sampled


@pytest.mark.full
@pytest.mark.parametrize("name", ["straggler", "accuracy"])
def test_all_contenders_take_part(name: str) -> None:
    if name == "accuracy":
        pytest.importorskip("sklearn")
    result = run("async_sgd", SECTIONS, Plan(sections=[name], **QUICK))
    assert not result.unavailable
    assert DDP in {one.contender for one in result.measurements}
    assert all(one.minimum > 0 for one in result.measurements)
    lines = shown(name, result.measurements)
    assert all(any(one.contender in line for line in lines) for one in result.measurements)


def test_a_straggler_is_compared_round_by_round() -> None:
    found = [
        # The machine's speed differs between the turns.
        *of_turns(SHM, [10.0, 100.0, 50.0], [9.8, 97.0, 60.0]),
        *of_turns(DDP, [40.0, 40.0, 40.0], [8.0, 8.0, 8.0]),
    ]
    verdict, *others = SECTIONS["straggler"].verdicts(found)
    assert not others, "DDP has no goal"
    assert verdict.reached
    assert verdict.text == f"{SHM}: 98.0% of the speed alone (≥ 95%)"
    assert any(DDP in line and "20.0%" in line for line in shown("straggler", found))


def test_accuracy_is_compared_with_ddp() -> None:
    found = [
        took("accuracy", contender, "16 epochs", samples)
        for contender, samples in (
            (DDP, [98.0, 99.0]),
            ("close", [98.5, 97.5]),
            ("far", [98.0, 97.0]),
        )
    ]
    close, far = SECTIONS["accuracy"].verdicts(found)
    assert (close.text, close.reached) == ("close: -0.50 points (≥ -0.5)", True)
    assert (far.text, far.reached) == ("far: -1.00 points (≥ -0.5)", False)
    assert any("98.50" in line for line in shown("accuracy", found))


def took(section: str, contender: str, case: str, samples: list[float]) -> Measurement:
    return sampled({"section": section, "case": case}, contender, samples, "")


def shown(name: str, found: Sequence[Measurement]) -> list[str]:
    console = Console(width=160)
    with console.capture() as captured:
        for part in SECTIONS[name].render(found):
            console.print(part)
    return captured.get().splitlines()
