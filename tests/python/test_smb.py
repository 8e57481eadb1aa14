"""The memory box from Python: segments, operations, arrays and tensors, errors."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from box_process import ROOT, TOKEN

from torch_hbmcomm import smb
from torch_hbmcomm.smb import token as tokens

KIB = 1024
MIB = 1 << 20


@pytest.fixture(scope="module")
def server() -> Iterator[smb.Server]:
    with smb.Server(memory="256MiB", token=TOKEN) as made:
        yield made


@pytest.fixture(params=["shm", "tcp"])
def box(server: smb.Server, request: pytest.FixtureRequest) -> Iterator[smb.Box]:
    with smb.connect(server.url, TOKEN, transport=request.param) as connected:
        assert connected.transport == request.param
        yield connected


@pytest.fixture
def connect(server: smb.Server) -> Iterator[Callable[..., smb.Box]]:
    made: list[smb.Box] = []

    def one(**options: Any) -> smb.Box:
        made.append(smb.connect(server.url, TOKEN, **options))
        return made[-1]

    yield one
    for box in made:
        box.close()


def random_bytes(size: int) -> bytes:
    return np.random.default_rng(size).bytes(size)


# Segments


def test_a_new_segment_is_of_zeros_and_has_a_key(box: smb.Box) -> None:
    one, other = box.alloc(100), box.alloc(100)
    assert one.key != other.key
    assert one.created
    assert one.size == 100
    one.buffer[:] = b"\1" * 100
    one.read()
    assert bytes(one.buffer) == bytes(100)


@pytest.mark.parametrize("size", [1, 4 * KIB, 3 * MIB + 7])
def test_what_is_written_is_read(box: smb.Box, size: int) -> None:
    data = random_bytes(size)
    segment = box.alloc(size, temporary=True)
    segment.buffer[:] = data
    segment.write()
    segment.buffer[:] = bytes(size)
    segment.read()
    assert bytes(segment.buffer) == data


def test_ranges(box: smb.Box) -> None:
    segment = box.alloc(1000)
    segment.write(100, source=b"abc")
    segment.write(103, 2, source=b"defg")
    into = bytearray(7)
    segment.read(99, into=into)
    assert into == b"\0abcde\0"
    segment.buffer[500:600] = b"x" * 100
    segment.write(500, 100)
    segment.buffer[:] = bytes(1000)
    segment.read(590, 20)
    assert bytes(segment.buffer[585:610]) == bytes(5) + b"x" * 10 + bytes(10)
    segment.read(1000, 0)
    segment.write(3, source=b"")


def test_create_attach_and_auto(box: smb.Box) -> None:
    key = f"modes over {box.transport}"
    with pytest.raises(smb.NoSuchKey, match=f"{smb.key_of(key):032x}"):
        box.alloc(64, key, mode="attach")
    assert box.alloc(64, key, mode="create").created
    with pytest.raises(smb.KeyInUse):
        box.alloc(64, key, mode="create")
    assert not box.alloc(64, key).created
    assert box.alloc(None, key, mode="attach").size == 64
    with pytest.raises(ValueError, match="64"):
        box.alloc(65, key)


def test_a_deleted_key_is_gone_and_free_twice_is_nothing(box: smb.Box) -> None:
    segment = box.alloc(64, f"deleted over {box.transport}")
    other = box.alloc(64, segment.key)
    other.write(source=b"here")
    segment.delete()
    with pytest.raises(smb.NoSuchKey):
        box.alloc(64, segment.key, mode="attach")
    into = bytearray(4)
    other.read(into=into)
    assert into == b"here"
    segment.free()
    with pytest.raises(ValueError, match="was freed"):
        segment.read()


def test_who_deletes_second_is_told_and_lets_go(box: smb.Box) -> None:
    segment = box.alloc(64, f"deleted twice over {box.transport}")
    other = box.alloc(64, segment.key)
    segment.delete()
    with pytest.raises(smb.NoSuchKey):
        other.delete()
    with pytest.raises(ValueError, match="was freed"):
        other.read()


def test_a_temporary_segment_goes_with_its_last_attachment(box: smb.Box) -> None:
    key = f"temporary over {box.transport}"
    box.alloc(64, key, temporary=True).free()
    with pytest.raises(smb.NoSuchKey):
        box.alloc(64, key, mode="attach")


def test_keys() -> None:
    assert smb.key_of(5) == 5
    assert smb.key_of(f"{5:032x}") == 5
    assert smb.key_of("5") == smb.key_of("5") > 1 << 64
    for bad in (0, -1, 1 << 128, "", "0" * 32):
        with pytest.raises(ValueError, match="key"):
            smb.key_of(bad)
    with pytest.raises(TypeError):
        smb.key_of(1.5)  # type: ignore[arg-type]


def test_a_thousand_keys(box: smb.Box) -> None:
    segments = [box.alloc(KIB, f"{box.transport} {i}") for i in range(1000)]
    with box.batch() as batch:
        for i, segment in enumerate(segments):
            batch.write(segment, source=np.full(128, i))
    into = np.zeros((1000, 128), np.int64)
    with box.batch() as batch:
        for i, segment in enumerate(segments):
            batch.read(segment, into=into[i])
    assert (into == np.arange(1000)[:, None]).all()
    for segment in segments:
        segment.delete()


def test_the_box_is_full(box: smb.Box) -> None:
    for size in ("1GiB", (1 << 63) - 1):
        with pytest.raises(MemoryError):
            box.alloc(size)


def test_numbers_that_are_too_large(box: smb.Box) -> None:
    segment = box.alloc(64)
    for call in (
        lambda: box.alloc(1 << 64),
        lambda: box.alloc(f"{1 << 60}GiB"),
        lambda: segment.read(1 << 64),
        lambda: segment.write(0, 1 << 64),
        lambda: segment.fetch_add(0, 1 << 63),
        lambda: segment.fetch_add_async(0, -(1 << 63) - 1),
    ):
        with pytest.raises(ValueError, match=r"2\*\*63"):
            call()
    assert segment.fetch_add(0, -(1 << 63)) == 0


# Sums


@pytest.mark.parametrize("name", ["float32", "float64", "float16", "int32", "int64"])
def test_accumulate(box: smb.Box, name: str) -> None:
    random = np.random.default_rng(1)
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
    x, y = np.random.default_rng(2).standard_normal((2, 50_000)).astype(np.float32)
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
    source.assign(source, "int64", -2)  # of itself, whatever its type
    source.read()
    assert source.numpy("int64")[1] == -2 * np.float64(1).view(np.int64)


def test_offsets_of_two_types(box: smb.Box) -> None:
    target, source = box.alloc(400), box.alloc(200)
    target.write(source=np.zeros(100, np.float32))
    source.write(source=torch.arange(100).bfloat16())
    # By default the source's element is the one at the target's offset.
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
    segment, small = box.alloc(800), box.alloc(8)
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
        segment.accumulate(small, "float64")
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


# Futures and batches


def test_futures_keep_the_order_of_issue(box: smb.Box) -> None:
    segment, other = box.alloc(8 * KIB), box.alloc(8 * KIB)
    other.write(source=np.ones(KIB))
    before, after = np.empty(KIB), np.empty(KIB)
    futures = [
        segment.write_async(source=np.full(KIB, 5.0)),
        segment.read_async(into=before),
        *(segment.accumulate_async(other, "float64") for _ in range(100)),
        segment.read_async(into=after),
        other.assign_async(segment, "float64"),
        segment.accumulate_async(other, "float64", scale=-2),
        segment.accumulate_async(other, "float64", scale=2),
        segment.fetch_add_async(0, 0),
    ]
    assert futures[-1].result(timeout=20) == int(np.float64(105).view(np.int64))
    assert all(future.exception() is None for future in futures)
    assert (before == 5).all()
    assert (after == 105).all()
    assert all(future.done() for future in futures)


def test_two_attachments_to_a_segment_keep_the_order(box: smb.Box) -> None:
    one = box.alloc(8 * KIB, temporary=True)
    other = box.alloc(8 * KIB, one.key)
    into = np.empty((20, KIB))
    futures = []
    for i in range(20):
        futures.append(one.write_async(source=np.full(KIB, float(i))))
        futures.append(other.accumulate_async(one, "float64"))
        futures.append(other.read_async(into=into[i]))
    for future in futures:
        future.result()
    assert (into == 2 * np.arange(20)[:, None]).all()


def test_many_futures_at_once(box: smb.Box) -> None:
    segment = box.alloc(8)
    before = [segment.fetch_add_async(0, 1) for _ in range(2000)]
    assert [future.result() for future in before] == list(range(2000))


def test_a_future_keeps_its_memory(box: smb.Box) -> None:
    segment = box.alloc(MIB)
    futures = [segment.write_async(source=bytes([i]) * MIB) for i in range(20)]
    futures[-1].result()
    segment.read()
    assert bytes(segment.buffer) == bytes([19]) * MIB


def test_a_batch_is_one_step(box: smb.Box) -> None:
    segment, other, small = box.alloc(80), box.alloc(80), box.alloc(40)
    into, last = np.empty(10), np.empty(10)
    with box.batch() as batch:
        batch.write(small, source=np.arange(10, dtype=np.float32))
        batch.write(segment, source=np.arange(10.0))
        batch.write(other, source=np.ones(10))
        batch.accumulate(segment, other, torch.float64, scale=2)
        count = batch.fetch_add(other, 0, 1)
        batch.read(segment, into=into)
        batch.assign(other, segment, "float64", scale=-1)
        batch.accumulate(other, small, "float64", source_dtype="float32")
        batch.read(other, into=last)
    assert last.tolist() == [-(i + 2) + i for i in range(10)]
    assert into.tolist() == [i + 2 for i in range(10)]
    assert count.result() == int(np.float64(1).view(np.int64))


def test_a_batch_that_is_left_by_an_exception_sends_nothing(box: smb.Box) -> None:
    segment = box.alloc(8)
    with pytest.raises(KeyError), box.batch() as batch:
        batch.write(segment, source=b"12345678")
        raise KeyError
    segment.read()
    assert bytes(segment.buffer) == bytes(8)


# Memory of the caller


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64, torch.bool])
def test_tensors(box: smb.Box, dtype: torch.dtype) -> None:
    tensor = torch.randn(33, 7).mul(10).to(dtype)
    segment = box.alloc(tensor.nbytes)
    segment.write(source=tensor)
    into = torch.zeros_like(tensor)
    segment.read(into=into)
    assert torch.equal(into, tensor)
    segment.read()
    assert torch.equal(segment.tensor(dtype), tensor.flatten())
    one = torch.tensor(3, dtype=dtype)  # of no dimension
    segment.write(source=one)
    segment.read(into=one)


def test_accumulate_of_bfloat16(box: smb.Box) -> None:
    x, y = torch.randn(2, 1000).bfloat16()
    target, source = box.alloc(2000), box.alloc(2000)
    target.write(source=x)
    source.write(source=y)
    target.accumulate(source, torch.bfloat16)
    into = torch.empty_like(x)
    target.read(into=into)
    assert torch.equal(into, (x.float() + y.float()).bfloat16())


def test_memory_that_cannot_be_used(box: smb.Box) -> None:
    segment = box.alloc(64)
    read_only = np.zeros(8)
    read_only.flags.writeable = False
    for bad, complaint in (
        (b"12345678", "writable"),
        (read_only, "writable"),
        (np.zeros((8, 8), np.uint8)[:, :4], "contiguous"),
        (torch.zeros(8, 8).t(), "contiguous"),
        (torch.zeros(8, device="meta"), "meta"),
        (torch.zeros(4, dtype=torch.complex64).conj(), "resolve_conj"),
        ([1, 2], "list"),
        (np.zeros(100), "past the end"),
    ):
        with pytest.raises(ValueError, match=complaint):
            segment.read(into=bad)
    named = np.zeros(2, [("O", "f8"), ("x", "f8")])  # numbers, whatever the field is called
    segment.write(source=named)
    for objects in (np.array(["a", None]), np.zeros(2, [("x", "f8"), ("y", object)])):
        with pytest.raises(TypeError, match="Python objects"):
            segment.write(source=objects)
        with pytest.raises(TypeError, match="Python objects"):
            segment.read(into=objects)
    with pytest.raises(ValueError, match="fewer"):
        segment.read(0, 16, into=bytearray(8))
    for offset, size in ((65, None), (0, 65), (60, 5)):
        with pytest.raises(ValueError, match="past the end"):
            segment.read(offset, size)
        with pytest.raises(ValueError, match="past the end"):
            segment.write(offset, source=bytes(size or 1))
    with pytest.raises(ValueError, match="negative"):
        segment.read(-1)


def test_a_view_is_the_segment(connect: Callable[..., smb.Box]) -> None:
    shm, tcp = connect(transport="shm"), connect(transport="tcp")
    segment = shm.alloc(64, "viewed")
    view = segment.view()
    view[:5] = b"hello"
    other = tcp.alloc(64, "viewed", read_only=True)
    other.read()
    assert bytes(other.buffer[:5]) == b"hello"
    with pytest.raises(ValueError, match="transport shm"):
        other.view()
    reader = shm.alloc(64, "viewed", read_only=True)
    assert reader.view().readonly
    segment.free()
    shm.close()
    assert bytes(view[:5]) == b"hello"


# Clients


def test_transports_see_each_others_data(connect: Callable[..., smb.Box]) -> None:
    boxes = [connect(transport=each) for each in ("shm", "tcp", "auto")]
    segments = [box.alloc(24, "shared by transports") for box in boxes]
    for i, segment in enumerate(segments):
        segment.write(8 * i, source=np.array([i + 1]))
    for segment in segments:
        segment.read()
        assert segment.numpy("int64").tolist() == [1, 2, 3]


def test_auto_picks_shm_here_and_says_why(
    server: smb.Server, connect: Callable[..., smb.Box]
) -> None:
    box = connect()
    assert box.transport == "shm"
    assert "same kernel" in box.why_transport
    with smb.connect(server.urls[-1], TOKEN) as by_path:
        assert by_path.transport == "shm"
    with pytest.raises(ValueError, match="Unix socket"):
        smb.connect(server.urls[-1], TOKEN, transport="tcp")


def test_a_named_transport_works_or_is_an_error() -> None:
    with smb.Server(memory="1MiB", token=TOKEN, unix=False, verbs="off") as server:
        with pytest.raises(smb.BoxUnreachable, match="shm"):
            smb.connect(server.url, TOKEN, transport="shm")
        with pytest.raises((smb.BoxUnreachable, RuntimeError), match="verbs"):
            smb.connect(server.url, TOKEN, transport="verbs")
        with smb.connect(server.url, TOKEN) as box:
            assert box.transport == "tcp"
            assert "not shm: " in box.why_transport
            assert "not verbs: " in box.why_transport


def test_read_only_clients(box: smb.Box, connect: Callable[..., smb.Box]) -> None:
    segment = box.alloc(64, f"read by {box.transport}")
    segment.write(source=b"text")
    reader = connect(transport=box.transport, read_only=True)
    with pytest.raises(smb.AccessDenied, match="attach"):
        reader.alloc(64)
    copy = reader.alloc(64, segment.key, mode="attach")
    copy.read()
    assert bytes(copy.buffer[:4]) == b"text"
    for refused in (
        copy.write,
        lambda: copy.accumulate(copy, "int32"),
        lambda: copy.assign(copy, "int32"),
        lambda: copy.fetch_add(0, 1),
    ):
        with pytest.raises(smb.AccessDenied, match="reading"):
            refused()
    with pytest.raises(PermissionError):
        box.alloc(64, segment.key, read_only=True).write()
    copy.free()


def test_stats(server: smb.Server, box: smb.Box) -> None:
    before = box.stats()
    segment, count = box.alloc(4 * KIB), before["accumulates"]
    segment.accumulate(segment, "float32")
    after = box.stats()
    assert after["accumulates"] == count + 1
    assert after["accumulated_bytes"] == before["accumulated_bytes"] + 4 * KIB
    assert after["segments"] == before["segments"] + 1
    row = next(row for row in after["segment_table"] if row["key"] == segment.key)
    assert (row["size"], row["attachments"], row["accumulates"]) == (4 * KIB, 1, 1)
    mine = [row for row in after["client_table"] if row["pid"] == os.getpid()]
    assert any(row["transport"] == box.transport for row in mine)
    assert server.stats()["pool"]["capacity_bytes"] == 256 * MIB
    box.ping()


def test_close(server: smb.Server) -> None:
    box = smb.connect(server.url, TOKEN)
    segment = box.alloc(8)
    future = segment.fetch_add_async(0, 1)
    box.close()
    box.close()
    assert future.result() == 0  # what was issued is done first
    assert box.closed
    for use in (lambda: segment.read(), lambda: box.alloc(8), box.ping, segment.free):
        with pytest.raises(smb.BoxError, match="closed"):
            use()


def test_bad_addresses(server: smb.Server) -> None:
    for url in ("host:1", "smb://", "smb://host", "smb+unix://", "smb://a:1,b:2"):
        with pytest.raises(ValueError, match="box"):
            smb.connect(url, TOKEN)
    with pytest.raises(ValueError, match="transport"):
        smb.connect(server.url, TOKEN, transport="rdma")  # type: ignore[arg-type]
    with pytest.raises(smb.BoxUnreachable, match=r"127\.0\.0\.1:1"):
        smb.connect("smb://127.0.0.1:1", TOKEN)
    with pytest.raises(ConnectionError):
        smb.connect("smb+unix:///nowhere/at/all", TOKEN)
    with pytest.raises(ValueError, match="timeout"):
        smb.connect(server.url, TOKEN, timeout=-1)


def test_a_forked_child_cannot_use_it(box: smb.Box) -> None:
    segment = box.alloc(8)
    child = os.fork()
    if child == 0:
        try:
            segment.read()
        except RuntimeError as error:
            os._exit(0 if "connect again in the child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    segment.fetch_add(0, 1)


# Tokens


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_wrong_token_is_refused(server: smb.Server, transport: Any) -> None:
    for wrong in ("wrong", ""):
        with pytest.raises(smb.AccessDenied, match="token"):
            smb.connect(server.url, wrong, transport=transport)


def test_where_a_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HBMCOMM_TOKEN", raising=False)
    monkeypatch.delenv("HBMCOMM_TOKEN_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tokens.find(None).text == ""
    with smb.Server(memory="1MiB") as server:
        file = tmp_path / ".config" / "hbmcomm" / "token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert re.fullmatch("[0-9a-f]{64}", server.token)
        assert list(file.parent.iterdir()) == [file]
        smb.connect(server.url).close()
    assert tokens.find_or_create(None).text == server.token

    named = tmp_path / "named"
    monkeypatch.setenv("HBMCOMM_TOKEN_FILE", str(named))
    with pytest.raises(FileNotFoundError):
        tokens.find(None)
    assert tokens.find_or_create(None).text == named.read_text().strip() != server.token
    monkeypatch.setenv("HBMCOMM_TOKEN", "from the environment")
    assert tokens.find(None).text == "from the environment"
    assert tokens.find("given").text == "given"
    named.write_text(" \n")
    with pytest.raises(ValueError, match="empty"):
        tokens.read(named)


def test_a_box_without_a_token_lets_everybody_in() -> None:
    with smb.Server(memory="1MiB", token="") as server, smb.connect(server.url, "") as box:
        box.ping()


# The process


def test_needs_no_torch_and_leaves_nothing(nothing_left: None) -> None:
    script = """
