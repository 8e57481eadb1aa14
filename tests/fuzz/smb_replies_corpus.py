"""Writes the seeds of smb_replies.cpp into a directory: a file for each series of replies."""

import struct
import sys
from pathlib import Path

ASKED = 1  # bit of the first byte, see smb_replies.cpp
VERSION = 4
HELLO, JOIN, PING, ALLOC, READ, WRITE, FETCH_ADD, STATS, EXISTS = 1, 2, 4, 5, 9, 10, 12, 13, 14
# The order of the client's requests in smb_replies.cpp.
ORDER = (ALLOC, FETCH_ADD, STATS, PING, READ, WRITE, EXISTS)
READ_BYTES = 300


def frame(opcode: int, body: bytes = b"", payload: bytes = b"", status: int = 0) -> bytes:
    """Return a reply with the id of the client's only request of this opcode.

    The lower half of the id is the request's index in ORDER, the upper half is the index plus 1.
    For an opcode outside ORDER, the id is 0.
    """
    index = ORDER.index(opcode) if opcode in ORDER else -1
    number = (index + 1) << 32 | max(index, 0)
    header = struct.pack(
        "<4sBBHIIQ", b"SMB1", VERSION, opcode, status, len(body), len(payload), number
    )
    return header + body + payload


def chunks(power: int) -> int:
    return power << 2


GREETING = frame(HELLO, bytes(40))
JOINED = frame(JOIN, bytes(232))
ANSWERS = [
    frame(ALLOC, bytes(40)),
    frame(FETCH_ADD, bytes(8)),
    frame(STATS, b"", bytes(300)),
    frame(PING),
    frame(READ, b"", bytes(READ_BYTES)),
    frame(WRITE),
    frame(EXISTS, bytes(8)),
]

SEEDS: dict[str, tuple[int, bytes]] = {
    "joined": (0, GREETING + JOINED),
    "joined_with_token": (0, frame(HELLO, bytes(32) + struct.pack("<II", 1, 0))),
    "joined_authenticated": (0, frame(HELLO, bytes(32) + struct.pack("<II", 0, 1))),
    "refused": (0, GREETING + frame(JOIN, b"", b"no", status=2)),
    "truncated_join": (0, (GREETING + JOINED)[:150]),
    "old_version": (0, GREETING.replace(b"SMB1\x04", b"SMB1\x03", 1)),
    "answers": (ASKED, b"".join(ANSWERS)),
    "answers_backwards": (ASKED, b"".join(reversed(ANSWERS))),
    "answers_in_chunks": (ASKED | chunks(3), b"".join(ANSWERS)),
    "answered_twice": (ASKED, ANSWERS[3] * 2),
    "refusals": (ASKED, b"".join(frame(opcode, b"", b"no \xff", status=8) for opcode in ORDER)),
    "ended": (ASKED, frame(HELLO, b"", b"the connection is over", status=1)),
    "longer_read": (ASKED, frame(READ, b"", bytes(READ_BYTES + 1))),
    "truncated_read": (ASKED, ANSWERS[4][:100]),
}


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, (how, conversation) in SEEDS.items():
        (directory / name).write_bytes(bytes([how]) + conversation)


if __name__ == "__main__":
    main()
