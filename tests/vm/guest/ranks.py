"""Groups of ranks in a guest, and the nodes of the memory that their collectives use."""

from __future__ import annotations

import re
import shlex
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from guest import boot
from guest.pages import Report, parse_reports

COLLECTIVES = ("broadcast", "gather", "allreduce")
WHATS = ("tensor", "segment", "mpi")  # see collectives.cpp
_LIBRARIES = Path(sysconfig.get_path("data")) / "lib"
# The limit of a file's size, and so of a segment's size. A report asks for the node of each page of
# the segment, so segments must be small.
_SEGMENT_MIB = 256
_NAME = re.compile(r"(\w+) rank (\d+) (\w+)")


@dataclass(frozen=True)
class Job:
    """A group of `ranks` processes whose collectives have `size` bytes.

    bind: the value of HBMCOMM_BIND.
    """

    ranks: int
    policy: str
    bind: str
    size: int

    def script(self) -> str:
        """Return the shell commands that run the group, and fail if a rank fails."""
        program = shlex.quote(str(boot.PROGRAMS / "guest_collectives"))
        rank = f'{program} "$directory" $rank {self.ranks} {shlex.quote(str(_LIBRARIES))}'
        lines = [
            f"ulimit -f $(({_SEGMENT_MIB} << 11))",  # in blocks of 512 bytes
            "directory=$(mktemp -d)",
            "started=",
            f"for rank in $(seq 0 {self.ranks - 1}); do",
            f"  HBMCOMM_BIND={self.bind} {rank} {self.policy} {self.size} &",
            '  started="$started $!"',
            "done",
            "for one in $started; do wait $one; done",
        ]
        return "\n".join(lines)


Reports = dict[tuple[str, int, str], Report]
"""By collective, rank and kind of memory."""


def run(topology: str, jobs: Sequence[Job], directory: Path) -> list[Reports]:
    """Run the jobs one after the other in one guest, and return the reports of their ranks.

    directory: must be empty, and receives the files of the guest. Raises GuestError.
    """
    script = "\n".join(f"{job.script()}\necho == job" for job in jobs)
    output = boot.run(topology, ["sh", "-ec", script], directory).stdout
    *parts, _ = re.split(r"^== job$", output, flags=re.MULTILINE)
    return [_by_name(parse_reports(part)) for part in parts]


def _by_name(reports: Sequence[Report]) -> Reports:
    found: Reports = {}
    for report in reports:
        name = _NAME.fullmatch(report.name)
        assert name is not None, report.name
        found[name[1], int(name[2]), name[3]] = report
    return found
