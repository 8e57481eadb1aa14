"""torch_hbmcomm.memory, with and without HBM.

memkind reads its environment once in a process. So tests that depend on this environment run in new
processes: the environment names node 0 as HBM, or it excludes all nodes.
"""

from __future__ import annotations

import os
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import Context, Pool
from harness.worker import log_path

from torch_hbmcomm import memory

PRELUDE = """
import gc, os
import numpy as np
import pytest
import torch
from torch_hbmcomm import memory
"""


def execute(context: Context, body: str, environment: dict[str, str]) -> str:
    """Run `body`. Returns its log."""
    for name in [*os.environ]:
        if name.startswith(("HBMCOMM_", "MEMKIND_")):
            del os.environ[name]
    os.environ.update(environment)
    exec(PRELUDE + body, {})
    return log_path(context.folder, context.rank).read_text()


def run(body: str, **environment: str) -> str:
    """Run `body` in a process that has not used memkind. Returns the log.

    A failed assertion in the body fails the test. So does an exit code other than 0.
    """
    pool = Pool(1, bare=True)
    try:
        logged: str = pool.run(execute, textwrap.dedent(body), environment)[0]
        assert pool.close() == [0]
    finally:
        pool.kill()
    return logged


HIDDEN = {"MEMKIND_HBW_THRESHOLD": "1000000000"}  # MiB/s


def with_hbm(body: str, **environment: str) -> str:
    return run(body, MEMKIND_HBW_NODES="0", **environment)


def without_hbm(body: str, **environment: str) -> str:
    """Run the body with a threshold of bandwidth that no node reaches, so that no node is HBM."""
    return run("assert not memory.available()\n" + textwrap.dedent(body), **HIDDEN, **environment)


def test_import_is_cheap() -> None:
    run("import sys; assert 'torch_hbmcomm._C' not in sys.modules")


MAPPED = """
def mapped():
    text = open("/proc/self/maps").read()
    return [name for name in ("memkind", "hwloc", "numa") if f"/lib{name}" in text]
"""


def test_memkind_and_hwloc_load_only_for_possible_hbm() -> None:
    """Forming a group loads no more libraries than memory.available(). Allocating loads all."""
    run(
        MAPPED
        + """
import torch.distributed as dist
everything = ["memkind", "hwloc", "numa"]
available = memory.available()
asked = mapped()
assert asked == everything if available else asked in ([], everything)
store = dist.HashStore()
dist.init_process_group("hbm", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
assert mapped() == asked
memory.empty(10)
assert mapped() == everything
dist.destroy_process_group()
"""
    )


def test_the_library_that_is_missing_is_named(tmp_path: Path) -> None:
    run(rf"""
        import pathlib
        from torch_hbmcomm import native
        module = pathlib.Path(native.load.__wrapped__.__code__.co_filename).parent
        (folder,) = module.glob(f"torch_{{'_'.join(torch.__version__.split('.')[:2])}}")
        alone = pathlib.Path({str(tmp_path)!r}, folder.name)
        alone.mkdir()
        for file in folder.glob("_C*.so"):
            (alone / file.name).symlink_to(file)
        native.__file__ = str(alone.parent / "native.py")
        assert native.load().__file__.startswith({str(tmp_path)!r})
        with pytest.raises(RuntimeError, match=r"memkind cannot be loaded: .*libhbm_memkind\.so"):
            memory.info()
    """)


def test_every_policy_with_hbm() -> None:
    with_hbm("""
        assert memory.available()
        tensors = []
        for policy in ("preferred", "bind", "interleave", "ddr"):
            tensor = memory.empty((256, 1024), policy=policy).fill_(1)
            assert tensor.shape == (256, 1024) and tensor.dtype == torch.float32
            assert tensor.sum() == 256 * 1024
            assert sum(memory.where(tensor).values()) == tensor.nbytes
            tensors.append(tensor)
            if policy != "ddr":
                assert memory.where(tensor) == {0: tensor.nbytes}
        segments = {segment.policy: segment for segment in memory.info().segments}
        assert segments["bind"].hbm_bytes == segments["bind"].peak_bytes == 1 << 20
        assert segments["ddr"].ddr_bytes == 1 << 20 and segments["ddr"].hbm_bytes == 0
    """)


