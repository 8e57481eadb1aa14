"""HBMCOMM_ALLOCATOR=segment: PyTorch takes memory for large CPU tensors from the segment."""

from __future__ import annotations

import gc
import io
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.data import assert_same, gathered, random_bits, random_numbers
from harness.jobs import run_code
from harness.reference import reduced
from harness.segments import held, in_segment, in_use

from torch_hbmcomm import memory

pytestmark = beyond_gloo

LARGE = 64 << 10  # bytes: kSegmentTensorBytes in csrc/process_group/tuning.h
WHERE = """
import torch
from torch_hbmcomm import memory
held_before = torch.ones(1 << 20)
print([segment.in_use_bytes for segment in memory.info().segments])
"""


def place_tensors(context: Context) -> None:
    memory.place_large_tensors_in_segment()
    memory.place_large_tensors_in_segment()  # a second call changes nothing


@pytest.fixture
def placing_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool for this test alone, whose ranks place large tensors in the segment."""
    own = Pool(ranks)
    own.run(place_tensors)
    yield own
    own.kill()


@pytest.mark.parametrize(
    ("chosen", "printed"),
    [pytest.param("default", "[]", marks=pytest.mark.full), ("segment", f"[{4 << 20}]")],
)
def test_the_environment_chooses(chosen: str, printed: str) -> None:
    done = run_code(WHERE, HBMCOMM_ALLOCATOR=chosen)
    assert done.code == 0, done.output
    assert done.output.splitlines()[-1] == printed


def check_which_tensors(context: Context) -> None:
    for count in (1, 1000, LARGE - 1):
        assert not in_segment(torch.empty(count, dtype=torch.uint8))
    for count in (LARGE, LARGE + 1, 10 * LARGE):
        assert in_segment(torch.empty(count, dtype=torch.uint8))
    data = random_numbers(context, (300, 400), torch.float32)
    made = {
        "ones": torch.ones(LARGE),
        "clone": data.clone(),
        "sum": data + data,
        "transposed": data.t().contiguous(),
        "concatenated": torch.cat([data, data]),
        "converted": data.double(),
        "product": data @ data.t(),
    }
    assert [name for name, tensor in made.items() if not in_segment(tensor)] == []
    np.testing.assert_array_equal(made["sum"].numpy(), data.numpy() * 2)
    np.testing.assert_array_equal(made["transposed"].numpy(), data.numpy().T)


def check_resize(context: Context) -> None:
    data = random_numbers(context, 1000, torch.float32)
    tensor = data.clone()
    for count, inside in ((LARGE, True), (3 * LARGE, True), (1000, True)):
        tensor.resize_(count)
        assert in_segment(tensor) == inside
        assert_same(tensor[:1000], data, f"resized to {count}")


def check_save_and_load(context: Context) -> None:
    data = random_bits(context, (77, 4001), torch.int16)
    file = io.BytesIO()
    torch.save({"large": data, "row": data[3]}, file)
    file.seek(0)
    found = torch.load(file)
    assert in_segment(found["large"])
    assert_same(found["large"], data, "loaded")
    assert found["row"].untyped_storage().data_ptr() == found["large"].untyped_storage().data_ptr()


def check_numpy(context: Context) -> None:
    before = in_use()
    array = torch.arange(LARGE).numpy()
    gc.collect()
    assert in_use() == before + array.nbytes, "an array keeps its tensor's memory"
    assert (array == np.arange(LARGE)).all()
    del array
    assert in_use() == before


def check_flat(context: Context) -> None:
    """Freed memory returns to the heap immediately, and large blocks return to the kernel."""
    used, held_before = in_use(), held()
    for _ in range(60):
        size = context.own_random.randrange(16 << 20, 24 << 20)
        filled = torch.ones(size, dtype=torch.uint8)
        assert in_use() == used + size
        assert held() > held_before + (8 << 20)  # a part may be on pages of earlier blocks
        del filled
        assert held() < held_before + (1 << 20)
    assert in_use() == used


def check_threads(context: Context) -> None:
    used = in_use()
    wrong: list[str] = []

    def work(number: int) -> None:
        for step in range(100):
            value = 100 * number + step
            tensors = [torch.full((LARGE // 4 + 777 * k,), value) for k in range(4)]
            if not all(bool((tensor == value).all()) for tensor in tensors):
                wrong.append(f"thread {number}, step {step}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert in_use() == used


@pytest.mark.ranks(1)
def test_tensors_in_the_segment(placing_pool: Pool) -> None:
    for check in (
        check_which_tensors,
        check_resize,
        check_save_and_load,
        check_numpy,
        check_flat,
        check_threads,
    ):
        placing_pool.run(check)


def check_collectives(context: Context) -> None:
    """Communicate tensors in the segment. They may be freed once their operation is complete."""
    for count in (4096, 4097, LARGE, 300_001):
        data = random_numbers(context, count, torch.float32)
        expected = reduced(gathered(context, data), "sum")
        assert in_segment(data) == (4 * count >= LARGE)
        for _ in range(5):
            got = data.clone()
            work = dist.all_reduce(got, async_op=True)
            assert work is not None
            work.wait()
            assert_same(got, expected, f"{count} elements")


@pytest.mark.ranks(2)
def test_collectives(placing_pool: Pool) -> None:
    placing_pool.run(check_collectives)


def check_one_rank_places(context: Context) -> None:
    if context.rank == 0:
        memory.place_large_tensors_in_segment()
    data = random_numbers(context, 200_000, torch.float32)
    assert in_segment(data) == (context.rank == 0)
    expected = reduced(gathered(context, data), "sum")
    dist.all_reduce(data)
    assert_same(data, expected, "all_reduce")


@pytest.mark.ranks(3)
def test_one_rank_alone_places_its_tensors(fresh_pool: Pool) -> None:
    fresh_pool.run(check_one_rank_places)
