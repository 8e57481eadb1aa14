"""Tensors and arrays in high-bandwidth memory, and facts about this machine's memory.

    import torch_hbmcomm as hbmcomm

    weights = hbmcomm.memory.empty((4096, 4096), policy="bind")
    hbmcomm.memory.where(weights)  # {4: 67108864}: all of it on NUMA node 4

Policies:

* ``preferred``: the closest HBM node; DDR when it is full or absent
* ``bind``: the closest HBM node; ``MemoryError`` when it is full, ``RuntimeError`` when absent
* ``interleave``: pages in turn over the HBM nodes; errors as for ``bind``
* ``ddr``: ordinary memory

``docs/memory.md`` says more. If a process allocates from a segment and then forks, ``empty`` and
``empty_numpy`` raise ``RuntimeError`` in the child. The tensors that the child inherits stay
readable.
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from torch_hbmcomm.local_rank import local_rank_and_size
from torch_hbmcomm.variables import first_use

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import torch

__all__ = [
    "BindMode",
    "Info",
    "Node",
    "Policy",
    "Segment",
    "available",
    "bind",
    "empty",
    "empty_numpy",
    "info",
    "where",
]

Policy = Literal["preferred", "bind", "interleave", "ddr"]
BindMode = Literal["none", "core", "numa", "auto"]

_SETTINGS = (
    "HBMCOMM_MEMORY",
    "HBMCOMM_STAGING_BYTES",
    "HBMCOMM_BIND",
    "MEMKIND_HBW_NODES",
    "MEMKIND_HBW_THRESHOLD",
)


@dataclass(frozen=True)
class Node:
    """A NUMA node."""

    id: int
    total_bytes: int
    free_bytes: int
    """Free pages and half of the file cache."""
    room_bytes: int
    """The bytes that hbm would allocate: ``free_bytes`` less a margin of 32 MiB and 1/128 of the
    node."""
    is_hbm: bool
    has_cpus: bool
    cpus: str
    """Its CPUs, as in ``"0-3,8"``; empty for a node of memory alone."""


@dataclass(frozen=True)
class SegmentStats:
    """The use of one policy's segment: the memory that this process shares with others of its node.
    A segment has tensors, arrays, and the slots through which groups send other tensors."""

    policy: Policy
    in_use_bytes: int
    peak_bytes: int
    hbm_bytes: int
    """The part of ``in_use_bytes`` for which HBM nodes had room when it was allocated."""
    ddr_bytes: int
    """The part of ``in_use_bytes`` in DDR, by policy or because HBM was short."""
    allocations: int
    spills: int
    """Allocations that went to DDR because HBM was short."""
    page_bytes: int
    """The size of the largest page that the kernel has mapped."""


Segment = SegmentStats  # the public name; smb.Segment is the memory box's


@dataclass(frozen=True)
class Info:
    """The memory of this machine, and how each fact was found."""

    hbm_available: bool
    hbm_source: str
    """The way in which memkind found HBM, or its reason for finding none."""
    mode: Literal["none", "flat", "cache", "hybrid", "hbm-only"]
    """``flat``: HBM has NUMA nodes of its own. ``cache``: HBM is a cache in front of DDR.
    ``hybrid``: both. ``hbm-only``: all memory is HBM. ``none``: no HBM was found."""
    mode_source: str
    cluster: str
    """The number of CPU nodes in a socket, as in ``"4 (SNC-4)"``."""
    cpu_node: int | None
    """The NUMA node of the CPU that this thread runs on."""
    cpu_nodes: int
    """The number of NUMA nodes with CPUs that this process may use."""
    room_bytes: int
    """The bytes of memory that hbm would allocate: of this machine, and within the limits of this
    process' control groups."""
    closest_hbm_nodes: tuple[int, ...]
    """The HBM nodes closest to ``cpu_node``."""
    memkind_version: str
    nodes: tuple[Node, ...]
    segments: tuple[SegmentStats, ...]
    """One entry for each policy that this process has used."""
    settings: dict[str, str]
    """The values of ``HBMCOMM_MEMORY``, ``HBMCOMM_STAGING_BYTES``, ``HBMCOMM_BIND``,
    ``MEMKIND_HBW_NODES`` and ``MEMKIND_HBW_THRESHOLD``, without variables that are not set."""


