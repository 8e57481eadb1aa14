"""The program that serves the memory box of a process group (torch_hbmcomm/box_process.py).

The rank that starts it is the *starter*. The program outlives the starter, and ends when no rank is
a client of the box any more. It runs in a session of its own, so neither Ctrl-C in a terminal nor
the signals that a launcher sends to the starter's process group reach it. It is no child of the
starter.

Arguments: the directory of the package; a pidfd of the starter, or -1 if the kernel refused it.

Standard input: a line with the arguments of smb.Server as JSON, the token among them. Later a byte,
or the end, when the starter has left the group.

Standard output: a line with the addresses, or the error, as JSON. Once the starter has left or
died, a line with the number of connected clients each time the number changes. The output ends with
the program.

Standard error: the starter's, so that warnings of the box have a reader. The program closes it when
the starter ends, because a launcher may wait until all writers have closed a pipe.

It imports no PyTorch, and starts without site-packages.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch_hbmcomm.smb import Server

_INPUT, _OUTPUT, _ERRORS = 0, 1, 2
_ENDING = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
_BACK_SOON = 2.0  # seconds after which a client without a connection counts as gone
_SHORTEST_PAUSE, _LONGEST_PAUSE = 1, 128  # milliseconds between two checks for clients


def main(package: str, starter: int) -> None:
    if os.fork() > 0:
        os._exit(0)  # so the starter has no child that its own waits for children could find
    for number in _ENDING:
        signal.signal(number, lambda *_: sys.exit())
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with open(_INPUT, "rb", buffering=0, closefd=False) as requests:
        wanted = requests.readline()
    if not wanted.endswith(b"\n"):
        return  # the starter has died
    sys.path.append(os.path.dirname(package))
    from torch_hbmcomm.smb import Server

    try:
        server = Server(**json.loads(wanted))
    except (ValueError, MemoryError, OSError, RuntimeError) as error:
        _say({"error": type(error).__name__, "text": str(error)})
        return
    with server:
        _say({"urls": server.urls, "pid": os.getpid()})
        _await_end(server, starter)


def _say(message: Any) -> None:
    with suppress(BrokenPipeError):  # the starter has died, or does not listen any more
        os.write(_OUTPUT, json.dumps(message).encode() + b"\n")


def _await_end(server: Server, starter: int) -> None:
    """Return when the starter has left or died, and no client is left.

    The clients are the ranks. A client that has lost its connection may connect again, so it counts
    as gone only after _BACK_SOON seconds, which begin when no client is connected.
    """
    events = select.poll()
    events.register(_INPUT, select.POLLIN)
    if starter >= 0:
        events.register(starter, select.POLLIN)
    pause = None  # wait without a limit
    said, alone_since = -1, 0.0
    while True:
        for descriptor, _ in events.poll(pause):
            events.unregister(descriptor)
            if descriptor == starter:
                _close_errors()
            pause = _SHORTEST_PAUSE
        clients = server.stats()["client_table"]
        connected = sum(row["connections"] > 0 for row in clients)
        now = time.monotonic()
        if connected:
            alone_since = 0.0
        elif not clients or (alone_since and now - alone_since >= _BACK_SOON):
            return
        else:
            alone_since = alone_since or now
        if connected != said:
            said = connected
            _say(connected)
        assert pause is not None
        pause = min(2 * pause, _LONGEST_PAUSE)


def _close_errors() -> None:
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, _ERRORS)
    os.close(nowhere)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
