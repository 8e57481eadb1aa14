"""The processes of `hbmcomm bench box`: a box, and its clients, which call the public API."""

import sys
import time
from collections.abc import Callable
from typing import Any

from torch_hbmcomm import smb
from torch_hbmcomm.bench.peer import obey
from torch_hbmcomm.bench.rounds import timed
from torch_hbmcomm.smb.box import Transport

_ONE_AND_ONE_AND_A_HALF = {
    "float32": ("0000803f", "0000c03f"),
    "float64": ("000000000000f03f", "000000000000f83f"),
    "float16": ("003c", "003e"),
    "bfloat16": ("803f", "c03f"),
    "int32": ("01000000", "02000000"),  # 1 and 2: for integers the scale is 1
}
"""1 and 1.5 as little-endian elements, in hexadecimal digits."""


class BoxPeer:
    def open(self, listen: str, memory: int, token: str, threads: int, store: str | None) -> str:
        """Serve a box, and return its address."""
        self._server = smb.Server(
            listen=listen, memory=memory, token=token, accumulate_threads=threads, store=store
        )
        return self._server.url


class ClientPeer:
    """A process with one client for each transport, each with a segment of its own."""

    def __init__(self) -> None:
        self._boxes: dict[str, smb.Box] = {}
        self._segments: dict[str, smb.Segment] = {}
        self._sources: dict[str, smb.Segment] = {}

    def connect(self, url: str, token: str, transport: Transport, lanes: int, size: int) -> None:
        self._boxes[transport] = smb.connect(url, token, transport, lanes)
        segment = self._boxes[transport].alloc(size, mode="create", temporary=True)
        segment.buffer[:] = b"\1" * size  # so that every page is written
        segment.write()
        self._segments[transport] = segment

    def disconnect(self) -> None:
        for box in self._boxes.values():
            box.close()
        for held in (self._boxes, self._segments, self._sources):
            held.clear()

    def run(self, transport: str, action: str, samples: int, calls: int) -> list[float]:
        """Return the microseconds of a call, for each sample, as rounds.Timed does. Actions are
        read, write, memcpy read, memcpy write, fetch_add, "accumulate TYPE", and "add TYPE",
        which writes the source to the box before it accumulates."""
        return list(timed(self._action(transport, action))(samples, calls))

    def together(
        self, transport: str, actions: list[str], begin: float, seconds: float, chunk: int
    ) -> int | None:
        """Perform the actions alternately on each chunk of the segment, again and again, from
        `begin` on for `seconds`.

        Returns the bytes of the actions that ended in time; None if the command came too late to
        begin with the other clients.

        actions: each read, write, memcpy read or memcpy write.
        begin: a time of `time.monotonic`, which all processes share.
        """
        segment = self._segments[transport]
        doing = [self._on_chunk(segment, action) for action in actions]
        wait = begin - time.monotonic()
        if wait < 0:
            return None
        time.sleep(wait)
        moved = offset = 0
        while True:
            for act in doing:
                act(offset, chunk)
                if time.monotonic() > begin + seconds:
                    return moved
                moved += chunk
            offset = offset + chunk if offset + 2 * chunk <= segment.size else 0

    def check(self, transport: str) -> None:
        """Read back the written data, to detect a client that is fast because it does nothing."""
        segment = self._segments[transport]
        local = segment.buffer
        local[:8], local[-8:] = b"the head", b"the tail"
        segment.write()
        local[:8] = local[-8:] = bytes(8)
        segment.read()
        if (bytes(local[:8]), bytes(local[-8:])) != (b"the head", b"the tail"):
            raise RuntimeError(f"{transport} reads other bytes than it wrote")

    def check_sum(self, transport: str, dtype: str) -> None:
        """Check the result of an accumulate of ones, and leave the source filled with ones."""
        segment = self._segments[transport]
        one, total = map(bytes.fromhex, _ONE_AND_ONE_AND_A_HALF[dtype])
        width = len(one)
        segment.buffer[:] = one * (segment.size // width)
        segment.write()
        self._action(transport, f"add {dtype}")()
        segment.read()
        local = segment.buffer
        if bytes(local[:width]) != total or bytes(local[-width:]) != total:
            raise RuntimeError(
                f"the sum of {dtype} is wrong: {bytes(local[:width]).hex()} for {total.hex()}"
            )

    def _action(self, transport: str, action: str) -> Callable[[], Any]:
        segment = self._segments[transport]
        verb, _, dtype = action.partition(" ")
        if verb == "memcpy":
            copy = self._on_chunk(segment, action)
            return lambda: copy(0, segment.size)
        if verb == "fetch_add":
            return lambda: segment.fetch_add(0, 1)
        if verb in ("accumulate", "add"):
            return self._sum(transport, dtype, verb == "add")
        return segment.read if verb == "read" else segment.write

    @staticmethod
    def _on_chunk(segment: smb.Segment, action: str) -> Callable[[int, int], Any]:
        """Return a function of an offset and a size, which performs the action on these bytes.
        action: as in `together`."""
        if action == "read":
            return segment.read
        if action == "write":
            return segment.write
        local, shared = segment.buffer, segment.view()
        to, source = (local, shared) if action == "memcpy read" else (shared, local)

        def copy(offset: int, size: int) -> None:
            to[offset : offset + size] = source[offset : offset + size]

        return copy

    def _sum(self, transport: str, dtype: str, write_first: bool) -> Callable[[], Any]:
        segment, box = self._segments[transport], self._boxes[transport]
        if transport not in self._sources:
            source = box.alloc(segment.size, mode="create", temporary=True)
            self._sources[transport] = source
        source = self._sources[transport]
        scale = 1.0 if dtype.startswith("int") else 0.5

        def add() -> None:
            if write_first:
                source.write(source=segment.buffer)
            segment.accumulate(source, dtype, scale)

        return add


if __name__ == "__main__":
    obey(BoxPeer() if sys.argv[2:] == ["box"] else ClientPeer())
