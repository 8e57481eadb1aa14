"""A job's segments in its boxes."""

from __future__ import annotations

from collections.abc import Sequence

from torch_hbmcomm import smb


class Job:
    """What this rank has attached for the job of that name, which all ranks have in common.

    needed: bytes of each box for all ranks; alloc()'s errors tell.
    """

    def __init__(self, boxes: Sequence[smb.Box], name: str, needed: int) -> None:
        self.boxes = boxes
        self.name = name
        self._needed = needed
        self._segments: list[smb.Segment] = []

    def alloc(self, box: int, size: int, key: str | None = None) -> smb.Segment:
        """In the box of that index: of this rank alone, or with a key, of all ranks.

        Raises MemoryError.
        """
        try:
            segment = self.boxes[box].alloc(
                size, None if key is None else f"{self.name}/{key}", temporary=True
            )
        except MemoryError as error:
            raise MemoryError(
                f"the box {self.boxes[box].url} is too small: it has to have {self._needed} bytes "
                f"for this job: {error}"
            ) from error
        self._segments.append(segment)
        return segment

    def free(self) -> None:
        """Ends the attachments, unless they have ended with the group that the boxes are of."""
        if not self.ended:
            for segment in self._segments:
                segment.free()

    @property
    def ended(self) -> bool:
        return any(box.closed for box in self.boxes)
