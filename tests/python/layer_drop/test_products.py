"""Products with thin factors, and the passes around them, beside a second implementation."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from torch_hbmcomm.layer_drop import products
from torch_hbmcomm.layer_drop.passes import moment, unpack, unpack_around

SHAPES = [(1, 1, 1), (3, 64, 147), (30, 256, 300), (1, 1000, 65), (17, 5, 129), (64, 33, 2)]
SIZES = [1.0, 1e-30, 1e15]
DTYPES = [torch.float32, torch.float64]


@pytest.fixture(params=["as installed", "without oneDNN"])
def way(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "without oneDNN":
        monkeypatch.setattr(products, "_LINEAR", None)
    return str(request.param)


def random(rows: int, columns: int, dtype: torch.dtype, size: float = 1.0) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * rows + columns)
    return torch.randn(rows, columns, generator=draw, dtype=dtype) * size


def assert_near(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compare with the product in float64; the bound is of its terms' sizes."""
    wide = left.double(), right.double()
    bound = (wide[0].abs() @ wide[1].abs()) * torch.finfo(found.dtype).eps * left.shape[1]
    assert found.shape == bound.shape
    assert found.dtype == left.dtype
    assert ((found.double() - wide[0] @ wide[1]).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rank", "rows", "columns"), SHAPES)
def test_products(way: str, rank: int, rows: int, columns: int, dtype: torch.dtype) -> None:
    for size in SIZES:
        matrix = random(rows, columns, dtype, size)
        right, left = random(rank, columns, dtype), random(rank, rows, dtype)
        assert_near(products.product(right, matrix.T), right, matrix.T)
        assert_near(products.product(left, matrix), left, matrix)
        right *= size
        assert_near(products.product(left.T, right), left.T, right)
        found = torch.full_like(matrix, math.nan)
        products.product_into(found, left.T, right)
        assert_near(found, left.T, right)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_what_is_not_finite_shows_in_products(way: str, broken: float, dtype: torch.dtype) -> None:
    matrix, right = random(40, 50, dtype), random(3, 50, dtype)
    matrix[7, 9] = broken
    found = products.product(right, matrix.T)
    assert not found[:, 7].isfinite().any()
    found[:, 7] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
def test_a_moment_is_the_sum_of_absolute_values(dtype: torch.dtype) -> None:
    for count, size in itertools.product((0, 1, 15, 70_000), (1.0, 6e-5, 1e4)):
        values = (torch.randn(count) * size).to(dtype)
        before = values.clone()
        assert moment(values) == pytest.approx(float(before.double().abs().sum()), rel=1e-12)
        assert torch.equal(values, before)
    for broken in (math.nan, math.inf, -math.inf):
        assert not math.isfinite(moment(torch.tensor([1.0, broken, 2.0], dtype=dtype)))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_around_places_is_unpacking_elsewhere(seed: int, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, 40, (30,), generator=draw).tolist()
    kinds = torch.randint(0, 3, (30,), generator=draw).tolist()  # a part, a place, zeros
    *begins, end = itertools.accumulate(lengths, initial=0)
    stretches = list(zip(kinds, begins, lengths, strict=True))
    own = [(begin, length) for kind, begin, length in stretches if kind == 0]
    places = [(begin, begin + length) for kind, begin, length in stretches if kind == 1 and length]
    wire = torch.randn(sum(length for _, length in own), generator=draw).to(dtype)
    if seed % 4 == 3 and wire.numel():
        wire[-1] = math.inf
    buffer = torch.randn(end, generator=draw)
    expected = buffer.clone()
    parts = [begin for begin, _ in own], [length for _, length in own]
    finite = unpack(wire, expected, *parts)
    for begin, end in places:
        expected[begin:end] = buffer[begin:end]
    assert unpack_around(wire, buffer, *parts, places) == finite
    assert torch.equal(buffer, expected)
