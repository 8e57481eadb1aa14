"""Makes the virtual environment given as the argument extend this interpreter's environment.

The given environment sees all packages installed here. pip adds to it only packages that are
missing or have another version.
"""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path


def main(upper: Path) -> None:
    here = sysconfig.get_path("purelib")
    there = sysconfig.get_path("purelib", vars={"base": str(upper)})
    # addsitedir, unlike a path alone, reads the .pth files of editable installations.
    Path(there, "layer.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    for entry in Path(sys.prefix, "lib").iterdir():  # mpi4py looks for the MPI library in lib/
        link = upper / "lib" / entry.name
        if not link.exists():
            link.symlink_to(entry)


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
