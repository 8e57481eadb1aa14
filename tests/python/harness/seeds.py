"""The seeds of random tests.

HBMCOMM_TEST_SEED is the seed of a run, fresh by default. A test's own seeds depend on it and on the
test's name alone, so one test by itself repeats its data. A failed test prints the variable. The
native tests read the same variable (tests/native/seeds.h).
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
    """Begin the seeds of `test`, and seed the generators of `random` and PyTorch with the first."""
    global _test, _asked
    _test, _asked = test, count()
    seed = fresh()
    random.seed(seed)
    torch.manual_seed(seed)


def fresh() -> int:
    """Return another seed of the running test, at least 0 and below 2**31."""
    drawn = zlib.crc32(f"{settle()} {next(_asked)} {_test}".encode())
    return drawn & 0x7FFFFFFF
