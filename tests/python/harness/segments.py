"""Addresses and sizes of a process' segments, most of them from /proc."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from torch_hbmcomm import memory

NAME = "/memfd:hbmcomm-"
BOX = NAME + "box-"


def in_segment(tensor: torch.Tensor) -> bool:
    """Return True if all of the memory behind a tensor is in a segment."""
    storage = tensor.untyped_storage()
    begin = storage.data_ptr()
    return any(
        low <= begin and begin + storage.nbytes() <= high for low, high, _ in mappings("self")
    )


def mappings(process: int | str) -> list[tuple[int, int, int]]:
    """Return (first address, end, inode) of each mapped segment, including segments of peers."""
    found = []
    for line in Path(f"/proc/{process}/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        if len(fields) == 6 and fields[5].startswith(NAME):
            low, high = (int(address, 16) for address in fields[0].split("-"))
            found.append((low, high, int(fields[4])))
    return found


def in_use() -> int:
    """Return the bytes of the blocks in use in this process' segments."""
    return sum(segment.in_use_bytes for segment in memory.info().segments)


def of_groups(process: int | str) -> set[int]:
    """Return the inodes of the mapped segments of groups, including segments of peers."""
    lines = Path(f"/proc/{process}/maps").read_text().splitlines()
    fields = [line.split(maxsplit=5) for line in lines]
    names = [(each[5], int(each[4])) for each in fields if len(each) == 6]
    return {inode for name, inode in names if name.startswith(NAME) and not name.startswith(BOX)}


def held() -> int:
    """Return the bytes that the kernel holds for this process' segments, written by any rank."""
    return sum(opened("self").values())


def opened(process: int | str) -> dict[int, int]:
    """Return, by inode, the bytes that the kernel holds for each segment that the process has open.

    The segments are the process's own or inherited.
    """
    found = {}
    for entry in Path(f"/proc/{process}/fd").iterdir():
        try:
            if os.readlink(entry).startswith(NAME):
                status = entry.stat()
                found[status.st_ino] = status.st_blocks * 512
        except FileNotFoundError:  # the descriptor of the listing itself
            continue
    return found
