"""The memory box from Python: segments, keys, and memory of the caller."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch

from torch_hbmcomm import smb

KIB = 1024
MIB = 1 << 20


def random_bytes(size: int) -> bytes:
    return random.randbytes(size)


def test_a_new_segment_is_of_zeros_and_has_a_key(box: smb.Box) -> None:
    one, other = box.alloc(100), box.alloc(100)
    assert one.key != other.key
    assert one.created
    assert one.size == 100
    one.buffer[:] = b"\1" * 100
    one.read()
    assert bytes(one.buffer) == bytes(100)


@pytest.mark.parametrize("size", [1, 4 * KIB, 3 * MIB + 7])
def test_written_records_are_read(box: smb.Box, size: int) -> None:
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


def test_a_key_exists_until_it_is_deleted(box: smb.Box) -> None:
    key = f"asked for over {box.transport}"
    assert not box.exists(key)
    segment = box.alloc(64, key)
    assert box.exists(key)
    assert box.exists(smb.key_of(key))
    segment.delete()
    assert not box.exists(key)
    with pytest.raises(ValueError, match="key"):
        box.exists(0)


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


def test_deleting_second_raises_and_ends_the_attachment(box: smb.Box) -> None:
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
