"""Unusual machines and environments: a group works there, or every rank raises the cause.

MPI ends a process in which it cannot start, and may leave files. hbm raises an error before it
starts MPI. So one pool can try one surrounding after the other, until a group over nodes works.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import Context, Pool, beyond_gloo
from harness.worker import log_path

pytestmark = [beyond_gloo, pytest.mark.usefixtures("nothing_left")]

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS
_NEW_HOST_NAME = 0x04000000  # CLONE_NEWUTS
_ALL_PRIVATE = 1 << 18 | 1 << 14  # MS_PRIVATE, MS_REC
_READ_ONLY = 1  # MS_RDONLY
_DETACH = 2  # MNT_DETACH
_LONGEST_NAME = 64  # HOST_NAME_MAX

_PYTORCH_WITHOUT_PROC = "Error in cpuinfo: "  # PyTorch prints it, whatever the backend

_numbers = itertools.count()

privileged = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and host names are root's")


@dataclass(frozen=True)
class Variables:
    """Environment variables."""

    values: tuple[tuple[str, str], ...]

    @contextmanager
    def entered(self) -> Iterator[None]:
        os.environ.update(self.values)
        yield
        for name, _ in self.values:
            del os.environ[name]


@dataclass(frozen=True)
class Mount:
    """An empty file system in place of the folder, with mount's options and flags."""

    folder: str
    options: str = ""
    flags: int = 0

    @contextmanager
    def entered(self) -> Iterator[None]:
        leave_namespaces(_NEW_MOUNTS)
        libc("mount", b"none", b"/", None, _ALL_PRIVATE, None)
        folder = self.folder.encode()
        libc("mount", b"none", folder, b"tmpfs", self.flags, self.options.encode())
        yield
        libc("umount2", folder, _DETACH)


@dataclass(frozen=True)
class FewDescriptors:
    """A limit of open files that leaves room for `left` more files."""

    left: int

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        gaps = [os.open(os.devnull, os.O_RDONLY)]
        while gaps[-1] < highest:
            gaps.append(os.open(os.devnull, os.O_RDONLY))
        resource.setrlimit(resource.RLIMIT_NOFILE, (gaps[-1] + 1 + self.left, before[1]))
        yield
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for gap in gaps:
            os.close(gap)


@dataclass(frozen=True)
class SmallFiles:
    """A limit on the size of files, in bytes. `one_processor`: the process has one processor."""

    most: int
    one_processor: bool = False

    @contextmanager
    def entered(self) -> Iterator[None]:
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        processors = os.sched_getaffinity(0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (self.most, before[1]))
        if self.one_processor:
            os.sched_setaffinity(0, {min(processors)})
        yield
        os.sched_setaffinity(0, processors)
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@dataclass(frozen=True)
class HostName:
    """A host name of `length` characters."""

    length: int

    @contextmanager
    def entered(self) -> Iterator[None]:
        leave_namespaces(_NEW_HOST_NAME)
        before = socket.gethostname()
        socket.sethostname("n" * self.length)
        yield
        socket.sethostname(before)


Surrounding = Variables | Mount | FewDescriptors | SmallFiles | HostName


def libc(function: str, *arguments: bytes | int | None) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


@cache
def leave_namespaces(kind: int) -> None:
    libc("unshare", kind)


def form_over_nodes(
    context: Context, store: str, surrounding: Surrounding | None, ranks: tuple[int, ...]
) -> str:
    """Call form() with a node for each rank."""
    os.environ["HBMCOMM_NODE_ID"] = str(context.rank)
    return form(context, store, surrounding, ranks)


def form(
    context: Context, store: str, surrounding: Surrounding | None, ranks: tuple[int, ...]
) -> str:
    """Form and use the default group. Only the ranks `ranks` do so in the surrounding.

    Return the error, or "" if there was none.
    """
    place: AbstractContextManager[None] = nullcontext()
    if surrounding is not None and context.rank in ranks:
        place = surrounding.entered()
    with place:
        try:
            dist.init_process_group(
                "hbm",
                init_method=f"file://{store}",
                rank=context.rank,
                world_size=context.size,
                timeout=timedelta(seconds=60),
            )
        except dist.DistBackendError as error:
            return str(error)
        data = torch.ones(1000)
        dist.all_reduce(data)
        assert (data == context.size).all()
        dist.destroy_process_group()
    return ""


def assert_refused(
    pool: Pool, folder: Path, surrounding: Surrounding, ranks: tuple[int, ...], *words: str
) -> None:
    store = str(folder / f"store{next(_numbers)}")  # the last rank may still remove an earlier one
    errors = pool.run(form_over_nodes, store, surrounding, ranks)
    for rank, error in enumerate(errors):
        assert all(word in error for word in words), (surrounding, error)
        if rank not in ranks:
            assert f"rank {ranks[0]} of group" in error, (surrounding, error)


def assert_works(pool: Pool, folder: Path, surrounding: Surrounding | None = None) -> None:
    assert not any(pool.run(form_over_nodes, f"{folder}/last", surrounding, (0, 1)))
    assert not any(pool.close())


