"""The memory box over RDMA, in a virtual machine that has soft-RoCE: python -m papers.verbs

QEMU emulates the machine, and its processor does the work of an adapter. Compare the speeds only
with the speeds of perftest's tools on the same machine.
"""

from __future__ import annotations

import json as json_module
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from guest import boot, kernel, verbs

from torch_hbmcomm.bench import report
from torch_hbmcomm.bench.report import Json, check_file, fail, finish
from torch_hbmcomm.bench.result import (
    Measurement,
    Result,
    describe_machine,
    sampled,
)
from torch_hbmcomm.sizes import KIB

OURS, UNREGISTERED, PERFTEST = "hbm", "hbm, memory not registered", "perftest"
CONTENDERS = {
    OURS: "reads and writes of a segment, 16 in flight, by 4 queue pairs",
    UNREGISTERED: "the same by memory that is copied to and from registered buffers",
    PERFTEST: "ib_read_bw and ib_write_bw by 4 queue pairs, 4 in flight on each",
}
SIZES = (4 * KIB, 64 * KIB, 1024 * KIB)
_MEBIBYTES = 16
_TOOL = re.compile(r"^ib_(read|write)_bw (\d+) +\d+ +[\d.]+ +([\d.]+)", re.MULTILINE)

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


def found_in(output: str) -> list[Measurement]:
    """Return the speeds of the rounds, by operation and bytes."""
    cells: dict[tuple[str, int], dict[str, list[float]]] = {}
    for line in output.splitlines():
        if line.startswith("{") and "operation" in (row := json_module.loads(line)):
            who = OURS if row["registered"] else UNREGISTERED
            cell = cells.setdefault((row["operation"], row["bytes"]), {})
            cell.setdefault(who, []).append(row["MiB/s"])
    for operation, size, speed in _TOOL.findall(output):
        cells.setdefault((operation, int(size)), {}).setdefault(PERFTEST, []).append(float(speed))
    return [
        sampled({"operation": operation, "bytes": size}, who, speeds, "mib_s")
        for (operation, size), cell in sorted(cells.items())
        for who, speeds in cell.items()
    ]


@app.command()
def main(
    mebibytes: Annotated[int, typer.Option(help="Moved at each size.")] = _MEBIBYTES,
    json: Json = None,
) -> None:
    """Measure reads and writes over verbs, and compare with perftest's tools."""
    check_file(json)
    if not kernel.VMLINUX.exists():
        fail(f"{kernel.VMLINUX} is missing: make vm-programs")
    with tempfile.TemporaryDirectory() as folder:
        try:
            output = verbs.speeds(mebibytes, SIZES, Path(folder))
        except boot.GuestError as error:
            fail(str(error))
    result = Result(
        benchmark="verbs",
        machine=describe_machine(),
        plan={"mebibytes": mebibytes},
        contenders=CONTENDERS,
        references=[PERFTEST],
        measurements=found_in(output),
    )
    headings = {"operation": lambda one: str(one.of["operation"]), "bytes": report.size}
    table = report.compared("MiB/s over soft-RoCE", result.measurements, headings, _entry)
    finish(report.group([table], result), result, json)


def _entry(row: Mapping[str, Measurement], found: Measurement) -> str:
    return f"{found.summary.maximum:.1f}"


if __name__ == "__main__":
    app()
