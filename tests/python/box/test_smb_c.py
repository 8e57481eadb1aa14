"""The memory box from C: each function of csrc/smb.h, each type, flag and errno.

A Python client then reads the data in the box.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from harness import seeds, smb_c
from harness.box_process import ROOT, TOKEN, BoxProcess
from harness.network import free_port
from harness.smb_c import CONSTANTS, HEADER, IPC_CREAT, IPC_EXCL, SHM_RDONLY, alloc, tensor

from torch_hbmcomm import smb

DTYPES = {
    "SMB_FLOAT": torch.float32,
    "SMB_DOUBLE": torch.float64,
    "SMB_BFLOAT16": torch.bfloat16,
    "SMB_FLOAT16": torch.float16,
    "SMB_INT32": torch.int32,
    "SMB_INT64": torch.int64,
}
SIZE = 4096

library = smb_c.library()


@pytest.fixture
def settings(
    server: smb.Server, transport: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[pytest.MonkeyPatch]:
    """Name the box in the environment, for a client that the test starts."""
    monkeypatch.setenv("HBMCOMM_BOX", server.url)
    monkeypatch.setenv("HBMCOMM_BOX_TRANSPORT", transport)
    monkeypatch.setenv("HBMCOMM_TOKEN", TOKEN)
    yield monkeypatch
    library.smb_terminate()


@pytest.fixture
def begun(settings: pytest.MonkeyPatch) -> None:
    assert library.smb_init() == 0, library.smb_error()


@pytest.fixture
def python(server: smb.Server) -> Iterator[smb.Box]:
    """Yield a Python client, next to the client in C."""
    with smb.connect(server.url, TOKEN) as connected:
        yield connected


def new_key() -> int:
    return 1 + secrets.randbits(63)


def made(key: int = 0, size: int = SIZE, flags: int = IPC_CREAT) -> tuple[int, int]:
    """Allocate a segment. Return the address of its local copy, and its key."""
    copy, key = alloc(library, key, size, flags)
    assert copy is not None, library.smb_error()
    return copy, key


def assert_failed(code: int, words: str) -> None:
    """Assert the errno and the smb_error() of this thread's last call."""
    found = ctypes.get_errno()
    assert errno.errorcode[found] == errno.errorcode[code], library.smb_error()
    assert re.search(words, library.smb_error().decode()), library.smb_error()


def test_the_library_has_what_the_header_declares() -> None:
    declared = set(re.findall(r"\b((?:smb|shm)_\w+)\(", HEADER))
    assert len(declared) == 11
    assert [name for name in declared if not hasattr(library, name)] == []
    assert CONSTANTS.keys() == DTYPES.keys()


@pytest.mark.usefixtures("begun")
def test_a_pointer_gives_the_key_of_its_segment(python: smb.Box) -> None:
    first, first_key = made()
    second, second_key = made(new_key())
    assert first_key != second_key
    for copy, key in ((first, first_key), (second, second_key)):
        assert [library.shm_get_key(copy + at) for at in (0, 1, SIZE - 1)] == [key] * 3
        assert python.alloc(SIZE, key, mode="attach").size == SIZE
    library.shm_free(second)
    assert library.shm_get_key(second) == 0
    assert_failed(errno.EINVAL, "not into what shm_alloc")


@pytest.mark.usefixtures("begun")
def test_any_pointer_into_the_copy_reads_and_writes(python: smb.Box) -> None:
    copy, key = made()
    assert tensor(copy, SIZE).count_nonzero() == 0
    data = torch.randint(256, (SIZE,), dtype=torch.uint8)
    tensor(copy, SIZE)[:] = data
    assert library.shm_wsync(copy + 100, 50) == 0
    other = python.alloc(SIZE, key, mode="attach")
    other.read()
    expected = torch.zeros(SIZE, dtype=torch.uint8)
    expected[100:150] = data[100:150]
    assert bytes(other.buffer) == bytes(expected.numpy())
    tensor(copy, SIZE).zero_()
    assert library.shm_rsync(copy + 120, 10) == 0
    assert tensor(copy, SIZE).count_nonzero() == data[120:130].count_nonzero()
    assert torch.equal(tensor(copy + 120, 10), data[120:130])


