"""The figures of the memory box over verbs, from the lines that a guest prints."""

from __future__ import annotations

from papers.report.verbs import VERBS
from papers.verbs import OURS, PERFTEST, UNREGISTERED, found_in
from torch_hbmcomm.bench.result import Result

PRINTED = """
{"bytes": 4096, "register us": 50, "register touched us": 40, "window us": 30}
{"clients": 20, "box KiB each": 9.5, "kernel KiB each, both ends": 120.0}
ib_write_bw 65536      36               90.00              80.00      0.001280
ib_read_bw 65536      36               70.00              60.00      0.001000
{"operation": "write", "bytes": 65536, "registered": true, "MiB/s": 60.0}
{"operation": "read", "bytes": 65536, "registered": true, "MiB/s": 30.0}
{"operation": "write", "bytes": 65536, "registered": false, "MiB/s": 20.0}
{"operation": "read", "bytes": 65536, "registered": false, "MiB/s": 10.0}
ib_write_bw 65536      36               90.00              40.00      0.001280
{"operation": "write", "bytes": 65536, "registered": true, "MiB/s": 30.0}
"""


def test_speeds_come_from_the_fastest_round() -> None:
    found = {(one.of["operation"], one.contender): one for one in found_in(PRINTED)}
    assert {key: one.summary.maximum for key, one in found.items()} == {
        ("write", OURS): 60.0,
        ("write", UNREGISTERED): 20.0,
        ("write", PERFTEST): 80.0,
        ("read", OURS): 30.0,
        ("read", UNREGISTERED): 10.0,
        ("read", PERFTEST): 60.0,
    }
    assert (found["write", PERFTEST].summary.n, found["write", PERFTEST].minimum) == (2, 40.0)
    assert all(one.of["bytes"] == 65536 for one in found.values())


def test_each_size_is_compared_with_perftest() -> None:
    result = Result("verbs", {}, {}, measurements=found_in(PRINTED))
    assert VERBS.table({"verbs": result}).rows == [
        ["read", "64 KiB", "30", "10", "60", "50%"],
        ["write", "64 KiB", "60", "20", "80", "75%"],
    ]
