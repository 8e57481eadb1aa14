"""The kernels of an instruction set (csrc/kernels/kernels_*.cpp) have no vector instruction beyond
it. The assembler judges: it assembles the disassembled instructions for a processor without the
others."""

from __future__ import annotations

import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

PROCESSORS = {
    "avx2": "core2+avx2+fma+f16c",
    "avx512f": "core2+avx2+fma+f16c+avx512f+avx512cd",  # Knights Landing
}

pytestmark = pytest.mark.skipif(platform.machine() != "x86_64", reason="instructions of x86-64")


def vector_instructions(isa: str) -> set[str]:
    """Return the instructions of the kernels in the build for this Python."""
    build = ROOT / "build" / str(sys.implementation.cache_tag)
    made = build / "CMakeFiles" / "hbm_core.dir" / "kernels" / f"kernels_{isa}.cpp.o"
    assert made.exists(), f"there is no {made}: run `make build`"
    command = ["objdump", "-d", "--no-show-raw-insn", str(made)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^ *[0-9a-f]+:\t([vk][^#<\n]*)", text, re.MULTILINE)
    return {line.strip() for line in lines}


def refused(instructions: set[str], processor: str, folder: Path) -> list[str]:
    """Return the assembler's complaints."""
    source = folder / "instructions.s"
    source.write_text("\n".join(sorted(instructions)) + "\n")
    command = ["as", f"-march={processor}", "-o", str(folder / "instructions.o"), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    return [line for line in done.stderr.splitlines() if "Error" in line]


@pytest.mark.parametrize("isa", PROCESSORS)
def test_kernels_run_on_the_processors_they_are_for(isa: str, tmp_path: Path) -> None:
    instructions = vector_instructions(isa)
    assert len(instructions) > 1000
    assert refused(instructions, PROCESSORS[isa], tmp_path) == []


def test_an_instruction_beyond_the_set_is_found(tmp_path: Path) -> None:
    found = " ".join(refused(vector_instructions("avx512"), PROCESSORS["avx512f"], tmp_path))
    assert "not supported" in found
    assert "kmov" in found
