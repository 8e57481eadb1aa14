"""Plots a panel for each section and operation that has rates, with a line for each contender."""

from benchmarks.box.rivals import RIVALS
from benchmarks.box.sections import SECTIONS
from benchmarks.panels import Panel
from torch_hbmcomm.bench.report import rate
from torch_hbmcomm.bench.result import Measurement, Result
from torch_hbmcomm.sizes import format_bytes

_COLUMNS = 4
_SECTIONS = SECTIONS | {"rivals": RIVALS}


def panels(result: Result) -> tuple[list[Panel], int]:
    """Return the panels and the number of columns.

    An operation has a panel if it was measured at several sizes or numbers of clients.
    """
    found: dict[tuple[str, str], list[Measurement]] = {}
    for one in result.measurements:
        if _SECTIONS[one.of["section"]].streams > 0:
            found.setdefault((one.of["section"], one.of["operation"]), []).append(one)
    shown = [
        _panel(section, operation, own)
        for (section, operation), own in found.items()
        if len({(one.of["bytes"], one.of["clients"]) for one in own}) > 1
    ]
    return shown, min(_COLUMNS, len(shown))


def _panel(section: str, operation: str, found: list[Measurement]) -> Panel:
    by_clients = len({one.of["clients"] for one in found}) > 1
    panel = Panel(f"{section}: {operation}", "clients" if by_clients else "size", "GB/s")
    for name in dict.fromkeys(one.contender for one in found):
        own = [one for one in found if one.contender == name]
        at = [str(m.of["clients"]) if by_clients else format_bytes(m.of["bytes"]) for m in own]
        speeds = [rate(_SECTIONS[section], one) for one in own]
        panel.lines[name] = (at, speeds, "-" if name.startswith("hbm") else "--")
    return panel
