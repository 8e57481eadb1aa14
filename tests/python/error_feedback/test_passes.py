"""The native passes agree with their counterparts in plain PyTorch, on fresh random data."""

from __future__ import annotations

import functools
import itertools
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from harness import Context, Pool, RankFailure, seeds
from harness import error_feedback_passes as reference
from torch import Tensor

from torch_hbmcomm.native import load

_C = load()
FLOATS = (torch.float32, torch.bfloat16, torch.float16)
DOUBLE = (torch.float64, torch.float64)
SUMS = [*itertools.product(FLOATS, FLOATS), DOUBLE]  # residual, gradient
PACKINGS = [*SUMS, (torch.float32, torch.float64)]  # wire, residual
UNPACKINGS = [(buffer, wire) for wire, buffer in PACKINGS]
BLOCK = 32768  # elements: kPartElements in csrc/error_feedback.h
SIZES = (0, 1, 2, 15, 16, 17, 31, 127, 1021, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7)
SPECIAL = (math.nan, math.inf, -math.inf, 0.0, -0.0)
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def in_threads(count: int, function: Callable[..., Any], *arguments: Any) -> Any:
    torch.set_num_threads(count)
    try:
        return function(*arguments)
    finally:
        torch.set_num_threads(1)


@functools.cache
def numbers(dtype: torch.dtype) -> Tensor:
    """Return random numbers of many magnitudes, zeros among them."""
    magnitudes = torch.exp2(torch.randint(-30, 12, (300_000,)).double())
    values = torch.randn(300_000, dtype=torch.float64) * magnitudes
    values[torch.rand(300_000) < 0.1] = 0
    return values.to(dtype)


