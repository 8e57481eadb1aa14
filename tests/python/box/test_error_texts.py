"""Errors whose text has bytes that are not UTF-8. Another process may send such bytes."""

from __future__ import annotations

from typing import Any

import pytest

from torch_hbmcomm import smb

# The native module accepts bytes in place of text.
ODD: Any = b"/proc/\xff\xfe/none"


def test_of_a_server() -> None:
    with pytest.raises(RuntimeError, match="cannot make /proc/\ufffd\ufffd/none"):
        smb.Server("127.0.0.1:0", "1MiB", store=ODD, token="", verbs="off")


def test_of_a_client() -> None:
    with pytest.raises(smb.BoxUnreachable, match="/proc/\ufffd\ufffd/none"):
        smb.connect(b"smb+unix://" + ODD, "", connect_timeout=0.1)
