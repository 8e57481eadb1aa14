"""Writes the seeds of smb_frames.cpp into a directory: a file for each conversation."""

import struct
import sys
from pathlib import Path

JOINED = 1  # bits of the first byte, see smb_frames.cpp
TOKEN = 2
SEQUENCE = struct.pack("<QQ", 1, 0)
NOWHERE = 1 << 63


def frame(
    opcode: int,
    body: bytes = b"",
    payload: bytes = b"",
    *,
    magic: bytes = b"SMB1",
    version: int = 4,
    payload_bytes: int | None = None,
) -> bytes:
    announced = len(payload) if payload_bytes is None else payload_bytes
    header = struct.pack("<4sBBHIIQ", magic, version, opcode, 0, len(body), announced, 1)
    return header + body + payload


def transfer(offset: int, size: int, handle: int = 1) -> bytes:
    return struct.pack("<QII", offset, size, handle)


def chunks(power: int) -> int:
    return power << 2


JOIN = frame(2, bytes(88))
PING = frame(4)
READ = frame(9, transfer(0, 4096))
WRITE = frame(10, transfer(128, 64), bytes(64))
CONTROL = [
    frame(5, SEQUENCE + struct.pack("<QQQIIII", 0, 0, 4096, 1, 0, 0, 0)),
    frame(6, struct.pack("<QQQII", 1, 2, 4096, 1, 0)),
    frame(11, SEQUENCE + struct.pack("<QQQdIIBBB5x", 0, 4096, 4096, 1.0, 1, 2, 11, 10, 1)),
    frame(12, SEQUENCE + struct.pack("<QqII", 0, 5, 1, 0)),
    frame(13, bytes(8)),
    frame(14, bytes(16)),
    frame(7, SEQUENCE + bytes(8)),
    frame(8, SEQUENCE + bytes(8)),
    PING,
    frame(3),
]

SEEDS: dict[str, tuple[int, bytes]] = {
    "join": (0, JOIN),
    "join_with_token": (TOKEN, JOIN),
    "join_in_chunks": (chunks(3), JOIN + PING),
    "ping_before_join": (0, PING),
    "read": (JOINED, READ * 3),
    "read_refused": (JOINED, frame(9, transfer(0, 16, 9)) + frame(9, transfer(NOWHERE, 16))),
    "read_too_long": (JOINED, frame(9, transfer(0, (1 << 20) + 1))),
    "write": (JOINED, WRITE + READ),
    "write_refused": (JOINED, frame(10, transfer(0, 64, 9), bytes(64)) + PING),
    "write_empty": (JOINED, frame(10, transfer(0, 0))),
    "authenticated": (JOINED | TOKEN, WRITE + READ + PING),
    "authenticated_in_chunks": (JOINED | TOKEN | chunks(4), WRITE * 2 + b"".join(CONTROL)),
    "write_mismatch": (JOINED, frame(10, transfer(0, 64), bytes(8))),
    "write_in_chunks": (JOINED | chunks(4), WRITE * 2),
    "control": (JOINED, b"".join(CONTROL)),
    "many": (JOINED, PING * 200),
    "old_version": (0, frame(2, bytes(88), version=2)),
    "http": (0, b"GET / HTTP/1.1\r\nHost: box\r\n\r\n"),
    "oversized": (JOINED, frame(10, transfer(0, 64), payload_bytes=0xFFFFFFFF)),
    "truncated": (JOINED, WRITE[:50]),
}


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, (how, conversation) in SEEDS.items():
        (directory / name).write_bytes(bytes([how]) + conversation)


if __name__ == "__main__":
    main()
