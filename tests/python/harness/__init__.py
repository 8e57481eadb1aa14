"""Test harness of the process group: pools of ranks, reference results, scripts run as users do.

A test sends a module-level function to every rank of a pool (`pool.run(function, *arguments)`).
Each rank calls function(context, *arguments) with its `Context`. run() returns the results as a
list by rank.
"""

import pytest

from harness.context import BACKEND, SHORT_TIMEOUT, Context, all_world_sizes
from harness.pool import Pool, RankFailure

# For tests that fail if HBMCOMM_TEST_BACKEND=gloo runs them over Gloo instead of hbm.
beyond_gloo = pytest.mark.skipif(BACKEND == "gloo", reason="Gloo cannot do this")

__all__ = [
    "BACKEND",
    "SHORT_TIMEOUT",
    "Context",
    "Pool",
    "RankFailure",
    "all_world_sizes",
    "beyond_gloo",
]
