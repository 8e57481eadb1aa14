"""`hbmcomm bench box` with its bounds and rivals: python -m benchmarks.box --help"""

import typer

from benchmarks.box.rivals import RIVALS
from benchmarks.box.sections import SECTIONS
from torch_hbmcomm.bench import box as installed
from torch_hbmcomm.bench.result import Section
from torch_hbmcomm.cli import bench

app = typer.Typer(add_completion=False)
app.command()(bench.box)


def sections() -> dict[str, Section]:
    """Return the sections in the order in which they are measured and shown."""
    found = SECTIONS | {"rivals": RIVALS}
    return found | {"store": found.pop("store")}


if __name__ == "__main__":
    installed.SECTIONS = sections()
    app()
