"""ratio="auto": the choice that follows from given times, and how long it holds."""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from itertools import cycle
from typing import Any
from unittest import mock

import pytest
import torch
from harness.automatic import scripted

from torch_hbmcomm.error_feedback import automatic
from torch_hbmcomm.error_feedback.automatic import (
    MARGIN,
    STEPS_HELD,
    Automatic,
    Found,
    Step,
    Times,
    Way,
    choose,
    trials,
)

OFF, NARROW, ENCODED = Way


@dataclass
class Link:
    """The times of a training, in seconds.

    steps: the time of a step, by way. own: the time of the hook itself in a step, by way.
    bursts: factors of the time of the encoder's steps, in turn.
    """

    steps: dict[Way, float]
    wait: float
    busy: float
    own: dict[Way, float]
    bursts: tuple[float, ...] = (1.0,)

    def __post_init__(self) -> None:
        self._factors = cycle(self.bursts)

    def times(self, step: Step) -> Times:
        own = self.own.get(step.way, 0.0)
        estimate = own if own > step.allowance else None
        factor = next(self._factors) if step == Step(ENCODED) else 1.0
        return Times(factor * self.steps[step.way], self.wait, self.busy, estimate)


def play(
    link: Link, current: Way = OFF, warm: int = 0, even: bool = True
) -> tuple[Found, list[Step]]:
    """Return the result of trials(), and the steps that it takes."""
    taken = []
    running = trials(current, warm, even)
    step = next(running)
    while True:
        taken.append(step)
        try:
            step = running.send(link.times(step))
        except StopIteration as end:
            return end.value, taken


def measured(taken: list[Step]) -> set[Way]:
    """Return the ways that took steps without an allowance."""
    return {step.way for step in taken if step.allowance == math.inf}


SLOW = Link({OFF: 1.0, NARROW: 0.6, ENCODED: 0.3}, 0.8, 0.8, {NARROW: 0.01, ENCODED: 0.1})


def test_a_fast_link_tries_nothing() -> None:
    link = Link({OFF: 1.0, NARROW: 0.1, ENCODED: 0.1}, 0.9 * MARGIN, 0.5, {})
    found, taken = play(link, warm=2)
    assert choose(found.steps) is OFF
    assert {step.way for step in taken} == {OFF}


def test_a_slow_link_takes_the_ratio() -> None:
    found, taken = play(SLOW)
    assert choose(found.steps) is ENCODED
    assert found.steps[OFF] == 1.0 and found.wait == 0.8
    assert measured(taken) == {OFF, ENCODED}, "bfloat16 cannot win, so it is not measured"


def test_a_slow_encoder_leaves_bfloat16() -> None:
    link = Link(SLOW.steps, 0.8, 0.8, {NARROW: 0.01, ENCODED: 0.75})
    found, taken = play(link)
    assert choose(found.steps) is NARROW
    assert measured(taken) == {OFF, NARROW}
    assert sum(step.way is ENCODED for step in taken) == 2, "one more trial, as memory is warm then"


def test_a_hook_without_hope_is_tried_once() -> None:
    link = Link({OFF: 1.0, NARROW: 3.0, ENCODED: 9.0}, 0.3, 0.3, {NARROW: 2.0, ENCODED: 8.0})
    found, taken = play(link)
    assert choose(found.steps) is OFF
    assert [step.way for step in taken if step.way is not OFF] == [NARROW]


def test_bfloat16_may_win_where_most_communication_is_hidden() -> None:
    link = Link({OFF: 1.0, NARROW: 0.75, ENCODED: 0.8}, 0.3, 1.0, {NARROW: 0.05, ENCODED: 0.1})
    found, _ = play(link)
    assert choose(found.steps) is NARROW


@pytest.mark.parametrize(
    ("steps", "chosen"),
    [
        ({OFF: 1.0}, OFF),
        ({OFF: 1.0, NARROW: 0.95, ENCODED: 0.95}, OFF),
        ({OFF: 1.0, NARROW: 0.95, ENCODED: 0.85}, ENCODED),
        ({OFF: 1.0, NARROW: 0.8, ENCODED: 0.75}, NARROW),
        ({OFF: 1.0, NARROW: 0.8, ENCODED: 0.7}, ENCODED),
        ({OFF: 1.0, ENCODED: 2.0}, OFF),
    ],
)
def test_a_way_that_costs_more_accuracy_has_to_save_more(
    steps: dict[Way, float], chosen: Way
) -> None:
    assert choose(steps) is chosen


def test_a_slower_way_ends_early() -> None:
    link = Link({OFF: 1.0, NARROW: 1.5, ENCODED: 1.5}, 0.8, 0.8, {NARROW: 0.01, ENCODED: 0.1})
    found, taken = play(link)
    assert choose(found.steps) is OFF
    for way in (NARROW, ENCODED):
        assert sum(step == Step(way) for step in taken) == 2