def test_without_hbm_only_the_strict_policies_fail() -> None:
    log = without_hbm("""
        for policy in ("bind", "interleave"):
            with pytest.raises(RuntimeError, match="memkind finds none"):
                memory.empty(10, policy=policy)
        for policy in ("preferred", "ddr", "preferred"):
            memory.empty(10, policy=policy).fill_(1)
        found = memory.info()
        assert not found.hbm_available and found.closest_hbm_nodes == ()
    """)
    assert log.count("uses DDR") <= 1, "said once"


def test_the_environment_gives_the_policy() -> None:
    with_hbm(
        """
        memory.empty(10)
        memory.empty_numpy(10)
        (segment,) = memory.info().segments
        assert segment.policy == "interleave" and segment.allocations == 2
        assert memory.info().settings["HBMCOMM_MEMORY"] == "interleave"
        """,
        HBMCOMM_MEMORY="interleave",
    )
    run(
        """
        with pytest.raises(ValueError, match="HBMCOMM_MEMORY must be one of"):
            memory.empty(10)
        """,
        HBMCOMM_MEMORY="mcdram",
    )


def test_nodes_that_do_not_exist_are_an_error() -> None:
    run(
        """
        assert not memory.available()
        with pytest.raises(ValueError, match="MEMKIND_HBW_NODES=no-node"):
            memory.empty(10)
        """,
        MEMKIND_HBW_NODES="no-node",
    )


def test_a_threshold_that_is_no_number_is_an_error() -> None:
    run(
        """
        with pytest.raises(ValueError, match="MEMKIND_HBW_THRESHOLD=many; .* a number of MiB/s"):
            memory.empty(1024, policy="bind")
        """,
        MEMKIND_HBW_THRESHOLD="many",
    )


def test_too_much_is_an_error_and_no_kill() -> None:
    with_hbm("""
        too_much = memory.info().nodes[0].total_bytes
        for policy in ("bind", "interleave"):
            with pytest.raises(MemoryError, match="HBM node 0 can give"):
                memory.empty(too_much, dtype=torch.uint8, policy=policy)
        for policy in ("preferred", "bind", "interleave", "ddr"):
            with pytest.raises(MemoryError):
                memory.empty_numpy(1 << 60, dtype="uint8", policy=policy)
    """)


def test_memory_lives_as_long_as_a_view_of_it() -> None:
    with_hbm("""
        def in_use():
            return memory.info().segments[0].in_use_bytes

        view = memory.empty(1 << 20, dtype=torch.uint8)[5:10].fill_(3)
        row = memory.empty_numpy((4, 1 << 18), dtype="uint8")[2]
        row[:] = 4
        gc.collect()
        assert in_use() == 2 << 20
        assert view.tolist() == [3] * 5 and row.max() == 4
        del view, row
        gc.collect()
        assert in_use() == 0
    """)


def test_a_forked_child_neither_allocates_nor_frees() -> None:
    with_hbm("""
        tensor = memory.empty(1 << 18).fill_(7)
        child = os.fork()
        if child == 0:
            try:
                assert tensor[-1] == 7
                with pytest.raises(RuntimeError, match="a forked child cannot"):
                    memory.empty(10)
                del tensor
                gc.collect()
                assert memory.info().segments == ()
            except BaseException:
                os._exit(1)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert tensor.min() == 7
        assert memory.info().segments[0].in_use_bytes == tensor.nbytes
    """)


@pytest.mark.parametrize("shape", [0, (0,), (3, 0, 2), (), 5, [2, 3], torch.Size([2, 2])])
def test_shapes(shape: int | list[int] | tuple[int, ...]) -> None:
    expected = np.empty(shape).shape
    assert tuple(memory.empty(shape, policy="ddr").shape) == expected
    array = memory.empty_numpy(shape, policy="ddr")
    assert array.shape == expected and array.dtype == np.float32


@pytest.mark.parametrize("dtype", [torch.bool, torch.bfloat16, torch.int64, torch.complex128])
def test_torch_dtypes(dtype: torch.dtype) -> None:
    tensor = memory.empty((3, 4), dtype, "ddr").fill_(1)
    assert tensor.dtype == dtype and tensor.is_contiguous() and tensor.data_ptr() % 64 == 0


