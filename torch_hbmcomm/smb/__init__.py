"""The memory box: remote memory that workers allocate by key, read, write and sum into.

    from torch_hbmcomm import smb

    with smb.Server(memory="1GiB") as server, smb.connect(server.url) as box:
        weights = box.alloc(4096, key="weights")
        weights.numpy("float32")[:] = 1
        weights.write()  # this process's copy -> the box
        gradient = box.alloc(4096)
        weights.accumulate(gradient, "float32", scale=-0.1)  # on the box
        weights.read()  # the box -> this process's copy

A key is an integer of 1 to 2**128 - 1, or its 32 hexadecimal digits. Any other text is a name. The
name's BLAKE2b hash of 128 bits is the key (``key_of``).

Errors: ``BoxError`` and its subclasses from the box or the connection; ``ValueError`` and
``TypeError`` for invalid arguments, before anything is sent; ``MemoryError`` if the box is full.
docs/memory-box.md has the guarantees of each operation. PyTorch is not needed.
"""

from torch_hbmcomm._smb import (
    AccessDenied,
    BoxError,
    BoxUnreachable,
    KeyInUse,
    NoSuchKey,
    OperationTimeout,
    SegmentLost,
)
from torch_hbmcomm.smb.batch import Batch
from torch_hbmcomm.smb.box import Box, all_of, connect, of
from torch_hbmcomm.smb.segment import Future, Segment
from torch_hbmcomm.smb.server import Server
from torch_hbmcomm.smb.values import key_of

__all__ = [
    "AccessDenied",
    "Batch",
    "Box",
    "BoxError",
    "BoxUnreachable",
    "Future",
    "KeyInUse",
    "NoSuchKey",
    "OperationTimeout",
    "Segment",
    "SegmentLost",
    "Server",
    "all_of",
    "connect",
    "key_of",
    "of",
]