def available() -> bool:
    """Return True if memkind can allocate from high-bandwidth memory on this machine."""
    return bool(_native().memory_available())


def info() -> Info:
    """Return the facts about this machine's memory. Takes milliseconds; does not cache."""
    found: dict[str, Any] = _native().memory_info()
    found["nodes"] = tuple(Node(**node) for node in found["nodes"])
    found["segments"] = tuple(SegmentStats(**segment) for segment in found["segments"])
    found["closest_hbm_nodes"] = tuple(found["closest_hbm_nodes"])
    found["cpu_node"] = None if found["cpu_node"] < 0 else found["cpu_node"]
    settings = {name: os.environ[name] for name in _SETTINGS if name in os.environ}
    return Info(**found, settings=settings)


def place_large_tensors_in_segment() -> None:
    """Make PyTorch's CPU allocator place tensors in this process' shared segment, from now on.

    It places tensors of 64 KiB and more, under the policy that HBMCOMM_MEMORY names.
    HBMCOMM_ALLOCATOR=segment has the same effect.

    Raises RuntimeError when another library has replaced PyTorch's CPU allocator.
    """
    first_use()
    _native().install_cpu_allocator(_policy(None))


def place_large_tensors_at_import() -> None:
    """Do the same as place_large_tensors_in_segment(), while torch is imported.

    The importing program may not use hbm. So a wrong value of a variable raises nothing here, but
    at the first use of hbm. With a wrong HBMCOMM_MEMORY, tensors stay in ordinary memory.
    """
    try:
        policy = _policy(None)
    except ValueError:
        return
    _native().install_cpu_allocator(policy)


def empty(
    shape: int | Iterable[int],
    dtype: torch.dtype | None = None,
    policy: Policy | None = None,
) -> torch.Tensor:
    """Return an uninitialised CPU tensor in memory of the given policy.

    The memory is freed when the last tensor that shares it is gone.

    Args:
        shape: one extent, or one for each dimension
        dtype: the type of the elements; None: torch.float32
        policy: the policy of the memory; None: HBMCOMM_MEMORY, else "preferred"

    Raises ValueError or TypeError for a bad argument, MemoryError when memory is short, and
    RuntimeError when the policy needs HBM and the machine has none.
    """
    import torch

    first_use()
    if dtype is None:
        dtype = torch.float32
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch.dtype such as torch.float32, not {dtype!r}")
    tensor: torch.Tensor = _native().memory_empty(_shape(shape), dtype, _policy(policy))
    return tensor


def empty_numpy(
    shape: int | Iterable[int],
    dtype: npt.DTypeLike = "float32",
    policy: Policy | None = None,
) -> np.ndarray[Any, Any]:
    """Return an uninitialised NumPy array in memory of the given policy: see ``empty``.

    It is writable and contiguous, so it can be a buffer for mpi4py. It keeps its memory alive.

    Args:
        shape: one extent, or one for each dimension
        dtype: the type of the elements, which cannot be Python objects
        policy: the policy of the memory; None: HBMCOMM_MEMORY, else "preferred"
    """
    import numpy as np
    import torch

    first_use()
    element = np.dtype(dtype)
    if element.hasobject:
        raise ValueError(f"dtype {element} holds Python objects, which need memory of Python's own")
    extents = _shape(shape)
    size = element.itemsize
    for extent in extents:
        size *= extent
    if size > np.iinfo(np.intp).max:
        raise ValueError(f"shape {tuple(extents)} of {element} is larger than the address space")
    block: torch.Tensor = _native().memory_empty([size], torch.uint8, _policy(policy))
    return np.ndarray(extents, element, buffer=block.numpy())