@pytest.mark.parametrize("dtype", ["uint8", "float64", np.complex64, np.dtype("i4,f8")])
def test_numpy_dtypes(dtype: object) -> None:
    array = memory.empty_numpy((3, 4), dtype, "ddr")  # type: ignore[arg-type]
    assert array.dtype == np.dtype(dtype)  # type: ignore[call-overload]
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.aligned
    assert array.data.nbytes == array.nbytes


@pytest.mark.parametrize(
    ("error", "arguments"),
    [
        (ValueError, {"shape": (-1, 2)}),
        (ValueError, {"shape": (1 << 62, 8)}),
        (ValueError, {"shape": (1 << 63) - 1}),
        (ValueError, {"shape": (1 << 63,)}),
        (ValueError, {"shape": (2, 1 << 64)}),
        (ValueError, {"shape": (0, 1 << 63)}),
        (TypeError, {"shape": 2.5}),
        (TypeError, {"shape": "12"}),
        (TypeError, {"shape": None}),
        (ValueError, {"shape": 1, "policy": "hbm"}),
        (TypeError, {"shape": 1, "policy": 1}),
    ],
)
def test_bad_arguments(error: type[Exception], arguments: dict[str, object]) -> None:
    for make in (memory.empty, memory.empty_numpy):
        with pytest.raises(error):
            make(**arguments)  # type: ignore[arg-type]


def test_bad_dtypes() -> None:
    with pytest.raises(TypeError, match=r"torch\.dtype"):
        memory.empty(1, "float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="quantized"):
        memory.empty(1, torch.qint8)
    with pytest.raises(ValueError, match="Python objects"):
        memory.empty_numpy(1, object)
    with pytest.raises(TypeError):
        memory.empty_numpy(1, "no such type")


def test_any_strides_are_accepted_by_where() -> None:
    tensor = torch.ones(64, 1024)
    assert sum(memory.where(tensor).values()) == tensor.nbytes
    assert sum(memory.where(tensor.t()).values()) == tensor.nbytes
    assert sum(memory.where(tensor[3:5, 7]).values()) == 4096 + 4
    assert memory.where(tensor[:0]) == {}
    array = np.ones((64, 128))
    assert sum(memory.where(array[::-1, ::-1]).values()) == array.nbytes
    assert sum(memory.where(array[5]).values()) == 1024


def test_only_touched_pages_are_counted_by_where() -> None:
    array = memory.empty_numpy(256 << 20, "uint8", "ddr")
    array[: 64 << 20] = 1
    touched = sum(memory.where(array).values())
    assert 64 << 20 <= touched < array.nbytes


def test_other_objects_are_refused_by_where() -> None:
    with pytest.raises(ValueError, match="meta"):
        memory.where(torch.empty(3, device="meta"))
    with pytest.raises(ValueError, match="sparse"):
        memory.where(torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match="list"):
        memory.where([1, 2])  # type: ignore[arg-type]


def test_info_describes_the_machine() -> None:
    found = memory.info()
    assert found.memkind_version.count(".") == 2
    assert found.nodes and all(node.total_bytes >= 0 for node in found.nodes)
    assert any(node.has_cpus and node.cpus for node in found.nodes)
    assert memory.available() == found.hbm_available
    with pytest.raises(AttributeError):
        found.mode = "flat"  # type: ignore[misc]


def test_bind() -> None:
    run(
        """
        allowed = os.sched_getaffinity(0)
        assert "not bound" in memory.bind("none", 0, 1)
        assert "one core" in memory.bind()  # from the environment
        assert os.sched_getaffinity(0) < allowed or len(allowed) <= 2
        assert "NUMA node" in memory.bind("numa", 0, 1)
        assert "NUMA node" in memory.bind("auto", 0, 1)
        assert os.sched_getaffinity(0) == allowed
        with pytest.raises(ValueError, match="100000 local ranks"):
            memory.bind("core", 0, 100000)
        with pytest.raises(ValueError, match="cannot bind local rank 4294967296 of 4294967297"):
            memory.bind("none", 1 << 32, (1 << 32) + 1)
        with pytest.raises(ValueError, match="mode must be one of none, core, numa, auto"):
            memory.bind("socket", 0, 1)
        """,
        HBMCOMM_BIND="core",
        MPI_LOCALRANKID="0",
        MPI_LOCALNRANKS="1",
    )