@pytest.mark.ranks(2)
def test_variables_that_mpi_cannot_follow(bare_pool: Pool, tmp_path: Path) -> None:
    """The error has the variable and its value; the next group works without it."""
    rc = Variables((("UCX_TLS", "rc"),))
    assert_refused(bare_pool, tmp_path, rc, (0, 1), "UCX_TLS=rc", "would end this process")
    assert_refused(bare_pool, tmp_path, rc, (1,), "rank 1: UCX_TLS=rc")
    absent = Variables((("MPIR_CVAR_CH4_NETMOD", "absent"),))
    assert_refused(bare_pool, tmp_path, absent, (0, 1), "MPIR_CVAR_CH4_NETMOD=absent")
    assert_works(bare_pool, tmp_path)


@pytest.mark.ranks(2)
def test_variables_that_are_overridden(bare_pool: Pool, tmp_path: Path) -> None:
    """hbm overrides variables that would make MPI_Init end the process, hang, or leave files."""
    harmful = {
        "UCX_TLS": "",
        "MPIR_CVAR_PMI_VERSION": "2",
        "MPIR_CVAR_CH4_NUM_VCIS": "4",
        "UCX_POSIX_USE_PROC_LINK": "n",
    }
    assert_works(bare_pool, tmp_path, Variables(tuple(harmful.items())))


@pytest.mark.ranks(2)
def test_a_trial_that_passes(bare_pool: Pool, tmp_path: Path) -> None:
    assert_works(bare_pool, tmp_path, Variables((("UCX_TLS", "self,sm,tcp"),)))


@pytest.mark.ranks(2)
def test_few_descriptors(bare_pool: Pool, tmp_path: Path) -> None:
    assert_refused(bare_pool, tmp_path, FewDescriptors(30), (0, 1), "ulimit -n")
    assert_refused(bare_pool, tmp_path, FewDescriptors(30), (1,), "ulimit -n")
    assert_works(bare_pool, tmp_path, FewDescriptors(60))


@privileged
@pytest.mark.ranks(2)
def test_shared_memory_without_room_or_permission(bare_pool: Pool, tmp_path: Path) -> None:
    read_only = Mount("/dev/shm", "size=80m", _READ_ONLY)
    for ranks in [(0, 1), (1,)]:
        assert_refused(bare_pool, tmp_path, read_only, ranks, "/dev/shm", "Read-only")
    assert_refused(bare_pool, tmp_path, Mount("/dev/shm", "size=80m,nr_inodes=2"), (0, 1), "df -i")
    assert_refused(bare_pool, tmp_path, Mount("/dev/shm", "size=64k"), (0, 1), "--shm-size")
    assert_works(bare_pool, tmp_path, Mount("/dev/shm", "size=8m,nr_inodes=8"))


@privileged
@pytest.mark.ranks(2)
def test_a_long_host_name(bare_pool: Pool, tmp_path: Path) -> None:
    too_long = HostName(_LONGEST_NAME)
    assert_refused(bare_pool, tmp_path, too_long, (0, 1), "n" * _LONGEST_NAME, "shorter name")
    assert_works(bare_pool, tmp_path, HostName(_LONGEST_NAME - 1))


def form_in(context: Context, store: str, surrounding: Surrounding) -> tuple[str, str]:
    """Return the error of a group on one node, and the rank's output."""
    error = form(context, store, surrounding, (0, 1))
    lines = log_path(context.folder, context.rank).read_text().splitlines()
    return error, "\n".join(line for line in lines if not line.startswith(_PYTORCH_WITHOUT_PROC))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "surrounding",
    [
        pytest.param(Mount("/proc"), marks=privileged),
        pytest.param(Mount("/sys"), marks=privileged),
        SmallFiles(4 << 20),
        SmallFiles(4 << 20, one_processor=True),
    ],
)
def test_one_node_works_without(bare_pool: Pool, tmp_path: Path, surrounding: Surrounding) -> None:
    """Check that a group on one node works in each surrounding, and prints nothing."""
    assert bare_pool.run(form_in, f"{tmp_path}/store", surrounding) == [("", "")] * 2


def finalize_after(context: Context, store: str) -> str:
    """Return the error of a group that is formed after MPI.Finalize()."""
    assert not form_over_nodes(context, store, None, ())
    finalize()
    return form_over_nodes(context, store + "2", None, ())


def finalize_before(context: Context, store: str) -> str:
    """Return the error of a collective between MPI.Finalize() and destroying the group."""
    os.environ["HBMCOMM_NODE_ID"] = str(context.rank)
    dist.init_process_group(
        "hbm", init_method=f"file://{store}", rank=context.rank, world_size=context.size
    )
    dist.all_reduce(torch.ones(1))
    finalize()
    with pytest.raises(dist.DistBackendError) as caught:
        dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
    return str(caught.value)


def finalize() -> None:
    import mpi4py

    mpi4py.rc.initialize = mpi4py.rc.finalize = False
    from mpi4py import MPI

    assert MPI.COMM_WORLD.allreduce(1) == MPI.COMM_WORLD.size
    MPI.Finalize()


@pytest.mark.ranks(3)
@pytest.mark.parametrize("program", [finalize_after, finalize_before])
def test_mpi_finalize_by_the_program(
    bare_pool: Pool, tmp_path: Path, program: Callable[[Context, str], str]
) -> None:
    for error in bare_pool.run(program, f"{tmp_path}/store"):
        assert "MPI was finalised in this process" in error
    assert not any(bare_pool.close())
