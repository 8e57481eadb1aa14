"""Stores of boxes that ended normally."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from torch_hbmcomm import smb

BYTES = 100_000


def serve(store: Path) -> smb.Server:
    return smb.Server("127.0.0.1:0", "1MiB", store=store, token="", verbs="off")


def test_a_bit_that_changed_at_rest(tmp_path: Path) -> None:
    data = random.randbytes(BYTES)
    with serve(tmp_path / "store") as server, smb.connect(server.url, "") as box:
        box.alloc(BYTES, key="data").write(source=data)
    # Connect over tcp, so that this process does not map the segment.
    with serve(tmp_path / "store") as server, smb.connect(server.url, "", transport="tcp") as box:
        found = bytearray(BYTES)
        box.alloc(BYTES, key="data", mode="attach").read(into=found)
        assert found == data
    (file,) = (tmp_path / "store/segments").iterdir()
    bad = bytearray(file.read_bytes())
    at = random.randrange(BYTES)
    bad[at] ^= 1 << random.randrange(8)
    file.write_bytes(bad)
    with pytest.raises(RuntimeError, match=f"{file.name} is damaged: .* checksum is wrong"):
        serve(tmp_path / "store")
    assert file.read_bytes() == bad


def test_a_box_that_cannot_listen_leaves_the_store_closed(tmp_path: Path) -> None:
    with serve(tmp_path / "store") as server, smb.connect(server.url, "") as box:
        box.alloc(BYTES, key="data")
    with pytest.raises(RuntimeError, match="its listener"):
        smb.Server("192.0.2.1:1", "1MiB", store=tmp_path / "store", token="", verbs="off")
    assert (tmp_path / "store/checksums").exists()
