"""The seeds of random tests.

HBMCOMM_TEST_SEED is the seed of a run, fresh by default. A test draws its seeds from the variable
and the test's name alone, so it has the same data when it runs alone. A failed test prints the
variable. The native tests read the same variable (tests/native/seeds.h).
"""

from __future__ import annotations

import os
import random
import zlib
from itertools import count

import torch

VARIABLE = "HBMCOMM_TEST_SEED"

_test = ""
_asked = count()


def settle() -> int:
    """Return the run's seed, which child processes inherit."""
    return int(os.environ.setdefault(VARIABLE, str(random.SystemRandom().randrange(1 << 31))))


def begin(test: str) -> None:
    """Begin the seeds of `test`. The first seed goes to the generators of `random` and PyTorch."""
    global _test, _asked
    _test, _asked = test, count()
    seed = fresh()
    random.seed(seed)
    torch.manual_seed(seed)


def fresh() -> int:
    """Return another seed of the running test, at least 0 and below 2**31."""
    return _drawn(next(_asked))


def draws(part: object) -> random.Random:
    """Return the generator of a part of the running test, a thread for example."""
    return random.Random(_drawn(part))


def generator(part: object) -> torch.Generator:
    """Return PyTorch's generator of a part of the running test."""
    return torch.Generator().manual_seed(_drawn(part))


def _drawn(part: object) -> int:
    return zlib.crc32(f"{settle()} {part!r} {_test}".encode()) & 0x7FFFFFFF