def where(memory: torch.Tensor | np.ndarray[Any, Any]) -> dict[int, int]:
    """Return the number of bytes of a CPU tensor or NumPy array that each NUMA node holds now.

    Pages that have never been written are on no node, so the sum may be less than the size. For a
    strided view, all bytes from the first to the last element count.
    """
    import numpy as np
    import torch

    if isinstance(memory, torch.Tensor):
        if memory.device.type != "cpu" or memory.layout != torch.strided:
            raise ValueError(
                f"where() takes dense CPU tensors, not {memory.layout} on {memory.device}"
            )
        itemsize = memory.element_size()
        strides = [stride * itemsize for stride in memory.stride()]
        extent = _extent(memory.data_ptr(), tuple(memory.shape), strides, itemsize)
    elif isinstance(memory, np.ndarray):
        address = memory.__array_interface__["data"][0]
        extent = _extent(address, memory.shape, memory.strides, memory.itemsize)
    else:
        raise TypeError(f"where() takes a torch.Tensor or a numpy.ndarray, not {type(memory)}")
    nodes: dict[int, int] = _native().memory_where(*extent)
    return nodes


def bind(
    mode: BindMode | None = None,
    local_rank: int | None = None,
    local_size: int | None = None,
) -> str:
    """Bind this process' threads to CPUs, and so to the memory nearest to them.

    ``core`` gives each local rank a core of its own. ``numa`` gives it a NUMA node; ranks share
    nodes if there are more ranks than nodes. ``auto`` gives it its part of the machine: whole
    nodes, or whole L3 caches of a node (``docs/memory.md``, "Binding ranks"). ``none`` changes
    nothing. A binding stays within the CPUs that the process may use. Call it before memory is
    allocated. Returns a description of the binding.

    Args:
        mode: "core", "numa", "auto" or "none"; None: HBMCOMM_BIND, else "none"
        local_rank: the index of this process among the job's processes on this machine; None: from
            the variables of torchrun, mpiexec or srun, else 0 if the process is alone
        local_size: the number of the job's processes on this machine; None: from these variables,
            else 1 if the process is alone

    Raises ValueError for a bad argument and for more ranks than cores under ``core``. Except under
    ``none`` raises ValueError if the variables show several processes but not both numbers, or
    contradict each other (``docs/memory.md``, "Binding ranks").
    """
    first_use()
    if mode is not None:
        chosen = _choice("mode", mode, BindMode)
    else:
        chosen = _choice("HBMCOMM_BIND", os.environ.get("HBMCOMM_BIND") or "none", BindMode)
    if chosen == "none" and (local_rank is None or local_size is None):
        local_rank, local_size = 0, 1  # "none" does not use them
    rank, size = local_rank_and_size(local_rank, local_size, os.environ)
    return str(_native().memory_bind(chosen, rank, size))


def _native() -> Any:
    from torch_hbmcomm.native import load

    return load()


def _shape(shape: int | Iterable[int]) -> list[int]:
    """Return the extents. Raises ValueError for a negative extent, or one of 2**63 or more."""
    try:
        extents = [operator.index(extent) for extent in _as_iterable(shape)]
    except TypeError:
        raise TypeError(f"shape must be an integer or a sequence of integers: {shape!r}") from None
    if any(extent < 0 for extent in extents):
        raise ValueError(f"a shape has no negative extent: {tuple(extents)}")
    if any(extent >= 1 << 63 for extent in extents):
        raise ValueError(f"shape {tuple(extents)} is larger than the address space")
    return extents


def _as_iterable(shape: int | Iterable[int]) -> Iterable[int]:
    return shape if isinstance(shape, Iterable) else (shape,)


def _policy(policy: Policy | None) -> str:
    named: object = policy
    source = "policy"
    if named is None:
        named, source = os.environ.get("HBMCOMM_MEMORY") or None, "HBMCOMM_MEMORY"
    if named is None:
        return "preferred"
    chosen = _choice(source, named, Policy)
    _native().memory_named_by_user(chosen)
    return chosen


def _choice(name: str, value: object, literal: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{name} must be a string, not {value!r}")
    choices = get_args(literal)
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
    return value


def _extent(
    address: int, shape: Sequence[int], byte_strides: Sequence[int], itemsize: int
) -> tuple[int, int]:
    """Return a strided array's lowest address, and the number of bytes from there to its end."""
    if 0 in shape:
        return address, 0
    reach = [(size - 1) * stride for size, stride in zip(shape, byte_strides, strict=True)]
    before = sum(step for step in reach if step < 0)
    after = sum(step for step in reach if step > 0)
    return address + before, after - before + itemsize
