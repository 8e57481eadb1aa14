"""Chooses how a hook sends, from times that it measures: ratio="auto".

There are three ways. OFF averages the gradients whole, as DDP does. NARROW averages them whole as
bfloat16. With ENCODED the encoder chooses a part.

trials() says which way each of the first steps takes, and choose() compares their times. Both are
pure: they see only numbers that are equal on all ranks, so all ranks choose the same. Automatic
measures a rank's times, and makes them equal on all ranks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Generator, Mapping
from enum import Enum
from statistics import fmean, median
from typing import NamedTuple

import torch

from torch_hbmcomm.error_feedback.averaging import Averager
from torch_hbmcomm.error_feedback.config import AUTO_RATIO

MARGIN = 0.1
"""A way that sends less has to shorten the step by this part, because it costs accuracy. The ways
in the order in which they cost more: OFF, NARROW, ENCODED."""

STEPS_HELD = 1000
"""Steps between a choice and the next measurement."""

_WARM = 2  # first steps: DDP arranges its buckets, and the ranks connect
_STEPS = 5  # measured steps of a way that sends evenly
_UNEVEN_STEPS = round(1 / (1 - AUTO_RATIO))  # of another: the mean wait of a layer
_CLEAR = 1.5  # a way whose step takes this many times as long as another's has lost
_TELLING = 0.1  # the part of the bytes from which on an estimate for all bytes is made
_HOPELESS = 3.0  # an estimate this many times above the allowance needs no second trial

_clock = time.perf_counter


class Way(Enum):
    """How a step sends. The value is the part of the bytes that the step does not send."""

    OFF = 0.0
    NARROW = 0.5
    ENCODED = AUTO_RATIO


class Step(NamedTuple):
    """The way of a step.

    allowance: the longest time of the hook itself in this step, in seconds. If an estimate exceeds
    it, the step's other buckets go whole.
    """

    way: Way
    allowance: float = math.inf


class Times(NamedTuple):
    """The times of a step, in seconds, equal on all ranks.

    step: from the step's first bucket to the next step's first bucket; the mean over the ranks.
    wait: from the last bucket's gradients to the last average. It is the least of all ranks: other
        ranks also wait for that rank.
    busy: from the first bucket's gradients to the last average; the least of all ranks.
    estimate: the time of the hook itself in a whole step, if it exceeded the allowance; otherwise
        None.
    """

    step: float
    wait: float
    busy: float
    estimate: float | None = None


class Found(NamedTuple):
    """The result of trials(), in seconds.

    steps: the time of a step, for each way that was measured to its end. OFF is always there.
    wait: the wait of a step with OFF.
    """

    steps: Mapping[Way, float]
    wait: float


def choose(steps: Mapping[Way, float]) -> Way:
    """Return the way with the shortest step. A way that costs more accuracy has to be shorter by
    MARGIN. steps: seconds of a step, for OFF and other ways."""
    chosen = Way.OFF
    for way in (Way.NARROW, Way.ENCODED):
        if steps.get(way, math.inf) < (1 - MARGIN) * steps[chosen]:
            chosen = way
    return chosen


def trials(current: Way, warm: int = 0, even: bool = True) -> Generator[Step, Times, Found]:
    """Yield each step, get its times, and return the measurements.

    A way is tried only if it may win. It saves at most the wait, and bfloat16 at most half of the
    time in which something is sent. The first trial has an allowance. So on a fast link it ends
    with the first buckets. bfloat16 comes first, because it needs less of the hook's own time than
    the encoder. If its time is too long, the encoder's is, too.

    Args:
        current: the way of the steps before
        warm: the number of first steps, which go whole and are not measured
        even: False: the encoder's steps send unequal bytes
    """
    for _ in range(warm):
        yield Step(Way.OFF)
    steps: dict[Way, float] = {}
    if current is not Way.OFF:
        steps[current] = yield from _measure(current, math.inf, even)
        yield Step(Way.OFF)  # also sends the residuals
    limit = _CLEAR * steps.get(current, math.inf)
    plain = [(yield Step(Way.OFF))]
    while len(plain) < _STEPS and plain[-1].step < limit:
        plain.append((yield Step(Way.OFF)))
    off = steps[Way.OFF] = median(one.step for one in plain)
    wait = median(one.wait for one in plain)
    most = wait - MARGIN * off
    if most <= 0:
        return Found(steps, wait)
    if Way.ENCODED not in steps:
        if not (yield from _may_pay(Way.NARROW, most)):
            return Found(steps, wait)
        if not even:
            yield Step(Way.ENCODED)  # finds a threshold, behind gradients that all go whole
        if (yield from _may_pay(Way.ENCODED, most)):
            steps[Way.ENCODED] = yield from _measure(Way.ENCODED, off, even)
    best_narrow = off - min(wait, median(one.busy for one in plain) / 2)
    bounds = {Way.NARROW: best_narrow} | steps  # as if bfloat16 were as fast as it can be
    if Way.NARROW not in steps and choose(bounds) is Way.NARROW:
        steps[Way.NARROW] = yield from _measure(Way.NARROW, off)
    return Found(steps, wait)


def _measure(way: Way, off: float, even: bool = True) -> Generator[Step, Times, float]:
    """Return the time of a step. Ends early if two steps were longer than steps with OFF.

    If the encoder's steps send unequal bytes, the median step may send nothing. So the result is
    then the mean of more steps.
    """
    uneven = way is Way.ENCODED and not even
    steps = _UNEVEN_STEPS if uneven else _STEPS
    found: list[float] = []
    while len(found) < steps and not (len(found) == 2 and min(found) > off):
        found.append((yield Step(way)).step)
    return fmean(found) if uneven else median(found)


def _may_pay(way: Way, allowance: float) -> Generator[Step, Times, bool]:
    """Try a way within an allowance. The first trial also allocates memory, so there are two."""
    first = (yield Step(way, allowance)).estimate
    if first is None or first > _HOPELESS * allowance:
        return first is None
    return (yield Step(way, allowance)).estimate is None


class Automatic:
    """Measures steps, and chooses their way. All ranks of the group make it together.

    begin_step() is called before the first bucket of each step, and watch() after each bucket is on
    its way, on all ranks in the same order. While a choice holds, neither communicates nor
    measures.

    Threads: the thread of DDP's hooks calls all methods. The thread that completes an average adds
    a time to a list, before it completes the future that DDP waits for. So the list is complete
    before the next step begins.

    Args:
        warmup: the number of first steps that go whole
        even: as of trials()
        logger: gets a line for the first choice and for each that differs from the one before, on
            rank 0

    way: the way of the step. gave_up: True from the bucket on at which the step's estimate exceeded
    its allowance.
    """

    def __init__(
        self,
        averager: Averager,
        rank: int,
        ranks: int,
        warmup: int,
        even: bool,
        logger: logging.Logger,
    ) -> None:
        self._even = even
        self._averager = averager
        self._rank, self._ranks = rank, ranks
        self._logger = logger
        self._chosen: Way | None = None
        self._found: Found | None = None
        self._held = 0  # steps for which the choice still holds; 0: measuring
        self._began: float | None = None  # the begin of the measured step
        self._step_bytes = 0  # the gradients' bytes in the last measured step
        self._trials = trials(Way.OFF, max(_WARM, warmup), self._even)
        self._step = next(self._trials)
        self._clear()

    @property
    def way(self) -> Way:
        return self._step.way

    @property
    def encodes(self) -> bool:
        """True if the encoder has chosen the sent part of every bucket of the step so far."""
        return self._step.way is Way.ENCODED and not self.gave_up

    def _clear(self) -> None:
        self.gave_up = False
        self._estimate = self._own = 0.0
        self._bytes = 0
        self._sent = math.nan  # when the last bucket was on its way
        self._arrived: list[float] = []
        self._blind = False

    def begin_step(self) -> None:
        """Choose the way of the next step."""
        if self._held > 1:
            self._held -= 1
            return
        if self._held == 1:
            self._held = 0
            self._trials = trials(self._step.way, even=self._even)
            self._step = next(self._trials)
        elif self._began is not None:
            self._go_on(self._times(_clock() - self._began))
        self._clear()
        self._began = None if self._held else _clock()

    def _go_on(self, times: Times) -> None:
        """Pass a step's times to the trials, and take the next step from them."""
        try:
            self._step = self._trials.send(times)
        except StopIteration as end:
            self._found = end.value
            chosen = choose(self._found.steps)
            self._step, self._held = Step(chosen), STEPS_HELD
            if chosen is not self._chosen and self._rank == 0:
                self._logger.info("%s", _line(chosen, self._found))
            self._chosen = chosen

    def watch(
        self, future: torch.futures.Future[torch.Tensor], buffer: torch.Tensor, began: float
    ) -> torch.futures.Future[torch.Tensor]:
        """Measure a bucket that is on its way. Returns the future that DDP is to wait for.

        began: now() before the bucket
        """
        if self._held:
            return future
        self._sent = _clock()
        self._own += self._sent - began
        self._bytes += buffer.nbytes
        self._blind = self._blind or not buffer.is_cpu
        if self._step.allowance < math.inf and not self.gave_up:
            self._estimate_own()
        arrived = self._arrived

        def stamp(done: torch.futures.Future[torch.Tensor]) -> torch.Tensor:
            arrived.append(_clock())
            return done.value()

        return future.then(stamp)

    def now(self) -> float:
        """Return the time, in seconds; 0 if nothing is measured."""
        return 0.0 if self._held else _clock()

    def _estimate_own(self) -> None:
        """Estimate the hook's own time in the whole step, and give up if it is too long."""
        own = min(one for one, *_ in self._everyones(self._own))
        share = self._bytes / max(self._step_bytes, 1)
        self._estimate = own / share if share > _TELLING else own
        self.gave_up = self._estimate > self._step.allowance

    def _times(self, seconds: float) -> Times:
        """Return the times of the step that has ended."""
        last = max(self._arrived, default=math.nan)
        wait, busy = last - self._sent, last - (self._began or 0.0)
        if self._blind or math.isnan(wait):  # the host does not see when a device's averages arrive
            wait = busy = seconds
        self._step_bytes = self._bytes
        steps, waits, busies = zip(*self._everyones(seconds, wait, busy), strict=True)
        estimate = self._estimate if self.gave_up else None
        return Times(fmean(steps), max(0.0, min(waits)), max(0.0, min(busies)), estimate)

    def _everyones(self, *own: float) -> list[list[float]]:
        """Return the numbers of each rank, by rank. Every rank gets the same bits."""
        numbers = torch.zeros(self._ranks, len(own), dtype=torch.float64)
        numbers[self._rank] = torch.tensor(own, dtype=torch.float64)
        found: list[list[float]] = self._averager.agree(numbers).mul_(self._ranks).tolist()
        return found

    def summary(self) -> dict[str, float]:
        """Return the choice and the times behind it, for the state's summary()."""
        steps = {} if self._found is None else self._found.steps
        chosen = self._chosen
        return {
            "chosen_ratio": -1.0 if chosen is None else chosen.value,
            "chosen_step_seconds": -1.0 if chosen is None else steps[chosen],
            "plain_step_seconds": steps.get(Way.OFF, -1.0),
            "plain_wait_seconds": -1.0 if self._found is None else self._found.wait,
        }


def _line(chosen: Way, found: Found) -> str:
    names = {Way.OFF: "plain", Way.NARROW: "bfloat16", Way.ENCODED: f"R = {Way.ENCODED.value}"}
    does = {
        Way.OFF: "turned itself off",
        Way.NARROW: "sends everything as bfloat16",
        Way.ENCODED: f"takes ratio={Way.ENCODED.value}",
    }
    steps = ", ".join(f"{names[way]} {1e3 * one:.1f} ms" for way, one in found.steps.items())
    return (
        f'the hook with ratio="auto" {does[chosen]}: a plain step waits {1e3 * found.wait:.1f} ms '
        f"for communication; measured steps: {steps}"
    )
