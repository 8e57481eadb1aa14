"""What cannot take part here is named with the reason, and left out."""

from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from torch_hbmcomm.bench.peer import PeerFailed


class Unavailable(RuntimeError):
    """This machine cannot run it; the message says why, and what to do."""


@contextmanager
def left_out_if_it_fails(who: str, unavailable: MutableMapping[str, str]) -> Iterator[None]:
    """Notes the reason in place of raising Unavailable or PeerFailed."""
    try:
        yield
    except (Unavailable, PeerFailed) as error:
        unavailable[who] = str(error)