import sys
from torch_hbmcomm import smb
server = smb.Server(memory="1MiB", token="t")
box = smb.connect(server.url, "t")
segment = box.alloc(64)
segment.fetch_add(0, 1)
future = segment.read_async()
assert "torch" not in sys.modules and "numpy" not in sys.modules
"""  # and ends with all of it open
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", script], env=environ, check=True, timeout=30)


def test_a_forked_child_closes_its_own(server: smb.Server) -> None:
    """At its exit, and does not leave that to the lease; its parent's it lets be."""
    script = """
import ctypes, os, sys
from torch_hbmcomm import smb
url, token = sys.argv[1:]
parents = smb.connect(url, token)
child = os.fork()
box = smb.connect(url, token) if child == 0 else parents
ctypes.pythonapi.Py_IncRef(ctypes.py_object(box))  # so that nothing else closes it
segment = box.alloc(64, f"forked {child == 0}", temporary=True)
if child == 0:
    sys.exit()
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
box.alloc(64, "forked False", mode="attach")
try:
    box.alloc(64, "forked True", mode="attach")
except smb.NoSuchKey:
    sys.exit()
sys.exit("the child left its segment behind")
"""
    command = [sys.executable, "-c", script, server.url, TOKEN]
    environ = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run(command, env=environ, check=True, timeout=30)


