"""Tensors of the accelerator between several nodes, whole and in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from harness import Context, Pool, accelerator, beyond_gloo
from harness.cases import cases
from harness.collectives import (
    Reduction,
    all_gather,
    all_reduce,
    all_to_all_single_unequal,
    check_move,
    check_reduction,
    reduce_scatter_tensor,
)
from harness.device_calls import check_random_calls
from harness.nodes import on_nodes, reduced_over_nodes

pytestmark = beyond_gloo

LARGEST = 100_000  # elements: 12 chunks and more, of each type


class Cluster:
    """Ranks of one machine in a layout of nodes, each with the accelerator."""

    def __init__(self, layout: str) -> None:
        self.layout = layout
        self.pool = Pool(
            len(layout),
            bare=True,
            device=accelerator.NAME,
            environment={"HBMCOMM_DEVICE_CHUNK_BYTES": "8K"},
        )

    def run(self, call: Callable[..., Any], *arguments: Any) -> None:
        self.pool.run(on_nodes, self.layout, call, *arguments, limit=240)


@pytest.fixture(scope="module", params=cases(["ab", "aabb", "aaab", "abab"], quick=["ab"]))
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    made = Cluster(request.param)
    yield made
    assert not any(made.pool.close()), "a rank left with an error code"


def test_random_calls(cluster: Cluster) -> None:
    for _ in range(5):
        cluster.run(check_random_calls, LARGEST)


@pytest.mark.full
@pytest.mark.parametrize("move", [all_gather, all_to_all_single_unequal])
def test_move(cluster: Cluster, move: Callable[..., Any]) -> None:
    cluster.run(check_move, move)


def check(context: Context, reduction: Reduction, name: str, layout: str) -> None:
    check_reduction(context, reduction, name, partial(reduced_over_nodes, layout=layout))


@pytest.mark.full
@pytest.mark.parametrize(
    ("reduction", "name"), [(all_reduce, "sum"), (reduce_scatter_tensor, "avg")]
)
def test_reduction(cluster: Cluster, reduction: Reduction, name: str) -> None:
    cluster.run(check, reduction, name, cluster.layout)