@pytest.mark.usefixtures("begun")
@pytest.mark.parametrize("name", DTYPES)
def test_sums_are_of_the_type(python: smb.Box, name: str) -> None:
    dtype = DTYPES[name]
    target, key = made()
    source, _ = made()
    for copy in (target, source):
        values = tensor(copy, SIZE, dtype)
        if dtype.is_floating_point:
            values.copy_(torch.randn(len(values), dtype=torch.float64))
        else:
            most = torch.iinfo(dtype).max // 2
            values.random_(-most, most)
        assert library.shm_wsync(copy, SIZE) == 0
    first, second = tensor(target, SIZE, dtype).clone(), tensor(source, SIZE, dtype).clone()
    assert library.shm_accum(target + 64, source + 128, 1024, CONSTANTS[name]) == 0
    assert torch.equal(tensor(target, SIZE, dtype), first)  # the local copies do not change
    found = python.alloc(SIZE, key, mode="attach")
    found.read()
    a, b, count = (bytes_ // dtype.itemsize for bytes_ in (64, 128, 1024))
    first[a : a + count] += second[b : b + count]
    assert torch.equal(torch.frombuffer(found.buffer, dtype=dtype), first)


@pytest.mark.usefixtures("begun")
def test_flags_of_a_key() -> None:
    key = new_key()
    assert alloc(library, key, SIZE, 0) == (None, key)
    assert_failed(errno.ENOENT, f"{key:x}")
    made(key, flags=IPC_CREAT | IPC_EXCL)
    assert alloc(library, key, SIZE, IPC_CREAT | IPC_EXCL) == (None, key)
    assert_failed(errno.EEXIST, f"{key:x}")
    made(key, flags=IPC_CREAT)
    made(key, flags=0)
    made(key, size=0, flags=0)
    assert alloc(library, key, SIZE + 1, 0) == (None, key)
    assert_failed(errno.EINVAL, str(SIZE))


@pytest.mark.usefixtures("begun")
def test_a_segment_that_is_attached_for_reading(python: smb.Box) -> None:
    key = new_key()
    theirs = python.alloc(SIZE, key)
    data = random.randbytes(SIZE)
    theirs.write(source=data)
    copy, _ = made(key, flags=SHM_RDONLY)
    assert library.shm_rsync(copy, SIZE) == 0
    assert bytes(tensor(copy, SIZE).numpy()) == data
    own, own_key = made()
    assert library.shm_accum(own, copy, SIZE, CONSTANTS["SMB_INT32"]) == 0
    refused: list[Callable[[], int]] = [
        lambda: library.shm_wsync(copy, 1),
        lambda: library.shm_accum(copy, own, SIZE, CONSTANTS["SMB_INT32"]),
        lambda: library.smb_delete(copy),
    ]
    for call in refused:
        assert call() == -1
        assert_failed(errno.EACCES, f"{key:x}")
    mine = python.alloc(SIZE, own_key, mode="attach")
    mine.read()
    theirs.read()
    assert bytes(mine.buffer) == bytes(theirs.buffer) == data


@pytest.mark.usefixtures("begun")
def test_who_did_not_make_a_segment_deletes_it(python: smb.Box) -> None:
    key = new_key()
    theirs = python.alloc(SIZE, key)
    copy, _ = made(key, flags=0)
    assert library.smb_exists(key) == 1
    assert library.smb_delete(copy + 1) == 0
    assert library.smb_exists(key) == 0
    with pytest.raises(smb.NoSuchKey):
        python.alloc(SIZE, key, mode="attach")
    theirs.write(source=b"here")
    assert library.shm_rsync(copy, 4) == 0
    assert bytes(tensor(copy, 4).numpy()) == b"here"
    assert library.smb_delete(copy) == -1
    assert_failed(errno.ENOENT, f"{key:x}")


@pytest.mark.usefixtures("begun")
def test_a_maker_that_deleted_frees_without_an_error(python: smb.Box) -> None:
    copy, key = made()
    attached = python.alloc(SIZE, key, mode="attach")
    assert library.smb_delete(copy) == 0
    library.shm_free(copy)
    assert library.smb_error() == b""
    attached.free()
    assert all(row["key"] != key for row in python.stats()["segment_table"])


@pytest.mark.usefixtures("begun")
def test_bad_arguments() -> None:
    copy, _ = made()
    other, _ = made()
    kind = CONSTANTS["SMB_FLOAT"]
    calls: list[tuple[Callable[[], object], str]] = [
        (lambda: library.shm_alloc(None, 0, IPC_CREAT), "0 bytes"),
        (lambda: library.smb_exists(0), "takes a key"),
        (lambda: library.shm_rsync(copy, SIZE + 1), f"{SIZE + 1} bytes"),
        (lambda: library.shm_wsync(copy + 1, SIZE), "past the end"),
        (lambda: library.shm_rsync(None, 1), "not into what shm_alloc"),
        (lambda: library.shm_accum(copy, other, SIZE, 0), "no element type 0"),
        (lambda: library.shm_accum(copy, other, SIZE, 99), "no element type 99"),
        (lambda: library.shm_accum(copy, other, 6, kind), "no multiple of 4"),
        (lambda: library.shm_accum(copy + 4, copy, 8, kind), "overlap"),
        (lambda: library.shm_accum(copy, None, 8, kind), "not into what shm_alloc"),
    ]
    for call, words in calls:
        assert call() in (-1, None)
        assert_failed(errno.EINVAL, words)
    library.shm_free(copy + 1)
    assert_failed(errno.EINVAL, "shm_free")


@pytest.mark.usefixtures("begun")
def test_a_box_that_is_full() -> None:
    assert alloc(library, 0, 1 << 29, IPC_CREAT)[0] is None
    assert_failed(errno.ENOMEM, str(1 << 29))


def test_nothing_works_before_it_begins_and_after_it_ends(settings: pytest.MonkeyPatch) -> None:
    def nothing_works() -> None:
        address = ctypes.addressof(ctypes.create_string_buffer(8))
        calls: list[Callable[[], object]] = [
            lambda: library.shm_alloc(None, SIZE, IPC_CREAT),
            lambda: library.shm_rsync(address, 1),
            lambda: library.shm_wsync(address, 1),
            lambda: library.shm_accum(address, address, 8, CONSTANTS["SMB_DOUBLE"]),
            lambda: library.smb_delete(address),
            lambda: library.smb_exists(1),
        ]
        for call in calls:
            assert call() in (-1, None)
            assert_failed(errno.ENOTCONN, "smb_init")
        assert library.shm_get_key(address) == 0
        assert_failed(errno.ENOTCONN, "smb_init")

    nothing_works()
    assert library.smb_init() == library.smb_init() == 0
    made()
    library.smb_terminate()
    nothing_works()


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("HBMCOMM_BOX", "", errno.EINVAL, "HBMCOMM_BOX"),
        ("HBMCOMM_BOX_TRANSPORT", "pigeon", errno.EINVAL, "pigeon"),
        ("HBMCOMM_TOKEN", "another", errno.EACCES, "token"),
    ],
)
def test_a_box_that_does_not_let_it_in(
    settings: pytest.MonkeyPatch, name: str, value: str, code: int, words: str
) -> None:
    settings.setenv(name, value)
    assert library.smb_init() == -1
    assert_failed(code, words)


