"""The memory box from Python: transports, access, tokens, statistics, addresses."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness.box_process import TOKEN
from harness.network import free_port

from torch_hbmcomm import smb
from torch_hbmcomm.smb import token as tokens

KIB = 1024
MIB = 1 << 20


def test_transports_see_each_others_data(connect: Callable[..., smb.Box]) -> None:
    boxes = [connect(transport=each) for each in ("shm", "tcp", "auto")]
    segments = [box.alloc(24, "shared by transports") for box in boxes]
    for i, segment in enumerate(segments):
        segment.write(8 * i, source=np.array([i + 1]))
    for segment in segments:
        segment.read()
        assert segment.numpy("int64").tolist() == [1, 2, 3]


def test_auto_picks_shm_here_and_says_why(
    server: smb.Server, connect: Callable[..., smb.Box]
) -> None:
    box = connect()
    assert box.transport == "shm"
    assert "same kernel" in box.why_transport
    with smb.connect(server.urls[-1], TOKEN) as by_path:
        assert by_path.transport == "shm"
    with pytest.raises(ValueError, match="Unix socket"):
        smb.connect(server.urls[-1], TOKEN, transport="tcp")


def test_a_named_transport_works_or_is_an_error() -> None:
    with smb.Server(memory="1MiB", token=TOKEN, unix=False, verbs="off") as server:
        with pytest.raises(smb.BoxUnreachable, match="shm"):
            smb.connect(server.url, TOKEN, transport="shm")
        with pytest.raises((smb.BoxUnreachable, RuntimeError), match="verbs"):
            smb.connect(server.url, TOKEN, transport="verbs")
        with smb.connect(server.url, TOKEN) as box:
            assert box.transport == "tcp"
            assert "not shm: " in box.why_transport
            assert "not verbs: " in box.why_transport


def test_read_only_clients(box: smb.Box, connect: Callable[..., smb.Box]) -> None:
    segment = box.alloc(64, f"read by {box.transport}")
    segment.write(source=b"text")
    reader = connect(transport=box.transport, read_only=True)
    with pytest.raises(smb.AccessDenied, match="attach"):
        reader.alloc(64)
    copy = reader.alloc(64, segment.key, mode="attach")
    copy.read()
    assert bytes(copy.buffer[:4]) == b"text"
    for refused in (
        copy.write,
        lambda: copy.accumulate(copy, "int32"),
        lambda: copy.assign(copy, "int32"),
        lambda: copy.fetch_add(0, 1),
    ):
        with pytest.raises(smb.AccessDenied, match="reading"):
            refused()
    with pytest.raises(PermissionError):
        box.alloc(64, segment.key, read_only=True).write()
    copy.free()


def test_stats(server: smb.Server, box: smb.Box) -> None:
    before = box.stats()
    segment, count = box.alloc(4 * KIB), before["accumulates"]
    segment.accumulate(segment, "float32")
    after = box.stats()
    assert after["accumulates"] == count + 1
    assert after["accumulated_bytes"] == before["accumulated_bytes"] + 4 * KIB
    assert after["segments"] == before["segments"] + 1
    row = next(row for row in after["segment_table"] if row["key"] == segment.key)
    assert (row["size"], row["attachments"], row["accumulates"]) == (4 * KIB, 1, 1)
    mine = [row for row in after["client_table"] if row["pid"] == os.getpid()]
    assert any(row["transport"] == box.transport for row in mine)
    assert all("host" not in row for row in after["client_table"])  # others need not know
    own = [row for row in server.stats()["client_table"] if row["pid"] == os.getpid()]
    assert {row["host"] for row in own} <= {"local", "127.0.0.1"}
    assert server.stats()["pool"]["capacity_bytes"] == 256 * MIB
    box.ping()


def test_close(server: smb.Server) -> None:
    box = smb.connect(server.url, TOKEN)
    segment = box.alloc(8)
    future = segment.fetch_add_async(0, 1)
    box.close()
    box.close()
    assert future.result() == 0  # issued operations are done first
    assert box.closed
    for use in (lambda: segment.read(), lambda: box.alloc(8), box.ping, segment.free):
        with pytest.raises(smb.BoxError, match="closed"):
            use()


def test_bad_addresses(server: smb.Server) -> None:
    for url in ("host:1", "smb://", "smb://host", "smb+unix://", "smb://a:1,b:2"):
        with pytest.raises(ValueError, match="box"):
            smb.connect(url, TOKEN)
    with pytest.raises(ValueError, match="transport"):
        smb.connect(server.url, TOKEN, transport="rdma")  # type: ignore[arg-type]
    nobody = f"127.0.0.1:{free_port()}"
    with pytest.raises(smb.BoxUnreachable, match=re.escape(nobody)):
        smb.connect(f"smb://{nobody}", TOKEN)
    with pytest.raises(ConnectionError):
        smb.connect("smb+unix:///nowhere/at/all", TOKEN)
    with pytest.raises(ValueError, match="timeout"):
        smb.connect(server.url, TOKEN, timeout=-1)


def test_a_forked_child_cannot_use_it(box: smb.Box) -> None:
    segment = box.alloc(8)
    child = os.fork()
    if child == 0:
        try:
            segment.read()
        except RuntimeError as error:
            os._exit(0 if "connect again in the child" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    segment.fetch_add(0, 1)


# Tokens


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_wrong_token_is_refused(server: smb.Server, transport: Any) -> None:
    for wrong in ("wrong", ""):
        with pytest.raises(smb.AccessDenied, match="token"):
            smb.connect(server.url, wrong, transport=transport)


def test_where_a_token_comes_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HBMCOMM_TOKEN", raising=False)
    monkeypatch.delenv("HBMCOMM_TOKEN_FILE", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tokens.find(None).text == ""
    with smb.Server(memory="1MiB") as server:
        file = tmp_path / ".config" / "hbmcomm" / "token"
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert re.fullmatch("[0-9a-f]{64}", server.token)
        assert list(file.parent.iterdir()) == [file]
        smb.connect(server.url).close()
    assert tokens.find_or_create(None).text == server.token

    named = tmp_path / "named"
    monkeypatch.setenv("HBMCOMM_TOKEN_FILE", str(named))
    with pytest.raises(FileNotFoundError):
        tokens.find(None)
    assert tokens.find_or_create(None).text == named.read_text().strip() != server.token
    monkeypatch.setenv("HBMCOMM_TOKEN", "from the environment")
    assert tokens.find(None).text == "from the environment"
    assert tokens.find("given").text == "given"
    named.write_text(" \n")
    with pytest.raises(ValueError, match="empty"):
        tokens.read(named)
    named.write_text("one\ntwo\n")  # clients in C would take the first line
    with pytest.raises(ValueError, match="has 2 lines"):
        tokens.read(named)


@pytest.mark.parametrize("home", [None, "file"])
def test_without_a_home_directory(
    home: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HBMCOMM_TOKEN", raising=False)
    monkeypatch.delenv("HBMCOMM_TOKEN_FILE", raising=False)
    if home is None:

        def homeless() -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "home", homeless)
    else:
        (tmp_path / home).touch()
        monkeypatch.setenv("HOME", str(tmp_path / home))
    assert tokens.find(None).text == ""
    with pytest.raises(OSError, match="set HBMCOMM_TOKEN"):
        smb.Server(memory="1MiB")
    with smb.Server(memory="1MiB", token="given") as server:
        smb.connect(server.url, "given").close()


def test_a_box_without_a_token_lets_everybody_in() -> None:
    with smb.Server(memory="1MiB", token="") as server, smb.connect(server.url, "") as box:
        box.ping()


@pytest.mark.parametrize("sealed", [True, False])
def test_both_ends_seal_or_neither_does(sealed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HBMCOMM_BOX_SEAL", str(int(sealed)))
    words = "the box authenticates" if sealed else "the client authenticates"
    with smb.Server(memory="1MiB", token=TOKEN) as server:
        with smb.connect(server.url, TOKEN, "tcp") as box:
            segment = box.alloc(64 * KIB)
            segment.write()
        for transport in ("tcp", "shm", "auto"):
            with pytest.raises(ValueError, match=words):
                smb.connect(server.url, TOKEN, transport, seal=not sealed)
    monkeypatch.setenv("HBMCOMM_BOX_SEAL", "yes")
    with pytest.raises(ValueError, match="HBMCOMM_BOX_SEAL is 0 or 1"):
        smb.Server(memory="1MiB", token=TOKEN)
