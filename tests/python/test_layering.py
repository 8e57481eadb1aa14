"""Dependencies point downwards: the includes under csrc/ and the imports under torch_hbmcomm/."""

from __future__ import annotations

import ast
import re
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Each layer, and the layers it may use besides itself. Those in capitals lie directly in csrc/,
# the others are its folders. BINDINGS is bindings.* and *_bindings.*, TORCH the rest.
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
    "bootstrap": {"base"},
    "engine": {"base"},
    "memory": {"base"},
    "reduce": {"base"},
    "base": set(),
}
MAY_USE_TORCH = {"BINDINGS", "TORCH"}

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
TORCH_HEADER = re.compile(r"(torch|ATen|c10|caffe2|pybind11)/|Python\.h$")

Graph = dict[str, set[str]]


def layer_of(path: Path) -> str:
    if len(path.parts) > 1:
        return path.parts[0]
    return "BINDINGS" if re.fullmatch(r"(.+_)?bindings", path.stem) else "TORCH"


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
            if TORCH_HEADER.match(target):
                if layer not in MAY_USE_TORCH:
                    found.append(f"{name} includes {target}, but {layer}/ is free of PyTorch")
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
    cli = f"{package.name}.cli"
    found: list[str] = []
    graph: Graph = {}
    for name, file in modules.items():
        graph[name] = imports(name, file, modules) - {name}
        if not within(name, cli):
            found += [f"{name} imports {t}" for t in sorted(graph[name]) if within(t, cli)]
    return found + cycles(graph)


def imports(name: str, file: Path, modules: dict[str, Path]) -> set[str]:
    """The modules of the package that this one imports, also inside functions."""
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
                targets.add(submodule if submodule in modules else base)
    return targets & modules.keys()


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


SOUND_INCLUDES = {
    "bindings.cpp": '#include <pybind11/pybind11.h>\n#include "pg_hbm.h"\n',
    "pg_hbm.h": '#include <torch/torch.h>\n#include "mpi/world.h"\n#include "base/error.h"\n',
    "mpi/world.h": '#include <mpi.h>\n#include "memory/heap.h"\n',
    "memory/heap.h": '#pragma once\n#include <mutex>\n#include "base/error.h"\n',
    "base/error.h": "#include <string>\n",
    "base/error.cpp": '#include "base/error.h"\n',
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
        ("memory/heap.h", '#include "mpi/world.h"', "memory/heap.h (memory) includes mpi/world.h"),
        ("memory/heap.cpp", '#  include "pg_hbm.h"', "memory/heap.cpp (memory) includes pg_hbm.h"),
        ("pg_work.cpp", '#include "memory_bindings.h"', "(TORCH) includes memory_bindings.h (BIND"),
        ("mpi/world.cpp", "#include <c10/util/Half.h>", "mpi/ is free of PyTorch"),
        ("reduce/sum.cpp", "#include <Python.h>", "reduce/ is free of PyTorch"),
        ("memory/heap.cpp", '#include "../base/error.h"', "no path from csrc/"),
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
