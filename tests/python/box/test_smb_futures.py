"""The memory box from Python: futures and batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from torch_hbmcomm import smb

KIB = 1024
MIB = 1 << 20


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
    segment, other, narrow = box.alloc(80), box.alloc(80), box.alloc(40)
    into, last = np.empty(10), np.empty(10)
    with box.batch() as batch:
        batch.write(narrow, source=np.arange(10, dtype=np.float32))
        batch.write(segment, source=np.arange(10.0))
        batch.write(other, source=np.ones(10))
        batch.accumulate(segment, other, torch.float64, scale=2)
        count = batch.fetch_add(other, 0, 1)
        batch.read(segment, into=into)
        batch.assign(other, segment, "float64", scale=-1)
        batch.accumulate(other, narrow, "float64", source_dtype="float32")
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