def flat(count: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
    """Return `count` random numbers. Their memory is not aligned if there is an offset."""
    begin = random.randrange(300_000 - count)
    room = torch.empty(count + offset, dtype=dtype)[offset:]
    return room.copy_(numbers(dtype)[begin : begin + count])


def same_bits(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == wanted.dtype
    nan = found.isnan()
    assert torch.equal(nan, wanted.isnan())
    bits = BITS[found.itemsize]
    assert torch.equal(found.view(bits)[~nan], wanted.view(bits)[~nan])


def same_measures(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype == torch.float64
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0, equal_nan=True)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.clone() for tensor in tensors]


def check_sums(
    gradients: list[Tensor],
    before: list[Tensor | None],
    after: list[Tensor],
    factor: float,
    squares: bool,
    threads: int = 1,
) -> Tensor:
    expected = copies(after)
    wanted = reference.accumulate(gradients, before, expected, factor, squares)
    found: Tensor = in_threads(
        threads, _C.error_feedback_accumulate, gradients, before, after, factor, squares
    )
    same_measures(found, wanted)
    for new, old in zip(after, expected, strict=True):
        same_bits(new, old)
    return found


@pytest.mark.parametrize("squares", [False, True])
@pytest.mark.parametrize(("residual", "gradient"), SUMS)
def test_accumulate(residual: torch.dtype, gradient: torch.dtype, squares: bool) -> None:
    for factor, offset, threads in ((1.0, 0, 1), (0.1, 1, 2), (-(2.0**-7), 3, 1)):
        gradients = [flat(size, gradient, offset) for size in SIZES]
        before = [flat(size, residual, offset) if random.random() < 0.7 else None for size in SIZES]
        after = [flat(size, residual, offset) for size in SIZES]
        check_sums(gradients, before, after, factor, squares, threads)


@pytest.mark.parametrize(("residual", "gradient"), SUMS)
def test_accumulate_in_place(residual: torch.dtype, gradient: torch.dtype) -> None:
    for size in SIZES:
        gradients, after = [flat(size, gradient)], [flat(size, residual)]
        expected = copies(after)
        wanted = reference.accumulate(gradients, expected, expected, 0.5, False)
        same_measures(_C.error_feedback_accumulate(gradients, after, after, 0.5, False), wanted)
        same_bits(after[0], expected[0])


@pytest.mark.parametrize("dtype", [*FLOATS, torch.float64])
def test_accumulate_over_the_gradient(dtype: torch.dtype) -> None:
    found = flat(1021, dtype)
    wanted = found.clone()
    reference.accumulate([wanted], [None], [wanted], 3.0, False)
    _C.error_feedback_accumulate([found], [None], [found], 3.0, False)
    same_bits(found, wanted)


def test_accumulate_with_non_temporal_stores() -> None:
    """Accumulate more than 16 MiB, from aligned and other addresses."""
    cut = (1_500_000, 1_500_001, 1_500_000)
    gradients = list(torch.randn(sum(cut)).split(cut))
    after = list(torch.ones(sum(cut)).split(cut))
    check_sums(gradients, [None] * len(cut), after, 1.0, False, threads=2)
    before: list[Tensor | None] = [*copies(gradients)]
    check_sums(gradients, before, after, 0.3, True, threads=2)


@pytest.mark.parametrize(("residual", "gradient"), SUMS)
def test_accumulate_tells_what_is_not_finite_or_all_zero(
    residual: torch.dtype, gradient: torch.dtype
) -> None:
    for size, special in itertools.product((1, 16, 37, BLOCK + 1), SPECIAL):
        layer = torch.zeros(size, dtype=gradient)
        layer[random.randrange(size)] = special
        found = check_sums([layer], [flat(size, residual)], [flat(size, residual)], 1.0, False)
        total, new = found[0].tolist()
        assert (new != 0) == (special != 0)
        assert math.isfinite(total) == math.isfinite(special)
        assert math.isnan(total) == math.isnan(special)


def test_accumulate_of_many_layers() -> None:
    sizes = [random.randrange(200) for _ in range(2000)]
    gradients = [flat(size, torch.float32) for size in sizes]
    before: list[Tensor | None] = [flat(size, torch.float32) for size in sizes]
    assert check_sums(gradients, before, copies(gradients), 1.0, False).shape == (2000, 2)
    assert _C.error_feedback_accumulate([], [], [], 1.0, False).shape == (0, 2)


def layer_sums(_: Context, seed: int) -> tuple[tuple[str, ...], ...]:
    """Return the L1 and L2 sums of layers of several types, in hexadecimal."""
    torch.manual_seed(seed)
    sizes = (5, 32769, 250_001, 77)
    of_all: list[tuple[str, ...]] = []
    for dtype in (*FLOATS, torch.float64):
        gradients = [torch.randn(size).to(dtype) for size in sizes]
        after = [torch.empty_like(gradient) for gradient in gradients]
        for squares in (False, True):
            of_threads = set()
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                found = _C.error_feedback_accumulate(
                    gradients, [None] * len(sizes), after, 0.3, squares
                )
                of_threads.add(tuple(map(float.hex, found[:, 0].tolist())))
            assert len(of_threads) == 1, of_threads
            of_all += of_threads
    return tuple(of_all)


def test_layer_sums_depend_on_neither_threads_nor_processor() -> None:
    seed = seeds.fresh()
    found = set()
    for isa in ("baseline", "avx2", "avx512f", "avx512"):
        process = Pool(1, bare=True, environment={"HBMCOMM_ISA": isa})
        try:
            found.update(process.run(layer_sums, seed))
            assert process.close() == [0]
        except RankFailure as failure:
            if "cannot run" not in str(failure):
                raise
        finally:
            process.kill()
    assert len(found) == 1


@pytest.mark.parametrize(("wire", "residual"), PACKINGS)
def test_pack(wire: torch.dtype, residual: torch.dtype) -> None:
    for factor, offset, threads in ((1.0, 0, 1), (0.25, 1, 2), (1 / 3, 3, 1)):
        residuals = [flat(size, residual, offset) for size in SIZES]
        for layer in residuals:
            if len(layer) > 2:
                layer[random.randrange(len(layer))] = random.choice(SPECIAL)
        sent = torch.empty(sum(SIZES) + offset, dtype=wire)[offset:]
        expected, expected_sent = copies(residuals), sent.clone()
        reference.pack(expected, expected_sent, factor, round(1 / factor))
        in_threads(threads, _C.error_feedback_pack, residuals, sent, factor, round(1 / factor))
        same_bits(sent, expected_sent)
        for found_rest, wanted in zip(residuals, expected, strict=True):
            same_bits(found_rest, wanted)


@pytest.mark.parametrize("wire", [torch.bfloat16, torch.float16])
def test_rounding_errors_are_kept(wire: torch.dtype) -> None:
    whole = torch.randn(10_007)
    residual, sent = whole.clone(), torch.empty(whole.numel(), dtype=wire)
    _C.error_feedback_pack([residual], sent, 1.0, 1.0)
    assert residual.any()
    assert torch.equal(sent.double() + residual.double(), whole.double())


def random_parts(total: int) -> tuple[list[int], list[int]]:
    """Draw parts of a buffer, with gaps of any size, also 0, between the parts."""
    ends = sorted(random.choices(range(total + 1), k=2 * random.randrange(1, 9)))
    begins = ends[::2]
    return begins, [end - begin for begin, end in zip(begins, ends[1::2], strict=True)]


@pytest.mark.parametrize(("buffer", "wire"), UNPACKINGS)
def test_unpack(buffer: torch.dtype, wire: torch.dtype) -> None:
    for total, offset in itertools.product((*SIZES, 250_001), (0, 1)):
        begins, counts = random_parts(total)
        sent = flat(sum(counts), wire, offset).clamp(-60000, 60000)
        if len(sent) and random.random() < 0.3:
            sent[random.randrange(len(sent))] = random.choice(SPECIAL)
        found, wanted = flat(total, buffer, offset), flat(total, buffer)
        finite = reference.unpack(sent, wanted, begins, counts)
        threads = 2 if total == 250_001 else 1
        assert in_threads(threads, _C.error_feedback_unpack, sent, found, begins, counts) == finite
        same_bits(found, wanted)


OVERLAPPING = [(b, w) for b, w in UNPACKINGS if w.itemsize <= b.itemsize]


@pytest.mark.parametrize(("buffer", "wire"), OVERLAPPING)
def test_unpack_over_the_wire_itself(buffer: torch.dtype, wire: torch.dtype) -> None:
    for total in (*SIZES, 250_001):
        for begins, counts in (random_parts(total), ([0], [total]), ([total // 9], [total // 3])):
            found = torch.empty(total, dtype=buffer)
            sent = found.view(wire)[: sum(counts)]
            sent.copy_(flat(sum(counts), wire))
            wanted = torch.empty_like(found)
            finite = reference.unpack(sent, wanted, begins, counts)
            assert _C.error_feedback_unpack(sent, found, begins, counts) == finite
            same_bits(found, wanted)


def test_threshold() -> None:
    for _ in range(300):
        count = random.randrange(1, 200)
        values = [random.choice((random.expovariate(1), 0.5, 0.0)) for _ in range(count)]
        values += random.choices(SPECIAL, k=random.randrange(2))
        sizes = [random.choice((0, 1, random.randrange(10**7))) for _ in values]
        ratio = random.choice((0.0, 0.5, 0.9, 0.99, random.random()))
        found = _C.layerdrop_threshold(values, sizes, ratio)
        assert found == reference.threshold(values, sizes, ratio)
    assert _C.layerdrop_threshold([3.0, 1.0, 2.0], [10, 10, 10], 0.5) == 2.0
    assert _C.layerdrop_threshold([3.0, 1.0, math.nan], [10, 10, 10], 0.9) == math.inf
    assert _C.layerdrop_threshold([2.0, 1.0], [1, 1], 0.0) == 1.0
    assert _C.layerdrop_threshold([], [], 0.5) == -1.0
    assert _C.layerdrop_threshold([1.0], [0], 0.5) == -1.0


def sums(
    gradients: Sequence[Tensor], before: Sequence[Tensor | None], after: Sequence[Tensor]
) -> Callable[[], object]:
    return lambda: _C.error_feedback_accumulate(gradients, before, after, 1.0, False)


def packing(residuals: Sequence[Tensor], wire: Tensor) -> Callable[[], object]:
    return lambda: _C.error_feedback_pack(residuals, wire, 1.0, 1.0)


def unpacking(
    wire: Tensor, buffer: Tensor, begins: list[int], counts: list[int]
) -> Callable[[], object]:
    return lambda: _C.error_feedback_unpack(wire, buffer, begins, counts)


ONE, TWO = torch.ones(8), torch.ones(8)
WIDE, HALF, LONG = torch.ones(8).double(), torch.ones(8).half(), torch.ones(8).long()

REFUSED = [
    (sums([ONE], [], [TWO]), "gradients has 1 items and before has 0"),
    (sums([ONE], [None], []), "gradients has 1 items and after has 0"),
    (sums([ONE[1:]], [None], [TWO]), r"gradients\[0\] has 7 elements and after\[0\] has 8"),
    (sums([ONE], [TWO[1:]], [TWO]), r"before\[0\] has 7 elements"),
    (sums([ONE.view(2, 4)], [None], [TWO]), r"gradients\[0\] has the shape \[2, 4\]"),
    (sums([ONE], [None], [TWO.repeat(2)[::2]]), r"after\[0\].* strides \[2\].* contiguous"),
    (sums([ONE.to_sparse()], [None], [TWO]), r"gradients\[0\] has the layout Sparse"),
    (sums([ONE.to("meta")], [None], [TWO]), r"gradients\[0\] lies on meta"),
    (sums([ONE, LONG], [None] * 2, [TWO, TWO]), r"gradients\[1\] is of type Long"),
    (sums([WIDE], [None], [TWO]), r"gradients\[0\] is float64 and after\[0\] is float32"),
    (sums([ONE], [None], [WIDE]), r"gradients\[0\] is float32 and after\[0\] is float64"),
    (sums([ONE], [HALF], [TWO]), r"before\[0\] is float16 and after\[0\] is float32"),
    (sums([TWO[:7]], [None], [TWO[1:]]), r"after\[0\] shares a part .* gradients\[0\]"),
    (sums([ONE[:7]], [TWO[1:]], [TWO[:7]]), r"after\[0\] shares a part .* before\[0\]"),
    (packing([ONE], TWO[1:]), "wire has 7 elements and the residuals have 8"),
    (packing([HALF], WIDE), r"residuals\[0\] is float16 and wire is float64"),
    (packing([WIDE], HALF), r"residuals\[0\] is float64 and wire is float16"),
    (packing([ONE], LONG), "wire is of type Long"),
    (packing([ONE[:4], TWO[4:]], TWO), r"residuals\[1\] shares memory with wire"),
    (unpacking(ONE, TWO, [0], []), "begins has 1 items and counts has 0"),
    (unpacking(ONE[:3], TWO, [0], [2]), "wire has 3 elements and the parts have 2"),
    (unpacking(ONE[:3], TWO, [6], [3]), r"begins\[0\] is 6 .* beyond the 8 elements"),
    (unpacking(ONE[:3], TWO, [-1], [3]), r"begins\[0\] is -1"),
    (unpacking(ONE[:3], TWO, [2**62], [3]), r"begins\[0\] is 4611686018427387904"),
    (unpacking(ONE[:3], TWO, [0, 1], [2, 1]), r"begins\[1\] is 1 .* begin at 2"),
    (unpacking(ONE[:3], TWO, [0, 5], [4, -1]), r"counts\[1\] is -1"),
    (unpacking(TWO[1:4], TWO, [0], [3]), "wire shares memory with buffer"),
    (unpacking(TWO[:4], TWO.view(torch.float16), [0], [4]), "wire shares memory with buffer"),
    (unpacking(HALF, WIDE, [0], [8]), "wire is float16 and buffer is float64"),
    (lambda: _C.layerdrop_threshold([1.0], [], 0.5), "scores has 1 items"),
    (lambda: _C.layerdrop_threshold([1.0], [-1], 0.5), r"sizes\[0\] is -1"),
    (lambda: _C.layerdrop_threshold([1.0], [1], 1.0), "ratio is 1"),
    (lambda: _C.layerdrop_threshold([1.0], [1], -0.1), "ratio is -0.1"),
    (lambda: _C.layerdrop_threshold([1.0], [1], math.nan), "ratio is nan"),
]


@pytest.mark.parametrize(("call", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_mismatched_arguments_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
    for tensor in (ONE, TWO, WIDE, HALF, LONG):
        assert torch.equal(tensor, torch.ones_like(tensor))


def test_other_objects_than_tensors_are_refused() -> None:
    with pytest.raises(TypeError, match="error_feedback_accumulate"):
        _C.error_feedback_accumulate([None], [None], [ONE], 1.0, False)
    with pytest.raises(TypeError, match="error_feedback_pack"):
        _C.error_feedback_pack([ONE], None, 1.0, 1.0)