def test_a_ratio_that_still_wins_costs_two_plain_steps() -> None:
    found, taken = play(SLOW, current=ENCODED)
    assert choose(found.steps) is ENCODED
    assert sum(step.way is OFF for step in taken) == 2
    assert {step.way for step in taken} == {OFF, ENCODED}


@pytest.mark.parametrize("current", [NARROW, ENCODED])
def test_a_link_that_became_fast_turns_the_hook_off(current: Way) -> None:
    link = Link({OFF: 1.0, NARROW: 1.1, ENCODED: 1.3}, 0.05, 0.2, {NARROW: 0.1, ENCODED: 0.3})
    found, _ = play(link, current=current)
    assert choose(found.steps) is OFF


@pytest.mark.parametrize("current", list(Way))
def test_a_link_that_became_slow_takes_the_ratio(current: Way) -> None:
    found, _ = play(SLOW, current=current)
    assert choose(found.steps) is ENCODED


@pytest.mark.parametrize("warm", [0, 3, 50])
def test_a_warm_up_is_not_measured(warm: int) -> None:
    taken = play(SLOW, warm=warm)[1]
    assert taken[:warm] == [Step(OFF)] * warm
    assert len(taken) - warm == len(play(SLOW)[1])


# Six steps that send nothing, and four that send what waited.
BURSTS = (0.1, 0.1, 3.1, 0.1, 2.1, 0.1, 2.1, 0.1, 2.1, 0.1)


@pytest.mark.parametrize("current", list(Way))
def test_bursts_are_judged_by_their_mean(current: Way) -> None:
    link = Link({OFF: 1.0, NARROW: 0.7, ENCODED: 0.9}, 0.8, 0.8, {}, BURSTS)
    found, _ = play(link, current, even=False)
    assert found.steps[ENCODED] == pytest.approx(0.9)
    assert choose(found.steps) is NARROW, "the median step sends nothing, and would win"


def test_bursts_that_pay() -> None:
    link = Link({OFF: 1.0, NARROW: 0.7, ENCODED: 0.3}, 0.8, 0.8, {}, BURSTS)
    found, _ = play(link, even=False)
    assert found.steps[ENCODED] == pytest.approx(0.3)
    assert choose(found.steps) is ENCODED


def test_slow_bursts_end_early() -> None:
    link = Link({OFF: 1.0, NARROW: 1.5, ENCODED: 1.5}, 0.8, 0.8, {NARROW: 0.01, ENCODED: 0.1})
    found, taken = play(link, even=False)
    assert choose(found.steps) is OFF
    assert taken.count(Step(ENCODED)) == 3, "one finds a threshold, and two are measured"


def test_the_search_for_a_threshold_has_no_allowance() -> None:
    """In the first step of the encoder each decision waits for gradients that go whole."""
    link = Link({OFF: 1.0, NARROW: 0.7, ENCODED: 0.3}, 0.2, 0.8, {NARROW: 0.01})
    searched = False

    def times(step: Step) -> Times:
        nonlocal searched
        own = 0.0 if step.way is not ENCODED or searched else 0.8
        searched = searched or step.way is ENCODED
        return Times(link.steps[step.way], 0.2, 0.8, own if own > step.allowance else None)

    with mock.patch.object(link, "times", times):
        found, taken = play(link, even=False)
    assert taken[[step.way for step in taken].index(ENCODED)] == Step(ENCODED)
    assert choose(found.steps) is ENCODED


class Alone:
    """The averages of one rank."""

    def agree(self, values: torch.Tensor) -> torch.Tensor:
        return values


@pytest.mark.parametrize("chosen", list(Way))
def test_a_choice_holds_for_a_thousand_steps(chosen: Way) -> None:
    assert STEPS_HELD == 1000
    reads = 0

    def clock() -> float:
        nonlocal reads
        reads += 1
        return float(reads)

    averager: Any = Alone()
    ways: list[Way] = []
    reading: list[int] = []  # steps that read the clock
    script = [Step(OFF), Step(NARROW)]
    with mock.patch.object(automatic, "_clock", clock), scripted(script, chosen):
        choosing = Automatic(averager, 0, 1, 0, True, logging.getLogger("alone"))
        for step in range(2 * (len(script) + STEPS_HELD)):
            before = reads
            choosing.begin_step()
            assert choosing.now() >= 0
            ways.append(choosing.way)
            if reads > before:
                reading.append(step)
    period = [OFF, NARROW, *[chosen] * STEPS_HELD]
    assert ways == period * 2
    begins = [0, len(period)]
    assert reading == [one for begin in begins for one in range(begin, begin + len(script) + 1)], (
        "the step after the last measured one reads its end"
    )
