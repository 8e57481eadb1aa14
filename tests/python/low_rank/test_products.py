"""Tall-skinny products, and the passes around them, against a second implementation."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from harness import seeds

from torch_hbmcomm import native
from torch_hbmcomm.error_feedback.passes import (
    finite,
    sums_of,
    transpose_blocks,
    unpack,
    unpack_around,
)
from torch_hbmcomm.low_rank import products

SHAPES = [(1, 1, 1), (3, 64, 147), (30, 256, 300), (1, 1000, 65), (17, 50, 129), (2, 64, 33)]
DTYPES = [torch.float32, torch.float64]  # the first by csrc/low_rank.h, the second by PyTorch


def random(rows: int, columns: int, dtype: torch.dtype, size: float = 1.0) -> torch.Tensor:
    return torch.randn(rows, columns, dtype=dtype) * size


def assert_near(found: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Compare with 0.5 times the product, in float64. The bound follows from the terms' sizes."""
    wide = left.double(), 0.5 * right.double()
    bound = (wide[0].abs() @ wide[1].abs()) * torch.finfo(found.dtype).eps * (left.shape[1] + 2)
    assert ((found.double() - wide[0] @ wide[1]).abs() <= bound).all()


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(1)


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(dtype: torch.dtype) -> None:
    for size in (1.0, 1e-30, 1e15):
        matrices = [random(rows, columns, dtype, size) for _, rows, columns in SHAPES]
        lefts = [random(rows, rank, dtype) for rank, rows, _ in SHAPES]
        rights = [random(rank, columns, dtype) for rank, _, columns in SHAPES]
        found = [torch.full_like(one, math.nan) for one in lefts]
        products.find_lefts(matrices, found, rights, 0.5)
        for left, matrix, right in zip(found, matrices, rights, strict=True):
            assert_near(left, matrix, right.T)
        found = [torch.full_like(one, math.nan) for one in rights]
        products.find_rights(matrices, lefts, found, 0.5)
        for right, left, matrix in zip(found, lefts, matrices, strict=True):
            assert_near(right, left.T, matrix)
        found = [torch.full_like(one, math.nan) for one in matrices]
        halves = [0.5 * one for one in rights]
        products.set_matrices(found, lefts, halves)
        for matrix, left, right in zip(found, lefts, rights, strict=True):
            assert_near(matrix, left, right)
        before = [one.clone() for one in matrices]
        products.add_to_matrices(matrices, lefts, rights, 0.5)
        for matrix, old, left, right in zip(matrices, before, lefts, rights, strict=True):
            eye = torch.eye(old.shape[1], dtype=dtype)
            assert_near(matrix, torch.cat([left, 2 * old], 1), torch.cat([right, eye]))


@pytest.mark.parametrize("turn", range(5))
def test_bits_do_not_depend_on_the_number_of_threads(turn: int) -> None:
    """Compute each part of a list exactly once, with any number of threads."""
    draw = seeds.generator(turn)
    sizes = torch.randint(1, 300, (12, 3), generator=draw).tolist()
    shapes = [(1 + rank % min(24, rows), rows, columns) for rank, rows, columns in sizes]
    given = [torch.randn(rows, columns, generator=draw) for _, rows, columns in shapes]
    lefts = [torch.randn(rows, rank, generator=draw) for rank, rows, _ in shapes]
    rights = [torch.randn(rank, columns, generator=draw) for rank, _, columns in shapes]

    def computed(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        found = [torch.full_like(one, math.nan) for one in [*given, *lefts, *rights]]
        matrices, others, columns = found[:12], found[12:24], found[24:]
        products.find_lefts(given, others, rights, 0.5)
        products.find_rights(given, lefts, columns, 0.5)
        products.set_matrices(matrices, lefts, rights)
        products.add_to_matrices(matrices, lefts, rights, 0.5)
        return [*found, *products.bases(lefts)]

    try:
        expected = computed(1)
        for threads in (2, 3, 5, 16):
            for one, other in zip(computed(threads), expected, strict=True):
                assert torch.equal(one, other), threads
    finally:
        torch.set_num_threads(1)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bases(dtype: torch.dtype) -> None:
    """The columns may be linearly dependent, and may have the largest and smallest numbers."""
    lefts = [random(rows, rank, dtype) for rank, rows, _ in SHAPES if rank <= rows]
    lefts += [torch.zeros(20, 3, dtype=dtype), torch.ones(20, 5, dtype=dtype)]
    lefts += [size * random(40, 4, dtype) for size in (1e37, 1e-37)]
    lefts += [random(40, 4, dtype) * torch.tensor([1, 1e-12, 1e-21, 1e-33]).to(dtype)]
    given = [one.clone() for one in lefts]
    for basis, left, before in zip(products.bases(lefts), lefts, given, strict=True):
        assert torch.equal(left, before)
        assert basis.shape == left.shape
        assert basis.is_contiguous()
        eye = torch.eye(basis.shape[1], dtype=torch.float64)
        assert torch.allclose(basis.double().T @ basis.double(), eye, atol=4e-6)
        spanned = basis.double() @ (basis.double().T @ left.double())
        assert torch.allclose(spanned, left.double(), rtol=0, atol=1e-5 * float(left.abs().max()))


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_norm_1(dtype: torch.dtype) -> None:
    given = [
        random(rows, columns, dtype, size)
        for size in (1e-15, 1, 1e15)
        for _, rows, columns in SHAPES
    ]
    given.append(torch.zeros(3, 20, dtype=dtype))
    found = [one.clone() for one in given]
    products.normalize_rows(found)
    assert torch.equal(found.pop(), given.pop())
    for one, before in zip(found, given, strict=True):
        wide = before.double()
        torch.testing.assert_close(one, (wide / wide.norm(dim=1, keepdim=True)).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_factors_that_are_not_finite_show_in_products(broken: float, dtype: torch.dtype) -> None:
    matrix, right = random(40, 50, dtype), random(3, 50, dtype)
    matrix[7, 9] = broken
    found = torch.empty(40, 3, dtype=dtype)
    products.find_lefts([matrix], [found], [right], 1.0)
    assert not found[7].isfinite().any()
    found[7] = 0
    assert found.isfinite().all()


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(5, 4), (5, 2), (2, 3)], r"rights\[0\] is Float \[2, 3\] .* float32 \[2, 4\] on the CPU"),
        ([(5, 4), (4, 2), (2, 4)], r"lefts\[0\] is Float \[4, 2\] .* float32 \[5, 2\] on the CPU"),
        ([(20,), (5, 2), (2, 4)], r"matrices\[0\] is Float \[20\] .* float32 \[0, 0\] on the CPU"),
    ],
)
def test_mismatched_arguments_are_refused(shapes: list[tuple[int, ...]], message: str) -> None:
    matrix, left, right = (torch.ones(shape) for shape in shapes)
    for function in (products.find_lefts, products.find_rights, products.add_to_matrices):
        with pytest.raises(ValueError, match=message):
            function([matrix], [left], [right], 1.0)
    with pytest.raises(ValueError, match="1 matrices have 0 left and 2 right factors"):
        products.find_lefts([matrix], [], [right, right], 1.0)


