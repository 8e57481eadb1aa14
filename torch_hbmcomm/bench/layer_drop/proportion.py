"""A goal of several sections: as much less time as fewer bytes."""

from __future__ import annotations

from torch_hbmcomm.bench.layer_drop.section import Row
from torch_hbmcomm.bench.report import Verdict

_MORE = 0.05


def in_proportion(row: Row) -> Verdict:
    sent, took = row.values["bytes_share"], row.values["time_share"]
    more = took / sent - 1
    return Verdict(
        f"{row.case}, {row.contender}: {sent:.1%} of the bytes take {took:.1%} of the time, "
        f"{more:+.1%} (≤ {_MORE:+.0%})",
        more <= _MORE,
    )