def test_a_box_that_is_not_there(settings: pytest.MonkeyPatch) -> None:
    url = f"smb://127.0.0.1:{free_port()}"
    settings.setenv("HBMCOMM_BOX", url)
    assert library.smb_init() == -1
    assert_failed(errno.EIO, url)


def test_a_box_that_has_lost_the_segment(settings: pytest.MonkeyPatch) -> None:
    with BoxProcess("--memory", "16MiB") as box:
        settings.setenv("HBMCOMM_BOX", box.url)
        assert library.smb_init() == 0, library.smb_error()
        copy, key = made()
        box.kill()
        box.start()
        end = time.monotonic() + 60
        while library.shm_rsync(copy, SIZE) == 0:  # until the client notices that the box has ended
            assert time.monotonic() < end
        assert_failed(errno.EIDRM, f"{key:x}")
        assert made()[0] != copy
        library.smb_terminate()


ADDING = """
import sys, torch
from harness import smb_c
key, size, seed, times = map(int, sys.argv[1:])
library = smb_c.library()
assert library.smb_init() == 0, library.smb_error()
total, _ = smb_c.alloc(library, key, size, 0)
own = library.shm_alloc(None, size, 0)
draw = torch.Generator().manual_seed(seed)
for _ in range(times):
    smb_c.tensor(own, size, torch.int64).random_(0, 1 << 50, generator=draw)
    assert library.shm_wsync(own, size) == 0, library.smb_error()
    assert library.shm_accum(total, own, size, smb_c.CONSTANTS["SMB_INT64"]) == 0
library.shm_free(own)
library.shm_free(total)
library.smb_terminate()
"""


@pytest.mark.parametrize("transport", ["tcp"])
@pytest.mark.usefixtures("begun")
def test_two_other_processes_add(settings: pytest.MonkeyPatch) -> None:
    times, size = 20, 1 << 20
    copy, key = made(size=size)
    settings.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{ROOT / 'tests' / 'python'}")
    drawn = [seeds.fresh() for _ in range(2)]
    children = [
        subprocess.Popen([sys.executable, "-c", ADDING, *map(str, (key, size, seed, times))])
        for seed in drawn
    ]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    assert library.shm_rsync(copy, size) == 0
    expected = torch.zeros(size // 8, dtype=torch.int64)
    for seed in drawn:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(times):
            expected += torch.empty_like(expected).random_(0, 1 << 50, generator=draw)
    assert torch.equal(tensor(copy, size, torch.int64), expected)
    library.shm_free(copy)
    assert alloc(library, key, size, 0)[0] is None
    assert_failed(errno.ENOENT, f"{key:x}")
