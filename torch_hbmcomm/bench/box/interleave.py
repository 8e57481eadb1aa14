"""Times contenders side by side: in every round, each in turn runs a block of calls."""

from collections.abc import Callable, Mapping

Timed = Callable[[int], float]
"""Does its operation so many times, one after the other; returns the seconds that they took."""

_BLOCK_SECONDS = 10e-3
_MOST_CALLS = 10_000

Samples = dict[str, list[float]]
"""For each contender, microseconds a call by round."""


def interleave(contenders: Mapping[str, Timed], rounds: int) -> Samples:
    calls = {name: _block_length(timed) for name, timed in contenders.items()}
    samples: Samples = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, timed in contenders.items():
            timed(1)  # brings this one's buffers and threads back to work
            samples[name].append(timed(calls[name]) / calls[name] * 1e6)
    return samples


def _block_length(timed: Timed) -> int:
    timed(1)
    estimate = max(timed(2) / 2, 1e-9)
    return max(1, min(_MOST_CALLS, int(_BLOCK_SECONDS / estimate)))
