"""Dependencies point downwards: the includes under csrc/ and the imports under torch_hbmcomm/."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Set
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]

# Each layer, and the layers it may use besides itself. Those in capitals lie directly in csrc/,
# by the first pattern that fits in TOP_LAYERS; the others are its folders.
LAYERS = {
    "BINDINGS": {
        "TORCH",
        "cluster",
        "mpi",
        "node",
        "bootstrap",
        "engine",
        "memory",
        "reduce",
        "base",
    },
    "TORCH": {"cluster", "mpi", "node", "bootstrap", "engine", "memory", "reduce", "base"},
    "cluster": {"mpi", "node", "bootstrap", "engine", "memory", "reduce", "base"},
    "mpi": {"bootstrap", "engine", "memory", "reduce", "base"},
    "node": {"bootstrap", "engine", "memory", "reduce", "base"},
    # The memory box: the client and the server meet in the bindings alone.
    "BOX_BINDINGS": {
        "BOX_BENCH",
        "BOX_CLIENT",
        "BOX_SERVER",
        "client",
        "verbs",
        "box",
        "memory",
        "reduce",
        "smb",
        "base",
    },
    "BOX_BENCH": {"BOX_CLIENT", "client", "reduce", "smb", "base"},
    "BOX_C": {"BOX_CLIENT", "client", "smb", "base"},
    "BOX_CLIENT": {"client", "reduce", "smb", "base"},
    "BOX_SERVER": {"verbs", "door", "box", "memory", "smb", "base"},
    "client": {"verbs", "link", "smb", "reduce", "base"},
    "verbs": {"door", "box", "link", "smb", "base"},
    "door": {"box", "memory", "smb", "base"},
    "box": {"smb", "memory", "reduce", "base"},
    "link": {"smb", "reduce", "base"},
    "smb": {"base"},
    "bootstrap": {"base"},
    "engine": {"base"},
    "memory": {"base"},
    "reduce": {"base"},
    "base": set(),
}
TOP_LAYERS = {
    r"smb_(.+_)?bindings": "BOX_BINDINGS",
    r"smb_bench_.+": "BOX_BENCH",
    r"smb_client": "BOX_CLIENT",
    r"smb_server": "BOX_SERVER",
    r"smb(_c)?": "BOX_C",
    r"(.+_)?bindings": "BINDINGS",
    r".+": "TORCH",
}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# What only some layers may see: a name for it, its headers, and those layers.
RESERVED = [
    ("PyTorch", re.compile(r"(torch|ATen|c10|caffe2)/"), {"BINDINGS", "TORCH"}),
    ("Python", re.compile(r"pybind11/|Python\.h$"), {"BINDINGS", "TORCH", "BOX_BINDINGS"}),
    ("RDMA", re.compile(r"(infiniband|rdma)/"), {"verbs"}),
]

Graph = dict[str, set[str]]


def layer_of(path: Path) -> str:
    if len(path.parts) > 1:
        return path.parts[0]
    return next(layer for name, layer in TOP_LAYERS.items() if re.fullmatch(name, path.stem))


def include_violations(csrc: Path) -> list[str]:
    found: list[str] = []
    graph: Graph = {}
    for file in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cpp", ".inc"}):
        name = file.relative_to(csrc)
        layer = layer_of(name)
        if layer not in LAYERS:
            found.append(f"{name}: the folder {layer}/ has no place among the layers")
            continue
        graph[str(name)] = set()
        for bracket, target in INCLUDE.findall(file.read_text()):
            reserved = [(what, by) for what, headers, by in RESERVED if headers.match(target)]
            if reserved:
                found += [
                    f"{name} includes {target}, but {layer} is free of {what}"
                    for what, by in reserved
                    if layer not in by
                ]
            elif bracket == '"' and not (csrc / target).is_file():
                found.append(f"{name} includes {target}, which is no path from csrc/")
            elif bracket == '"':
                graph[str(name)].add(target)
                below = layer_of(Path(target))
                if below not in LAYERS[layer] | {layer}:
                    found.append(
                        f"{name} ({layer}) includes {target} ({below}), which is not below"
                    )
    return found + cycles(graph)


def import_violations(package: Path) -> list[str]:
    modules = {module_name(file, package): file for file in sorted(package.rglob("*.py"))}
    known = modules.keys() | {module_name(file, package) for file in package.rglob("*.pyi")}
    cli = f"{package.name}.cli"
    found: list[str] = []
    graph: Graph = {}
    for name, file in modules.items():
        graph[name] = imports(name, file, known) - {name}
        if not within(name, cli):
            found += [f"{name} imports {t}" for t in sorted(graph[name]) if within(t, cli)]
    return found + cycles(graph)


def imports(name: str, file: Path, known: Set[str]) -> set[str]:
    """The modules of the package, native ones too, that this one imports, also inside functions."""
    package = name if file.name == "__init__.py" else name.rpartition(".")[0]
    targets: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            targets |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) + 1 - node.level]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            for alias in node.names:
                submodule = f"{base}.{alias.name}"
                targets.add(submodule if submodule in known else base)
    return targets & known


def module_name(file: Path, package: Path) -> str:
    parts = file.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def within(module: str, parent: str) -> bool:
    return module == parent or module.startswith(parent + ".")


def cycles(graph: Graph) -> list[str]:
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return ["cycle: " + " <- ".join(error.args[1])]
    return []


def write_tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_includes_point_downwards() -> None:
    assert list((ROOT / "csrc").rglob("*.cpp"))
    assert include_violations(ROOT / "csrc") == []


def test_imports_point_downwards() -> None:
    assert import_violations(ROOT / "torch_hbmcomm") == []


def test_the_box_is_loaded_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import torch_hbmcomm.smb, torch_hbmcomm.cli"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


SOUND_INCLUDES = {
    "bindings.cpp": '#include <pybind11/pybind11.h>\n#include "pg_hbm.h"\n',
    "pg_hbm.h": '#include <torch/torch.h>\n#include "communicator/mpi/world.h"\n#include "base/error.h"\n',
    "communicator/mpi/world.h": '#include <mpi.h>\n#include "memory/heap.h"\n',
    "memory/heap.h": '#pragma once\n#include <mutex>\n#include "base/error.h"\n',
    "base/error.h": "#include <string>\n",
    "base/error.cpp": '#include "base/error.h"\n',
    "smb_bindings.cpp": '#include <pybind11/pybind11.h>\n#include "smb_client.h"\n',
    "smb_client.h": '#include "box/client/core.h"\n',
    "smb_server.h": "",
    "box/client/core.h": '#include "box/transport/transport.h"\n',
    "box/transport/transport.h": '#include "base/error.h"\n',
}


def test_sound_includes_pass(tmp_path: Path) -> None:
    assert include_violations(write_tree(tmp_path, SOUND_INCLUDES)) == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        (
            "base/error.cpp",
            '#include "memory/heap.h"',
            "base/error.cpp (base) includes memory/heap",
        ),
        ("memory/heap.h", '#include "communicator/mpi/world.h"', "memory/heap.h (memory) includes communicator/mpi/world.h"),
        ("memory/heap.cpp", '#  include "pg_hbm.h"', "memory/heap.cpp (memory) includes pg_hbm.h"),
        ("pg_work.cpp", '#include "bindings/memory.h"', "(TORCH) includes memory_bindings.h (BIND"),
        ("communicator/mpi/world.cpp", "#include <c10/util/Half.h>", "mpi is free of PyTorch"),
        ("reduce/sum.cpp", "#include <Python.h>", "reduce is free of Python"),
        ("memory/heap.cpp", '#include "../base/error.h"', "no path from csrc/"),
        (
            "smb_client.cpp",
            '#include "box/server/server.h"',
            "(BOX_CLIENT) includes smb_server.h (BOX_SER",
        ),
        ("smb_bindings.cpp", "#include <torch/torch.h>", "BOX_BINDINGS is free of PyTorch"),
        ("link/link.cpp", "#include <infiniband/verbs.h>", "link is free of RDMA"),
        ("net/tcp.h", "", "net/ has no place"),
        ("base/error.h", '#include "base/error.h"', "cycle: base/error.h"),
    ],
)
def test_a_bad_include_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    write_tree(tmp_path, SOUND_INCLUDES | {"memory_bindings.h": "", file: line + "\n"})
    assert complaint in "\n".join(include_violations(tmp_path))


SOUND_IMPORTS = {
    "box/__init__.py": "from box.memory import empty\n",
    "box/memory.py": "import os\n\nfrom . import errors\n",
    "box/errors.py": "",
    "box/cli/__init__.py": "from .bench import run\n",
    "box/cli/bench.py": "import box.memory\n\nfrom ..errors import Error\n",
}


def test_sound_imports_pass(tmp_path: Path) -> None:
    assert import_violations(write_tree(tmp_path, SOUND_IMPORTS) / "box") == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("box/memory.py", "from box.cli.bench import run", "box.memory imports box.cli.bench"),
        ("box/memory.py", "from .cli import main", "box.memory imports box.cli"),
        ("box/memory.py", "def f():\n    from . import cli", "box.memory imports box.cli"),
        ("box/errors.py", "import box.memory", "cycle: box."),
        ("box/errors.py", "from box import memory", "cycle: box."),
    ],
)
def test_a_bad_import_is_found(tmp_path: Path, file: str, line: str, complaint: str) -> None:
    sound = SOUND_IMPORTS["box/memory.py"] if file == "box/memory.py" else ""
    write_tree(tmp_path, SOUND_IMPORTS | {file: f"{sound}{line}\n"})
    assert complaint in "\n".join(import_violations(tmp_path / "box"))