def test_a_c_process_that_frees_second_lets_go() -> None:
    """shm_free() of what it made deletes the key, which here is gone already."""
    script = """
import ctypes, sys
from pathlib import Path
import torch_hbmcomm
from torch_hbmcomm import smb
library = ctypes.CDLL(str(Path(torch_hbmcomm.__path__[0]) / "libhbmsmb.so"))
library.shm_alloc.restype = ctypes.c_void_p
library.shm_alloc.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_uint64, ctypes.c_int]
library.shm_free.argtypes = [ctypes.c_void_p]
assert library.smb_init() == 0
key = ctypes.c_uint64(0)
memory = library.shm_alloc(ctypes.byref(key), 64, 0)
assert memory
with smb.connect(sys.argv[1]) as box:
    box.alloc(64, key.value, mode="attach").delete()
    attachments = lambda: sum(row["attachments"] for row in box.stats()["client_table"])
    assert attachments() == 1
    library.shm_free(memory)
    assert attachments() == 0
library.smb_terminate()
"""
    with smb.Server(memory="1MiB", token=TOKEN) as server:
        command = [sys.executable, "-c", script, server.url]
        environ = {"PYTHONPATH": str(ROOT), "HBMCOMM_TOKEN": TOKEN, "HBMCOMM_BOX": server.url}
        subprocess.run(command, env=os.environ | environ, check=True, timeout=30)
