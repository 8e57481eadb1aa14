"""The memory box from Python: accumulate, assign and fetch_add."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from harness import seeds

from torch_hbmcomm import smb


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int32", "int64"])
def test_accumulate(box: smb.Box, name: str) -> None:
    random = np.random.default_rng(seeds.fresh())
    x, y = ((100 * random.standard_normal(100_000)).astype(name) for _ in range(2))
    target, source = (box.alloc(x.nbytes, temporary=True) for _ in range(2))
    target.write(source=x)
    source.write(source=y)
    target.accumulate(source, name)
    target.accumulate(source, np.dtype(name), scale=-1, offset=8, size=800)
    expected = x + y
    part = slice(8 // x.itemsize, 808 // x.itemsize)
    expected[part] = expected[part] - y[part]
    into = np.empty_like(x)
    target.read(into=into)
    np.testing.assert_array_equal(into, expected)


def test_accumulate_scales_as_numpy_does(box: smb.Box) -> None:
    x, y = np.random.default_rng(seeds.fresh()).standard_normal((2, 50_000)).astype(np.float32)
    target, source = (box.alloc(x.nbytes, temporary=True) for _ in range(2))
    target.write(source=x)
    source.write(source=y)
    target.accumulate(source, np.float32, scale=-0.37)
    into = np.empty_like(x)
    target.read(into=into)
    np.testing.assert_array_equal(into, x + np.float32(-0.37) * y)


def test_accumulate_between_offsets(box: smb.Box) -> None:
    segment = box.alloc(800)
    segment.write(source=np.arange(100.0))
    segment.accumulate(segment, "float64", size=80, offset=0, source_offset=400)
    segment.accumulate(segment, "float64", offset=720)
    segment.read()
    found = segment.numpy("float64")
    assert found[:10].tolist() == [i + i + 50 for i in range(10)]
    assert found[90:].tolist() == [2 * i for i in range(90, 100)]


PAIRS = [
    ("float32", "float64"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float64", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
]


@pytest.mark.parametrize(("to", "by"), PAIRS)
def test_accumulate_and_assign_convert(box: smb.Box, to: str, by: str) -> None:
    target_dtype, source_dtype = getattr(torch, to), getattr(torch, by)
    wide = torch.promote_types(target_dtype, source_dtype)
    x, y = torch.randn(10_000).to(target_dtype), torch.randn(10_000).to(source_dtype)
    target, source = (box.alloc(each.nbytes, temporary=True) for each in (x, y))
    target.write(source=x)
    source.write(source=y)
    scale = torch.tensor(-0.37, dtype=wide)
    into = torch.empty_like(x)

    target.accumulate(source, target_dtype, scale=-0.37, source_dtype=source_dtype)
    target.read(into=into)
    product = scale * y.to(wide)
    assert torch.equal(into, (x.to(wide) + product).to(target_dtype))

    target.assign(source, to, scale=-0.37, source_dtype=by)
    target.read(into=into)
    assert torch.equal(into, product.to(target_dtype))


def test_assign(box: smb.Box) -> None:
    target, source = box.alloc(800), box.alloc(800)
    target.write(source=np.full(100, -1.0))
    source.write(source=np.arange(100.0))
    target.assign(source, "float64", offset=8, size=80)
    target.assign(source, "float64", 3, offset=400, size=80, source_offset=0)
    target.read()
    expected = np.full(100, -1.0)
    expected[1:11] = np.arange(1.0, 11.0)
    expected[50:60] = 3 * np.arange(10.0)
    assert target.numpy("float64").tolist() == expected.tolist()
    source.assign(source, "int64", -2)  # target and source may be one segment
    source.read()
    assert source.numpy("int64")[1] == -2 * np.float64(1).view(np.int64)


def test_offsets_of_two_types(box: smb.Box) -> None:
    target, source = box.alloc(400), box.alloc(200)
    target.write(source=np.zeros(100, np.float32))
    source.write(source=torch.arange(100).bfloat16())
    # By default, the source's first element has the same index as the target's.
    target.accumulate(source, "float32", offset=40, source_dtype="bfloat16")
    target.assign(source, "float32", size=40, source_offset=100, source_dtype="bfloat16")
    target.read()
    assert target.numpy("float32").tolist() == [*range(50, 60), *range(10, 100)]
    with pytest.raises(ValueError, match="multiple"):
        target.accumulate(source, "float32", offset=2, source_dtype="bfloat16")
    with pytest.raises(ValueError, match="source_offset 1 is no multiple of 2"):
        target.accumulate(source, "float32", size=4, source_offset=1, source_dtype="bfloat16")
    with pytest.raises(ValueError, match="198 bytes at 4 reach past the end"):
        target.assign(source, "float32", size=396, source_offset=4, source_dtype="bfloat16")


@pytest.mark.parametrize("name", ["int32", "int64"])
def test_integers_have_whole_scales(box: smb.Box, name: str) -> None:
    segment = box.alloc(64)
    segment.write(source=np.full(64 // np.dtype(name).itemsize, 3, name))
    for bad in (0.5, float("nan"), float("inf"), 2**53 + 1):
        with pytest.raises(ValueError, match="whole number"):
            segment.accumulate(segment, name, scale=bad)
    segment.accumulate(segment, name, scale=-2.0)
    segment.read()
    assert set(segment.numpy(name).tolist()) == {-3}


def test_bad_sums(box: smb.Box, connect: Callable[..., smb.Box]) -> None:
    segment, short = box.alloc(800), box.alloc(8)
    for arguments, complaint in (
        ({"dtype": "uint8"}, "float32"),
        ({"dtype": "complex"}, "element type"),
        ({"dtype": "float64", "offset": 4}, "multiple"),
        ({"dtype": "float64", "size": 4}, "multiple"),
        ({"dtype": "float64", "offset": 808}, "past the end"),
        ({"dtype": "float64", "size": 808}, "past the end"),
        ({"dtype": "float64", "size": 80, "source_offset": 8}, "overlap"),
        ({"dtype": "float32", "size": 80, "source_dtype": "float64"}, "overlap"),
        ({"dtype": "float32", "source_dtype": "int32"}, "float32 takes float32, float64"),
        ({"dtype": "float64", "source_dtype": "bfloat16"}, "float32 takes float32, float64"),
        ({"dtype": "int64", "source_dtype": "int32"}, "int32 and int64 take their own type"),
        ({"dtype": "int64", "scale": 0.5}, "whole number"),
    ):
        for use in (segment.accumulate, segment.assign):
            with pytest.raises(ValueError, match=complaint):
                use(segment, **arguments)
    with pytest.raises(ValueError, match="no assign of uint8"):
        segment.assign(segment, "uint8")
    with pytest.raises(ValueError, match="past the end"):
        segment.accumulate(short, "float64")
    with pytest.raises(ValueError, match="another client"):
        segment.accumulate(connect().alloc(800), "float64")
    with pytest.raises(TypeError):
        segment.accumulate(bytearray(800), "float64")  # type: ignore[arg-type]


def test_fetch_add(box: smb.Box) -> None:
    segment = box.alloc(16)
    assert segment.fetch_add(8, 5) == 0
    assert segment.fetch_add(8, -7) == 5
    assert segment.fetch_add(8, 0) == -2
    with pytest.raises(ValueError, match="multiple"):
        segment.fetch_add(4, 1)
    with pytest.raises(ValueError, match="past the end"):
        segment.fetch_add(16, 1)


def test_concurrent_clients_lose_nothing(connect: Callable[..., smb.Box]) -> None:
    key, rounds = "concurrent", 50

    def work(transport: str) -> None:
        box = connect(transport=transport)
        total, mine = box.alloc(80_000, key), box.alloc(80_000)
        mine.numpy("float32")[:] = 1
        mine.write()
        for _ in range(rounds):
            total.accumulate(mine, "float32", size=79_992)
            total.fetch_add(79_992, 1)

    threads = [threading.Thread(target=work, args=(each,)) for each in ("shm", "tcp") * 2]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    total = connect().alloc(80_000, key)
    total.read()
    assert (total.numpy("float32")[:-2] == 4 * rounds).all()
    assert total.fetch_add(79_992, 0) == 4 * rounds
