"""A process that is a client of a box, by one transport or several."""

import time

from torch_hbmcomm import _smb
from torch_hbmcomm.bench.box.memory import private
from torch_hbmcomm.bench.peer import obey

_ONE_AND_ONE_AND_A_HALF = {
    "float32": ("0000803f", "0000c03f"),
    "float64": ("000000000000f03f", "000000000000f83f"),
    "float16": ("003c", "003e"),
    "bfloat16": ("803f", "c03f"),
    "int32": ("01000000", "02000000"),  # added as a whole
}
"""As little-endian elements."""


class Client:
    def __init__(self) -> None:
        self._loops: dict[str, _smb.BenchClient] = {}

    def connect(self, url: str, token: str, transport: str, lanes: int, size: int) -> None:
        """Replaces the client of that transport; all have one local buffer."""
        self._loops.pop(transport, None)
        if not self._loops:
            self._local = private(size)
        self._loops[transport] = _smb.BenchClient(url, token, transport, lanes, self._local)

    def disconnect(self) -> None:
        self._loops.clear()

    def run(self, transport: str, action: str, calls: int) -> float:
        return self._loops[transport].run(action, calls)

    def times(self, transport: str, action: str, calls: int) -> list[float]:
        return self._loops[transport].times(action, calls)

    def mixed(self, transport: str, begin: float, seconds: float, piece: int) -> int | None:
        """The bytes that it moved; none if it was told too late to begin with the others.

        begin: of `time.monotonic`, the same in all processes."""
        if time.monotonic() > begin:
            return None
        return self._loops[transport].mixed(begin, begin + seconds, piece)

    def triad(self, size: int, threads: int) -> None:
        self._triad = _smb.BenchTriad(private(size), private(size), private(size), threads)

    def run_triad(self, calls: int) -> float:
        return self._triad.run(calls)

    def check(self, transport: str) -> None:
        """Who is fast because it does nothing is found out before it is timed."""
        loop = self._loops[transport]
        self._local[:8], self._local[-8:] = b"the head", b"the tail"
        loop.run("write", 1)
        self._local[:8] = self._local[-8:] = bytes(8)
        loop.run("read", 1)
        if (self._local[:8], self._local[-8:]) != (b"the head", b"the tail"):
            raise RuntimeError(f"{transport} reads other bytes than it wrote")

    def check_sum(self, transport: str, dtype: str) -> None:
        """Leaves ones in the source."""
        loop = self._loops[transport]
        one, total = map(bytes.fromhex, _ONE_AND_ONE_AND_A_HALF[dtype])
        self._local[:] = one * (len(self._local) // len(one))
        loop.run("write", 1)
        loop.run(f"add {dtype}", 1)
        loop.run("read", 1)
        width = len(one)
        if self._local[:width] != total or self._local[-width:] != total:
            found = self._local[:width].hex()
            raise RuntimeError(f"the sum of {dtype} is wrong: {found} for {total.hex()}")


if __name__ == "__main__":
    obey(Client())
