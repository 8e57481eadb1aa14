"""Fits lines to bounds: the difference of two clocks over time, between bounds at single times.

A line is the middle of all lines that keep the bounds. If no line keeps all bounds, because the
clocks drift unevenly, the time is cut in two, and each half gets lines of its own. Uneven drift is
not seen if a line keeps all bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Point = tuple[float, float]  # a time and a difference

MOST_DRIFT = 1e-3
"""The most by which the difference of two clocks changes per unit of time. Linux changes the rate
of a clock by up to 500 ppm."""

_STEPS = 100  # of a search: halves or thirds of the interval


@dataclass(frozen=True)
class Bounds:
    """At one meeting: the difference is above `least` at one time, and below `most` at another."""

    least: Point
    most: Point


@dataclass(frozen=True)
class Line:
    """The difference from `begin` to `end`."""

    begin: float
    end: float
    at_begin: float
    at_end: float
    error: float  # the difference is wrong by at most this, between `begin` and `end`

    @property
    def change(self) -> float:
        """The absolute change of the difference from `begin` to `end`."""
        return abs(self.at_end - self.at_begin)

    @property
    def drift(self) -> float:
        """The change of the difference per unit of time."""
        if self.end == self.begin:
            return 0.0
        return (self.at_end - self.at_begin) / (self.end - self.begin)


def lines(bounds: Sequence[Bounds], begin: float, end: float) -> list[Line]:
    """Return the lines that cover the time from `begin` to `end`, in their order.

    bounds: at least one, in the order of time.
    """
    line, is_kept = _middle(bounds, begin, end)
    if is_kept or len(bounds) == 1:
        return [line]
    half = len(bounds) // 2
    cut = min(max(begin, bounds[half].most[0]), end)
    return lines(bounds[:half], begin, cut) + lines(bounds[half:], cut, end)


def _middle(bounds: Sequence[Bounds], begin: float, end: float) -> tuple[Line, bool]:
    """Return the middle of the lines that keep the bounds, and True; or False if none does. Then
    each bound is relaxed by twice the least amount with which a line keeps it."""
    low = _upper_hull([one.least for one in bounds])
    high = [(x, -y) for x, y in _upper_hull([(x, -y) for x, y in (one.most for one in bounds)])]

    def highest(slope: float) -> float:
        return min(y - slope * x for x, y in high)

    def lowest(slope: float) -> float:
        return max(y - slope * x for x, y in low)

    def room(slope: float) -> float:
        return highest(slope) - lowest(slope)

    best = _argmax(room, -MOST_DRIFT, MOST_DRIFT)
    slack = max(0.0, -room(best))
    slopes = [
        _last(lambda slope: room(slope) + 2 * slack >= 0, best, edge)
        for edge in (-MOST_DRIFT, MOST_DRIFT)
    ]

    def extremes(time: float) -> tuple[float, float]:
        """Return the least and the greatest difference of a line that keeps the bounds."""

        def above(slope: float) -> float:
            return highest(slope) + slack + slope * time

        def below(slope: float) -> float:
            return slack - lowest(slope) - slope * time

        return -below(_argmax(below, *slopes)), above(_argmax(above, *slopes))

    (low_begin, high_begin), (low_end, high_end) = extremes(begin), extremes(end)
    error = max(high_begin - low_begin, high_end - low_end, 0.0) / 2
    middles = (low_begin + high_begin) / 2, (low_end + high_end) / 2
    return Line(begin, end, *middles, error), slack == 0


def _upper_hull(points: Sequence[Point]) -> list[Point]:
    """Return the corners of the upper hull: a line above them is above all points."""
    hull: list[Point] = []
    for x, y in sorted(points):
        while len(hull) > 1:
            (x0, y0), (x1, y1) = hull[-2:]
            if (x1 - x0) * (y - y0) < (y1 - y0) * (x - x0):
                break
            hull.pop()
        hull.append((x, y))
    return hull


def _argmax(function: Callable[[float], float], least: float, most: float) -> float:
    """Return where a concave function is greatest."""
    for _ in range(_STEPS):
        third = (most - least) / 3
        if function(least + third) < function(most - third):
            least += third
        else:
            most -= third
    return (least + most) / 2


def _last(holds: Callable[[float], bool], inside: float, edge: float) -> float:
    """Return the last value from `inside` to `edge` for which `holds`, which is true of `inside`
    and of all values up to the last one."""
    if holds(edge):
        return edge
    for _ in range(_STEPS):
        middle = (inside + edge) / 2
        if holds(middle):
            inside = middle
        else:
            edge = middle
    return inside
