"""Boxes as a training script names them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack

from torch_hbmcomm import smb

Boxes = smb.Box | str | Sequence[smb.Box | str]


def connected(boxes: Boxes, resources: ExitStack) -> list[smb.Box]:
    """Those that are given by their address are closed with the resources."""
    if not isinstance(boxes, smb.Box | str | Sequence):
        raise TypeError(f"box is an address, a Box, or several of them, not {boxes!r}")
    found = []
    for one in [boxes] if isinstance(boxes, smb.Box | str) else boxes:
        found.append(resources.enter_context(smb.connect(one)) if isinstance(one, str) else one)
    if not found:
        raise ValueError("box names no box")
    return found
