"""The server of warm.py: forks a child for each program that it reads, and writes its exit code.

A line of the standard input is a program, in JSON: its code, its environment, and the file that
gets its output. The server runs one program at a time.
"""

from __future__ import annotations

import json
import os
import sys
import types
import warnings
from typing import Any


def next_program() -> dict[str, Any] | None:
    """Return a program in the child that shall run it. Returns None in the server, at its end."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            program: dict[str, Any] = json.loads(line)
            return program
        _, status = os.waitpid(child, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return None


def become(program: dict[str, Any]) -> types.ModuleType:
    """Give this process what a new Python has at the start of the program. Returns __main__."""
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(program["output"], os.O_WRONLY)
    for descriptor, source in enumerate((nothing, output, output)):
        os.dup2(source, descriptor)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(program["environment"])
    for action in filter(None, os.environ.get("PYTHONWARNINGS", "").split(",")):
        warnings.simplefilter(action)  # type: ignore[arg-type]  # PYTHONWARNINGS=ignore
    sys.argv = ["-c"]
    sys.path.insert(0, "")
    sys.modules["__main__"] = types.ModuleType("__main__")
    return sys.modules["__main__"]


if __name__ == "__main__":
    del sys.path[0]  # the directory of this file
    import torch

    asked = next_program()
    if asked is not None:
        main = become(asked)
        torch._import_device_backends()
        exec(compile(asked["code"], "<string>", "exec"), main.__dict__)
