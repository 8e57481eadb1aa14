"""Private memory, every page of which has been written."""

import mmap


def private(size: int) -> mmap.mmap:
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    page = b"\1" * mmap.PAGESIZE
    for at in range(0, size, mmap.PAGESIZE):
        memory[at : at + mmap.PAGESIZE] = page[: size - at]
    return memory
