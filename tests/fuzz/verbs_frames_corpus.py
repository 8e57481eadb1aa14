"""Writes the seeds of verbs_frames.cpp into a directory: a file for each series of messages."""

import struct
import sys
from pathlib import Path

TO_BOX, ANSWER, REQUESTS, REPLIES = range(4)  # bits of the first byte, see verbs_frames.cpp
TOKEN, PROPERLY = 4, 8
AUTHENTICATED_JOIN = 4  # protocol::Join::kAuthenticated
SEQUENCE = struct.pack("<QQ", 1, 0)
QUEUE_PAIRS = 4
PING, ALLOC, ATTACH, FREE, DELETE, ACCUMULATE = 4, 5, 6, 7, 8, 11
FETCH_ADD, STATS, EXISTS = 12, 13, 14
# The order of the client's requests in verbs_frames.cpp.
ORDER = (ALLOC, ATTACH, FREE, DELETE, ACCUMULATE, FETCH_ADD, STATS, EXISTS, PING)
REPLY_BYTES = 4096  # the most in one message


def call(queue_pair: int, queue_pairs: int, challenge_id: int = 1, flags: int = 0) -> bytes:
    return struct.pack(
        "<4sIQQ12x16xHBB", b"SPQ1", challenge_id, 0, 0, flags, queue_pair, queue_pairs
    )


def calls(queue_pairs: int, flags: int = 0) -> list[bytes]:
    return [
        call(0, 0, 0),
        *(call(number, queue_pairs, flags=flags) for number in range(queue_pairs)),
    ]


def frame(
    opcode: int,
    body: bytes = b"",
    payload: bytes = b"",
    *,
    status: int = 0,
    number: int = 1,
    version: int = 4,
) -> bytes:
    header = struct.pack(
        "<4sBBHIIQ", b"SMB1", version, opcode, status, len(body), len(payload), number
    )
    return header + body + payload


def reply(opcode: int, body: bytes = b"", payload: bytes = b"", status: int = 0) -> bytes:
    number = ORDER.index(opcode) + 1
    return frame(opcode, body, payload, status=status, number=number)


CONTROL = [
    frame(ALLOC, SEQUENCE + struct.pack("<QQQIIII", 0, 0, 4096, 1, 0, 0, 0)),
    frame(ATTACH, struct.pack("<QQQII", 1, 2, 4096, 1, 0)),
    frame(FREE, SEQUENCE + bytes(8)),
    frame(DELETE, SEQUENCE + bytes(8)),
    frame(ACCUMULATE, SEQUENCE + struct.pack("<QQQdIIBBB5x", 0, 4096, 4096, 1.0, 1, 2, 11, 10, 1)),
    frame(FETCH_ADD, SEQUENCE + struct.pack("<QqII", 0, 5, 1, 0)),
    frame(STATS, bytes(8)),
    frame(EXISTS, bytes(16)),
    frame(PING),
    frame(3),
]
GRANT = struct.pack("<QQQIIQ", 1, 2, 4096, 1, 0, 1 << 40)
LONG = reply(STATS, b"", bytes(2 * REPLY_BYTES))
ANSWERS = [
    reply(ALLOC, GRANT, bytes(4 * QUEUE_PAIRS)),
    reply(ATTACH, GRANT, bytes(4 * QUEUE_PAIRS)),
    *map(reply, (FREE, DELETE, ACCUMULATE, PING)),
    reply(FETCH_ADD, bytes(8)),
    reply(STATS, b"", bytes(300)),
    reply(EXISTS, bytes(8)),
]

SEEDS: dict[str, tuple[int, list[bytes]]] = {
    "let_in": (TO_BOX, calls(QUEUE_PAIRS)),
    "let_in_with_token": (TO_BOX | TOKEN | PROPERLY, calls(QUEUE_PAIRS, AUTHENTICATED_JOIN)),
    "wrong_token": (TO_BOX | TOKEN, calls(QUEUE_PAIRS, AUTHENTICATED_JOIN)),
    "unauthenticated": (TO_BOX | TOKEN | PROPERLY, calls(1)),
    "too_many_queue_pairs": (TO_BOX, calls(QUEUE_PAIRS + 1)),
    "other_number_of_queue_pairs": (TO_BOX, [call(0, 0, 0), call(0, 2), call(1, 4)]),
    "no_challenge": (TO_BOX, [call(0, 1, 7)]),
    "short_call": (TO_BOX, [call(0, 0)[:55]]),
    "challenge": (ANSWER | TOKEN, [struct.pack("<4sI32sII", b"SPQ2", 1, bytes(32), 1, 1)]),
    "refusal": (ANSWER, [struct.pack("<4sH138s", b"SPQ3", 2, b"no")]),
    "endless_refusal": (ANSWER, [struct.pack("<4sH138s", b"SPQ3", 2, b"\xff" * 138)]),
    "welcome": (ANSWER, [struct.pack("<4sI32s", b"SPQ4", 0, bytes(32)) + bytes(156)]),
    "requests": (REQUESTS, CONTROL),
    "authenticated_requests": (REQUESTS | TOKEN | PROPERLY, CONTROL),
    "forged_requests": (REQUESTS | TOKEN, CONTROL),
    "read": (REQUESTS, [frame(9, bytes(16))]),
    "join": (REQUESTS, [frame(2, bytes(88))]),
    "old_version": (REQUESTS, [frame(PING, version=2)]),
    "short_request": (REQUESTS, [CONTROL[0][:40]]),
    "replies": (REPLIES, ANSWERS),
    "replies_backwards": (REPLIES, ANSWERS[::-1]),
    "authenticated_replies": (REPLIES | TOKEN | PROPERLY, ANSWERS),
    "forged_replies": (REPLIES | TOKEN, ANSWERS),
    "long_reply": (REPLIES, [LONG[at : at + REPLY_BYTES] for at in range(0, 8400, REPLY_BYTES)]),
    "refusals": (REPLIES, [reply(opcode, b"", b"no \xff", status=8) for opcode in ORDER]),
    "answered_twice": (REPLIES, [reply(PING)] * 2),
    "too_few_keys": (REPLIES, [reply(ALLOC, GRANT, bytes(4))]),
    "short_reply": (REPLIES, [ANSWERS[0][:20]]),
}


def main() -> None:
    directory = Path(sys.argv[1])
    directory.mkdir(parents=True, exist_ok=True)
    for name, (what, messages) in SEEDS.items():
        sent = b"".join(struct.pack("<H", len(message)) + message for message in messages)
        (directory / name).write_bytes(bytes([what]) + sent)


if __name__ == "__main__":
    main()