def test_blocks_that_do_not_fit_are_refused() -> None:
    flat = torch.ones(30)
    with pytest.raises(ValueError, match=r"sources\[1\] has 30 elements, .* no blocks of 4 x 5"):
        transpose_blocks([(flat, flat.clone(), 5, 6), (flat, flat.clone(), 4, 5)])
    with pytest.raises(ValueError, match=r"targets\[0\] is Float \[29\] .* float32 \[30\]"):
        transpose_blocks([(flat, flat[1:].clone(), 5, 6)])
    with pytest.raises(ValueError, match="1 sources have 0 targets"):
        native.load().low_rank_transpose_blocks([flat], [], [1], [1])


def test_more_columns_than_rows_have_no_basis() -> None:
    with pytest.raises(ValueError, match=r"lefts\[1\] is \[3, 5\], which has more columns than"):
        products.bases([torch.ones(5, 3), torch.ones(3, 5)])


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
def test_sums_of_absolute_values_are_exact(dtype: torch.dtype) -> None:
    for count, size in itertools.product((0, 1, 15, 70_000), (1.0, 6e-5, 1e4)):
        values = (torch.randn(count) * size).to(dtype)
        before = values.clone()
        (found,) = sums_of([values])
        assert found == pytest.approx(float(before.double().abs().sum()), rel=1e-12)
        (found,) = sums_of([values], squares=True)
        assert found == pytest.approx(float(before.double().square().sum()), rel=1e-12)
        assert torch.equal(values, before)
    for broken in (math.nan, math.inf, -math.inf):
        given = torch.ones(3, dtype=dtype), torch.tensor([1.0, broken, 2.0], dtype=dtype)
        assert [math.isfinite(one) for one in sums_of(given)] == [True, False]


@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16])
def test_finite_numbers_may_have_an_infinite_sum(dtype: torch.dtype) -> None:
    assert finite(torch.empty(0, dtype=dtype))
    values = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    assert finite(values)
    for broken in (math.nan, math.inf, -math.inf):
        values[99] = broken
        assert not finite(values)


@pytest.mark.parametrize("turn", range(20))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unpacking_around_ranges_is_unpacking_elsewhere(turn: int, dtype: torch.dtype) -> None:
    draw = seeds.generator(turn)
    lengths = torch.randint(0, 40, (30,), generator=draw).tolist()
    # Kinds of ranges: 0 is a part on the wire, 1 keeps its numbers, 2 becomes zeros.
    kinds = torch.randint(0, 3, (30,), generator=draw).tolist()
    *begins, end = itertools.accumulate(lengths, initial=0)
    stretches = list(zip(kinds, begins, lengths, strict=True))
    own = [(begin, length) for kind, begin, length in stretches if kind == 0]
    places = [(begin, begin + length) for kind, begin, length in stretches if kind == 1 and length]
    wire = torch.randn(sum(length for _, length in own), generator=draw).to(dtype)
    if turn % 4 == 3 and wire.numel():
        wire[-1] = math.inf
    buffer = torch.randn(end, generator=draw)
    expected = buffer.clone()
    parts = [begin for begin, _ in own], [length for _, length in own]
    finite = unpack(wire, expected, *parts)
    for begin, end in places:
        expected[begin:end] = buffer[begin:end]
    assert unpack_around(wire, buffer, *parts, places) == finite
    assert torch.equal(buffer, expected)
