"""A box or some clients are killed: the errors and results that the other clients get."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from harness.box_process import ROOT, TOKEN, BoxProcess

from torch_hbmcomm import smb

pytestmark = pytest.mark.parametrize("transport", ["shm", "tcp"])

T = TypeVar("T")


class Client:
    """A process that connects to a box as `box` and runs a script, which first prints "ready"."""

    def __init__(self, url: str, transport: str, script: str) -> None:
        connect = f"""
import os, sys
from torch_hbmcomm import smb
box = smb.connect(sys.argv[1], {TOKEN!r}, transport={transport!r})
"""
        self.process = subprocess.Popen(
            [sys.executable, "-c", connect + script, url],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self.line() == b"ready\n"

    def line(self) -> bytes:
        """Return the next line of the script's output."""
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def go_on(self) -> None:
        """Send a line to the script."""
        assert self.process.stdin is not None
        self.process.stdin.write(b"\n")
        self.process.stdin.flush()

    def rest(self, seconds: float) -> bytes:
        """Wait until the script ends, and return the rest of its output."""
        return self.process.communicate(timeout=seconds)[0]


def until(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def test_without_a_store_segments_are_lost_at_once(transport: Any) -> None:
    with BoxProcess() as process, smb.connect(process.url, TOKEN, transport=transport) as box:
        segment, other = box.alloc(4096, "lost"), box.alloc(4096)
        process.kill()
        write = segment.write_async(source=b"x")
        accumulate = other.accumulate_async(segment, "float32")
        process.start()
        assert isinstance(accumulate.exception(timeout=60), smb.SegmentLost)
        # Over shm the write is a memory copy. It may succeed before the client notices that the
        # box has ended.
        written = write.exception(timeout=60) is None
        assert isinstance(write.exception(), smb.SegmentLost) or (written and transport == "shm")
        for use in (segment.read, segment.write, lambda: segment.fetch_add(0, 1)):
            with pytest.raises(smb.SegmentLost, match="restarted without its data"):
                use()
        segment.free()
        again = box.alloc(4096, "lost", mode="create")  # the connection still works
        assert again.fetch_add(0, 3) == 0
        assert again.fetch_add(0, 0) == 3


def test_an_idle_client_notices_the_end(transport: Any) -> None:
    with BoxProcess() as process, smb.connect(process.url, TOKEN, transport=transport) as box:
        segment = box.alloc(4096, "idle")
        process.kill()
        process.start()

        def lost() -> bool:
            try:
                segment.read()
            except smb.SegmentLost:
                return True
            return False

        until(lost)


def test_a_box_that_stays_away(transport: Any) -> None:
    with (
        BoxProcess() as process,
        smb.connect(process.url, TOKEN, transport=transport, reconnect_timeout=4) as box,
    ):
        segment = box.alloc(4096)
        segment.fetch_add(0, 1)
        begin = time.monotonic()
        process.kill()  # the client may notice immediately
        with pytest.raises(smb.BoxUnreachable, match="unreachable since") as raised:
            segment.fetch_add(0, 1)
        assert time.monotonic() - begin > 2
        assert "the last attempt to connect again" in str(raised.value)
        with pytest.raises(ConnectionError):
            segment.read()
        process.start()  # after reconnect_timeout
        with pytest.raises(smb.BoxUnreachable):
            box.alloc(4096)


def test_an_accumulate_in_doubt_says_so(transport: Any) -> None:
    with (
        BoxProcess() as process,
        smb.connect(process.url, TOKEN, transport=transport, reconnect_timeout=0.5) as box,
    ):
        segment = box.alloc("64MiB")
        box.ping()  # so this thread sends the next request
        process.stop()
        future = segment.accumulate_async(segment, "float32")
        time.sleep(1)
        process.kill()
        failure = future.exception(timeout=60)
        assert isinstance(failure, smb.BoxUnreachable)
        assert "may or may not have been executed" in str(failure)


def patiently(ask: Callable[[], T]) -> T:
    """Repeat a request that may be executed twice, if a busy machine exceeds its timeout."""
    end = time.monotonic() + 60
    while True:
        try:
            return ask()
        except smb.OperationTimeout:
            assert time.monotonic() < end


def test_an_operation_in_time_or_not(transport: Any) -> None:
    with (
        BoxProcess() as process,
        smb.connect(process.url, TOKEN, transport=transport, timeout=0.5) as box,
    ):
        segment = patiently(lambda: box.alloc(8, "cell"))
        process.stop()
        with pytest.raises(TimeoutError, match="500 ms"):
            segment.fetch_add(0, 1)
        pending = segment.fetch_add_async(0, 1)
        with pytest.raises(TimeoutError, match="not done within"):
            pending.result(timeout=0.1)
        assert isinstance(pending.exception(), smb.OperationTimeout)
        process.process.send_signal(signal.SIGCONT)
        until(lambda: patiently(lambda: segment.fetch_add(0, 0)) == 2)


@pytest.mark.parametrize("endless", [1e10, 1e300, float("inf")])
def test_an_endless_time_is_endless(transport: Any, endless: float) -> None:
    with (
        BoxProcess() as process,
        smb.connect(
            process.url,
            TOKEN,
            transport=transport,
            connect_timeout=endless,
            reconnect_timeout=endless,
            timeout=endless,
        ) as box,
    ):
        segment = box.alloc(8)
        process.stop()
        pending = segment.fetch_add_async(0, 1)
        threading.Timer(0.3, process.process.send_signal, [signal.SIGCONT]).start()
        assert pending.result(timeout=endless) == 0
        process.kill()
        process.start()
        with pytest.raises(smb.SegmentLost):  # the client connects again first
            segment.fetch_add(0, 1)
        box.close(patience=endless)


@pytest.mark.parametrize("wrong", [float("nan"), -1.0])
def test_a_time_that_is_none(transport: Any, wrong: float) -> None:
    with BoxProcess() as process:
        for name in ("connect_timeout", "reconnect_timeout", "timeout"):
            options: dict[str, Any] = {name: wrong}
            with pytest.raises(ValueError, match=name):
                smb.connect(process.url, TOKEN, transport=transport, **options)
        with smb.connect(process.url, TOKEN, transport=transport) as box:
            future = box.alloc(8).fetch_add_async(0, 1)
            with pytest.raises(ValueError, match="timeout"):
                future.result(timeout=wrong)
            with pytest.raises(ValueError, match="patience"):
                box.close(patience=wrong)
            box.ping()  # the connection is still open


def test_close_has_its_patience_and_no_more(transport: Any) -> None:
    with BoxProcess() as process:
        box = smb.connect(process.url, TOKEN, transport=transport)
        segment = box.alloc(8)
        process.stop()
        pending = segment.fetch_add_async(0, 1)
        time.sleep(0.2)  # until the reconnector's thread is the progress thread
        begin = time.monotonic()
        box.close(patience=0.5)
        assert time.monotonic() - begin > 0.4
        assert "closed" in str(pending.exception(timeout=60))


def test_removals_in_doubt_are_done(transport: Any, tmp_path: Path) -> None:
    with (
        BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process,
        smb.connect(process.url, TOKEN, transport=transport) as box,
    ):
        for turn in range(4):
            segments = [box.alloc(64, f"{turn} {i}") for i in range(128)]
            killer = threading.Timer(0.002 * turn, process.kill)
            with ThreadPoolExecutor(len(segments)) as pool:
                removals = [pool.submit(each.delete) for each in segments]
                killer.start()
                killer.join()
                process.start()
            assert [removal.exception() for removal in removals] == [None] * len(segments)


def test_futures_that_are_never_issued(transport: Any) -> None:
    with BoxProcess() as process, smb.connect(process.url, TOKEN, transport=transport) as box:
        segment = box.alloc(8)
        with box.batch() as batch:
            early = batch.fetch_add(segment, 0, 1)
            assert not early.done()
            with pytest.raises(ValueError, match="not issued yet"):
                early.result()
        assert early.result() == 0
        with pytest.raises(ValueError, match="the batch is over"):
            batch.fetch_add(segment, 0, 1)

        with pytest.raises(KeyError), box.batch() as batch:
            discarded = batch.fetch_add(segment, 0, 1)
            raise KeyError
        assert discarded.done()
        with pytest.raises(ValueError, match="never issued"):
            discarded.result()

        with pytest.raises(ValueError, match="was freed"), box.batch() as batch:
            refused = batch.fetch_add(segment, 0, 1)
            segment.free()
        assert "never issued" in str(refused.exception())


def test_a_client_is_one_session(transport: Any) -> None:
    with BoxProcess("--most-clients", "1") as process:

        def connects(choice: Any, expected: str) -> bool:
            try:
                with smb.connect(process.url, TOKEN, transport=choice) as box:
                    assert box.stats()["clients"] == 1
                    return box.transport == expected
            except MemoryError:
                return False  # the box has not yet noticed the end of the earlier client

        until(lambda: connects(transport, transport))
        until(lambda: connects("auto", "shm"))


def test_with_a_store_everything_goes_on_exactly_once(transport: Any, tmp_path: Path) -> None:
    count = 20_000
    with (
        BoxProcess("--store", str(tmp_path), "--memory", "64MiB") as process,
        smb.connect(process.url, TOKEN, transport=transport) as box,
    ):
        total, ones = box.alloc(8 * count, "total"), box.alloc(8 * count, "ones")
        ones.write(source=np.ones(count))
        cell = box.alloc(8, "cell")
        stop = threading.Event()
        killer_failures: list[BaseException] = []

        def kill_and_start() -> None:
            try:
                for _ in range(4):
                    time.sleep(0.15)
                    process.kill()
                    process.start()
            except BaseException as error:
                killer_failures.append(error)
            stop.set()

        killer = threading.Thread(target=kill_and_start)
        killer.start()
        rounds = 0
        before = []
        while not stop.is_set():
            with box.batch() as batch:
                for _ in range(10):
                    batch.accumulate(total, ones, "float64")
                    before.append(batch.fetch_add(cell, 0, 1))
            rounds += 10
        killer.join()
        assert killer_failures == []
        total.read()
        assert set(total.numpy("float64")) == {rounds}
        assert [future.result() for future in before] == list(range(rounds))
        assert box.alloc(None, "ones", mode="attach").size == 8 * count


def test_a_dead_client_lets_go_after_its_lease(transport: Any) -> None:
    script = """
box.alloc(4096, "held", temporary=True)
print("ready", flush=True)
sys.stdin.read()
"""
    with BoxProcess("--lease", "10") as process, smb.connect(process.url, TOKEN) as box:
        client = Client(process.url, transport, script)

        def idle() -> int:
            (one,) = (
                one for one in box.stats()["client_table"] if one["pid"] == client.process.pid
            )
            return int(one["idle_ms"])

        def left() -> bool:
            found = box.stats()
            return (found["segments"], found["clients"]) == (0, 1)

        until(lambda: idle() > 1000)
        until(lambda: idle() < 1000)  # the client has renewed its lease
        assert box.stats()["segments"] == 1
        client.process.kill()
        client.rest(60)
        until(left)


def test_a_client_that_slept_past_its_lease(transport: Any) -> None:
    script = """
segment = box.alloc(4096, "kept")
fleeting = box.alloc(4096, "fleeting", temporary=True)
segment.fetch_add(0, 1)
print("ready", flush=True)
sys.stdin.readline()
segment.fetch_add(0, 1)
try:
    fleeting.fetch_add(0, 1)
except smb.SegmentLost:
    print(segment.fetch_add(0, 0), flush=True)
"""
    with BoxProcess("--lease", "5") as process, smb.connect(process.url, TOKEN) as watcher:
        client = Client(process.url, transport, script)
        client.process.send_signal(signal.SIGSTOP)
        until(lambda: watcher.stats()["clients"] == 1)
        client.process.send_signal(signal.SIGCONT)
        until(lambda: watcher.stats()["clients"] == 2)  # else the first operation is in doubt
        client.go_on()
        assert client.rest(60) == b"2\n"


def said_when_interrupted(transport: str, script: str) -> bytes:
    """Return the output of a client that gets SIGINT while it waits for a stopped box."""
    with BoxProcess() as process:
        client = Client(process.url, transport, script)
        process.stop()
        client.go_on()
        assert client.line() == b"about to wait\n"
        time.sleep(0.3)
        client.process.send_signal(signal.SIGINT)
        return client.rest(60)


def test_ctrl_c_ends_a_wait(transport: Any) -> None:
    script = """
segment = box.alloc(4096)
print("ready", flush=True)
sys.stdin.readline()
try:
    print("about to wait", flush=True)
    segment.fetch_add(0, 1)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    os._exit(0)
"""
    assert said_when_interrupted(transport, script) == b"interrupted\n"


def test_ctrl_c_ends_a_close(transport: Any) -> None:
    script = """
segment = box.alloc(4096)
print("ready", flush=True)
sys.stdin.readline()
segment.fetch_add_async(0, 1)
try:
    print("about to wait", flush=True)
    box.close(patience=60)
except KeyboardInterrupt:
    print("interrupted", box.closed, flush=True)
"""
    assert said_when_interrupted(transport, script) == b"interrupted True\n"
