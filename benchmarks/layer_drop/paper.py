"""Table 1 of Lee et al. (2020): seconds in an iteration of ResNet-50 on GPUs, with 4 workers at
1 Gbit/s and 8 at 56 Gbit/s; which part of the gradients was dropped is not said."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.layer_drop.rows import row
from torch_hbmcomm.bench.result import Measurement

_NAMES = ("worker_ms", "server_ms", "communication_ms", "iteration_ms")
_TABLE = {
    "1 Gbit/s": ((388, 73, 3457, 3918), (408, 85, 182, 675)),
    "56 Gbit/s": ((222, 48, 1951, 2222), (230, 60, 375, 665)),
}


def rows(section: str, case: str, limited: bool) -> Iterator[Measurement]:
    """limited: whether the case's link has a rate."""
    network = "1 Gbit/s" if limited else "56 Gbit/s"
    sent, dropped = _TABLE[network]
    for who, found in (("all is sent", sent), ("dropped", dropped)):
        values = dict(zip(_NAMES, map(float, found), strict=True))
        values["time_share"] = found[2] / sent[2]
        yield row(section, case, f"paper, {network}: {who}", values)
