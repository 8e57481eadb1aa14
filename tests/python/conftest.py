"""Fixtures: `ranks` (every world size in turn) and pools of that many ranks.

`@pytest.mark.ranks(2, 4)` limits a test to these world sizes; HBMCOMM_TEST_RANKS=N limits the run
to one size. The quick tier takes 2 ranks, or the smallest number of at least 2 that a test allows.
The full tier takes the others, unless the test is marked `every_size`. A session keeps one pool at
a time: pytest runs all tests of a world size together.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

# Registered before the harness is imported, so that its assertions show values.
pytest.register_assert_rewrite("harness")

import surroundings  # noqa: E402

surroundings.settle()

import torch  # noqa: E402
from harness import SHORT_TIMEOUT, Pool, all_world_sizes, seeds, shm, stuck  # noqa: E402
from harness.boxes import box, connect, server  # noqa: E402
from harness.served import boxes, many_shards, transport  # noqa: E402

__all__ = ["box", "boxes", "connect", "many_shards", "server", "transport"]  # fixtures


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): the world sizes to run this test with")
    seeds.settle()  # seeds and /dev/shm first, before any process starts
    shm.isolate()
    torch.set_num_threads(1)  # a second thread would spin for work of microseconds


def pytest_report_header() -> list[str]:
    return [
        f"/dev/shm: {'its own' if shm.isolate() else 'shared with other jobs'}",
        f"{seeds.VARIABLE}={seeds.settle()}",
    ]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    seeds.begin(item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with stuck.notes_of(item):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.failed:
        report.sections.append(("seed", f"{seeds.VARIABLE}={seeds.settle()}"))
    return report


@pytest.hookimpl(trylast=True)  # after the tests of a world size were put together
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with tests that take minutes: at the end, such a test would leave processors idle."""
    long = ("vm", "torch_suite")
    items.sort(key=lambda item: not any(map(item.get_closest_marker, long)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "ranks" not in metafunc.fixturenames:
        return
    sizes = all_world_sizes()
    for mark in metafunc.definition.iter_markers("ranks"):
        sizes = tuple(size for size in sizes if size in mark.args)
    quick = min((size for size in sizes if size >= 2), default=1)
    if len(sizes) == 1 or metafunc.definition.get_closest_marker("every_size"):
        tiers: dict[int, tuple[pytest.MarkDecorator, ...]] = dict.fromkeys(sizes, ())
    else:
        tiers = {size: () if size == quick else (pytest.mark.full,) for size in sizes}
    cases = [pytest.param(size, marks=marks) for size, marks in tiers.items()]
    metafunc.parametrize("ranks", cases, scope="session", ids=lambda size: f"{size}ranks")


@pytest.fixture(scope="session")
def pool(ranks: int) -> Iterator[Pool]:
    """Yield the session's pool of `ranks` ranks. A test that may harm groups takes another pool."""
    shared = Pool(ranks)
    yield shared
    assert not any(shared.close()), "a rank of the pool left with an error code"


@pytest.fixture
def fresh_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool for this test alone. Kill the pool at the end."""
    own = Pool(ranks)
    yield own
    own.kill()


@pytest.fixture
def impatient_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool for this test alone, with a short group timeout. Kill the pool at the end."""
    own = Pool(ranks, timeout=SHORT_TIMEOUT)
    yield own
    own.kill()


@pytest.fixture
def bare_pool(ranks: int) -> Iterator[Pool]:
    """Yield a pool without groups: the test's functions form groups. Kill the pool at the end."""
    own = Pool(ranks, bare=True)
    yield own
    own.kill()


@pytest.fixture
def socket_folder() -> Iterator[Path]:
    """Yield a directory with a path short enough for Unix sockets; tmp_path may be too long."""
    with TemporaryDirectory(prefix="hbmcomm-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails the test if it leaves an entry in /dev/shm behind."""
    before = shm.entries()
    yield
    deadline = time.monotonic() + 5  # ending processes may take a moment
    while (left := shm.left_since(before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, f"left behind in /dev/shm: {sorted(left)}"
