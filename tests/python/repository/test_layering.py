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

# Each layer of csrc/, and all layers that it may reach, directly or through others. A layer is a
# directory, except for the files that LAYERS_OF_FILES names.
BASE = {"base"}
COMMUNICATOR = {"communicator", "progress", "bootstrap", "memory", "kernels"} | BASE
CLIENT = {"box/transport", "box/protocol", "kernels"} | BASE
SERVER = {"box/server/storage", "box/protocol", "memory", "kernels"} | BASE
# The part of box/verbs that clients and servers know: the function that opens libhbm_verbs.so, and
# its function table for their side.
CLIENT_VERBS = {"box/verbs/common/load_library", "box/verbs/client/library"}
SERVER_VERBS = {"box/verbs/common/load_library", "box/verbs/server/library"}
LAYERS: dict[str, set[str]] = {
    "base": set(),
    "kernels": BASE,
    "memory": BASE,
    "bootstrap": BASE,
    "progress": BASE,
    # The interface, its implementations, and connect, which chooses among them. The process group
    # knows the interface and connect alone. (The bindings start MPI for init_method="mpi://".)
    "communicator": {"progress"} | BASE,
    "communicator/shm": COMMUNICATOR,
    "communicator/tcp": {"bootstrap", "communicator", "progress"} | BASE,
    "communicator/mpi": {"communicator/tcp"} | COMMUNICATOR,
    "communicator/failure": {"communicator/shm"} | COMMUNICATOR,
    "communicator/hierarchical": {"communicator/shm", "communicator/mpi", "communicator/tcp"}
    | COMMUNICATOR,
    "communicator/connect": {
        "communicator/shm",
        "communicator/mpi",
        "communicator/tcp",
        "communicator/hierarchical",
        "communicator/failure",
    }
    | COMMUNICATOR,
    "process_group": {"communicator/connect"} | COMMUNICATOR,
    "bindings/errors": BASE,
    "bindings": {
        "bindings/errors",
        "process_group",
        "communicator/connect",
        "communicator/mpi",
        "communicator/tcp",
    }
    | COMMUNICATOR,
    # The memory box: only libhbm_verbs.so and the bindings know both its clients and its servers.
    "box/protocol": BASE,
    "box/transport": {"box/protocol"} | BASE,
    "box/client": CLIENT_VERBS | CLIENT,
    "smb_client": {"box/client"} | CLIENT_VERBS | CLIENT,
    "box/server/storage": SERVER,
    "box/server": SERVER,
    "box/server/listener": {"box/server"} | SERVER,
    "box": {"box/server", "box/server/listener"} | SERVER_VERBS | SERVER,
    "box/verbs/common/load_library": BASE,
    "box/verbs/common": {"box/protocol"} | BASE,
    "box/verbs/client/library": {"box/transport", "box/protocol"} | BASE,
    "box/verbs/client": {"box/verbs/common", "box/transport", "box/protocol"} | BASE,
    "box/verbs/server/library": {"box/server", "box/protocol"} | BASE,
    "box/verbs/server": {"box/verbs/server/library", "box/verbs/common"}
    | {"box/server", "box/server/listener"}
    | SERVER,
    "box/verbs": {"box/verbs/common", "box/verbs/client", "box/verbs/server"}
    | {"box/server", "box/server/listener"}
    | CLIENT_VERBS
    | SERVER_VERBS
    | CLIENT
    | SERVER,
    "bindings/smb": {"smb_client", "box", "box/client", "box/server", "box/server/listener"}
    | CLIENT_VERBS
    | SERVER_VERBS
    | {"bindings/errors"}
    | CLIENT
    | SERVER,
}
LAYERS_OF_FILES = {  # the first matching pattern decides
    r"smb_client\.\w+|smb\.h": "smb_client",
    r"(pg_hbm|error_feedback|layerdrop|low_rank)\.\w+": "process_group",
    r"bindings/errors\.h": "bindings/errors",
    r"bindings/smb_.+": "bindings/smb",
    r"box/verbs/common/load_library\.\w+": "box/verbs/common/load_library",
    r"box/verbs/client/library\.h": "box/verbs/client/library",
    r"box/verbs/server/library\.h": "box/verbs/server/library",
}
INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]', re.MULTILINE)
# Headers that only some layers may include: a name, the headers, and those layers.
RESERVED = [
    ("PyTorch", re.compile(r"(torch|ATen|c10|caffe2)/"), {"process_group", "bindings"}),
    (
        "Python",
        re.compile(r"pybind11/|Python\.h$"),
        {"bindings", "bindings/smb", "bindings/errors"},
    ),
    (
        "RDMA",
        re.compile(r"(infiniband|rdma)/"),
        {"box/verbs", "box/verbs/common", "box/verbs/client", "box/verbs/server"},
    ),
    ("MPI's header", re.compile(r"mpi(_abi)?\.h$"), set()),  # communicator/mpi/abi.h has two ABIs
]

NAMESPACE = re.compile(r"^namespace (hbm\b[\w:]*) \{", re.MULTILINE)

Graph = dict[str, set[str]]


def layer_of(path: Path) -> str:
    for pattern, layer in LAYERS_OF_FILES.items():
        if re.fullmatch(pattern, str(path)):
            return layer
    return str(path.parent)


def include_violations(csrc: Path) -> list[str]:
    found: list[str] = []
    graph: Graph = {}
    for file in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cpp", ".inc"}):
        name = file.relative_to(csrc)
        layer = layer_of(name)
        if layer not in LAYERS:
            found.append(f"{name}: {layer} is no layer of LAYERS")
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
    loops = cycles(graph)
    return found + (loops or unreachable_layers(graph))


def unreachable_layers(graph: Graph) -> list[str]:
    """Return each file that reaches a layer forbidden to its own, and the shortest include path."""
    found: list[str] = []
    for name in graph:
        layer = layer_of(Path(name))
        ways = {name: [name]}
        queue = [name]
        for here in queue:
            for target in sorted(graph.get(here, ())):
                if target not in ways:
                    ways[target] = [*ways[here], target]
                    queue.append(target)
        forbidden: dict[str, list[str]] = {}
        for target, way in ways.items():
            reached = layer_of(Path(target))
            if reached not in LAYERS[layer] | {layer}:
                forbidden.setdefault(reached, way)
        found += [
            f"{layer} may not reach {to}: {' -> '.join(way)}" for to, way in forbidden.items()
        ]
    return found


# Entries of components, directly in csrc/, each with the namespace of its component.
ENTRIES = {"pg_hbm": "hbm::process_group", "smb_client": "hbm::box::client"}


def namespace_violations(csrc: Path) -> list[str]:
    """Return every file that opens another namespace of hbm than its folder's."""
    found: list[str] = []
    for file in sorted(p for p in csrc.rglob("*") if p.suffix in {".h", ".cpp", ".inc"}):
        name = file.relative_to(csrc)
        allowed = namespaces_of(name)
        found += [
            f"{name} opens {opened}, not {' or '.join(sorted(allowed))}"
            for opened in NAMESPACE.findall(file.read_text())
            if opened not in allowed
        ]
    return found


def namespaces_of(path: Path) -> set[str]:
    """Return the namespaces that a file may open.

    A file opens hbm and its folders, joined by ::. A file in base/, or directly in csrc/, opens
    hbm, or hbm and the file's name. The entry of a component, directly in csrc/, opens the
    component's namespace.
    """
    if str(path.parent) == "." and path.stem in ENTRIES:
        return {ENTRIES[path.stem]}
    if str(path.parent) in {".", "base"}:
        return {"hbm", f"hbm::{path.stem}"}
    return {"::".join(["hbm", *path.parent.parts])}


def import_violations(package: Path) -> list[str]:
    """Return the forbidden imports and the cycles.

    The library must not import its command line or its benchmarks. Only the command bench imports
    the benchmarks.
    """
    modules = {module_name(file, package): file for file in sorted(package.rglob("*.py"))}
    known = modules.keys() | {module_name(file, package) for file in package.rglob("*.pyi")}
    cli, bench = f"{package.name}.cli", f"{package.name}.bench"
    found: list[str] = []
    graph: Graph = {}
    for name, file in modules.items():
        graph[name] = imports(name, file, known) - {name}
        if not within(name, cli):
            found += [f"{name} imports {t}" for t in sorted(graph[name]) if within(t, cli)]
        if not within(name, bench) and name != f"{cli}.bench":
            found += [f"{name} imports {t}" for t in sorted(graph[name]) if within(t, bench)]
    return found + cycles(graph)


def imports(name: str, file: Path, known: Set[str]) -> set[str]:
    """Return the package's modules, native ones too, that `file` imports, also inside functions."""
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


def test_namespaces_follow_folders() -> None:
    assert namespace_violations(ROOT / "csrc") == []


@pytest.mark.parametrize(
    ("file", "namespace"),
    [
        ("base/error.h", "hbm"),
        ("base/log.h", "hbm::log"),
        ("smb.h", "hbm"),
        ("low_rank.cpp", "hbm::low_rank"),
        ("memory/heap.cpp", "hbm::memory"),
        ("communicator/shm/tuning.h", "hbm::communicator::shm"),
        ("box/verbs/client/connector.cpp", "hbm::box::verbs::client"),
    ],
)
def test_the_namespace_of_a_folder_passes(tmp_path: Path, file: str, namespace: str) -> None:
    text = f"#pragma once\n\nnamespace {namespace} {{\nnamespace {{\n}}\n}}\n"
    assert namespace_violations(write_tree(tmp_path, {file: text})) == []


@pytest.mark.parametrize(
    ("file", "namespace"),
    [
        ("base/error.h", "hbm::base"),
        ("smb_client.h", "hbm::client"),
        ("memory/heap.cpp", "hbm"),
        ("communicator/shm/tuning.h", "hbm::shm"),
        ("box/server/session.cpp", "hbm::box"),
    ],
)
def test_another_namespace_is_found(tmp_path: Path, file: str, namespace: str) -> None:
    write_tree(tmp_path, {file: f"namespace {namespace} {{\n}}\n"})
    assert namespace_violations(tmp_path)[0].startswith(f"{file} opens {namespace}, not ")


def test_imports_point_downwards() -> None:
    assert import_violations(ROOT / "torch_hbmcomm") == []


def test_benchmarks_use_neither_papers_nor_the_guest() -> None:
    files = sorted((ROOT / "benchmarks").rglob("*.py"))
    assert files
    used = {
        f"{file.relative_to(ROOT)} imports {name}"
        for file in files
        for name in re.findall(r"^\s*(?:import|from) (\S+)", file.read_text(), re.MULTILINE)
        if within(name, "papers") or within(name, "guest")
    }
    assert used == set()


def test_the_box_loads_without_torch() -> None:
    program = "import sys; sys.modules['torch'] = None; import torch_hbmcomm.smb, torch_hbmcomm.cli"
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


SOUND_INCLUDES = {
    "bindings/module.cpp": '#include <pybind11/pybind11.h>\n#include "pg_hbm.h"\n',
    "bindings/module.h": "",
    "pg_hbm.h": '#include <torch/torch.h>\n#include "communicator/connect/connect.h"\n',
    "communicator/connect/connect.h": '#include "communicator/communicator.h"\n',
    "communicator/connect/connect.cpp": '#include "communicator/mpi/world.h"\n',
    "communicator/communicator.h": "",
    "process_group/work.cpp": '#include "pg_hbm.h"\n',
    "communicator/mpi/world.h": '#include "memory/heap.h"\n',
    "memory/heap.h": '#pragma once\n#include <mutex>\n#include "base/error.h"\n',
    "base/error.h": "#include <string>\n",
    "base/error.cpp": '#include "base/error.h"\n',
    "bindings/smb_module.cpp": '#include <pybind11/pybind11.h>\n#include "smb_client.h"\n',
    "smb_client.h": '#include "box/client/core.h"\n',
    "box/server.h": '#include "box/verbs/server/library.h"\n',
    "box/server/handler.h": "",
    "box/client/core.h": '#include "box/transport/transport.h"\n',
    "box/client/dialer.cpp": '#include "box/verbs/client/library.h"\n',
    "box/verbs/client/library.h": '#include "box/transport/transport.h"\n',
    "box/verbs/server/library.h": '#include "box/server/handler.h"\n',
    "box/verbs/server/listener.cpp": '#include "box/verbs/server/library.h"\n',
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
            "base may not reach memory: base/error.cpp -> memory/heap.h",
        ),
        ("memory/heap.cpp", '#  include "pg_hbm.h"', "memory may not reach process_group"),
        (
            "process_group/work.cpp",
            '#include "bindings/module.h"',
            "process_group may not reach bindings",
        ),
        (
            "kernels/sum.h",  # includes are followed to their end
            '#include "memory/heap.h"',
            "base may not reach memory: base/dtype.h -> kernels/sum.h -> memory/heap.h",
        ),
        (
            "communicator/connect/connect.h",  # only the .cpp file may choose
            '#include "communicator/mpi/world.h"',
            "process_group may not reach communicator/mpi: pg_hbm.h -> "
            "communicator/connect/connect.h -> communicator/mpi/world.h",
        ),
        ("communicator/mpi/world.cpp", "#include <c10/util/Half.h>", "mpi is free of PyTorch"),
        ("kernels/sum.cpp", "#include <Python.h>", "kernels is free of Python"),
        ("communicator/mpi/world.cpp", "#include <mpi.h>", "mpi is free of MPI's header"),
        ("memory/heap.cpp", '#include "../base/error.h"', "no path from csrc/"),
        ("smb_client.cpp", '#include "box/server.h"', "smb_client may not reach box:"),
        (
            "box/transport/transport.h",  # a client's header includes it
            '#include "box/verbs/server/library.h"',
            "box/client may not reach box/server: box/client/core.h -> box/transport/transport.h",
        ),
        (
            "box/client/core.h",
            '#include "box/verbs/client/wire.h"',
            "may not reach box/verbs/client:",
        ),
        (
            "box/verbs/server/listener.cpp",
            '#include "box/transport/transport.h"',
            "box/verbs/server may not reach box/transport:",
        ),
        ("bindings/smb_module.cpp", "#include <torch/torch.h>", "smb is free of PyTorch"),
        ("box/transport/tcp.cpp", "#include <infiniband/verbs.h>", "transport is free of RDMA"),
        ("net/tcp.h", "", "net is no layer"),
        ("base/error.h", '#include "base/error.h"', "cycle: base/error.h"),
    ],
)
def test_a_forbidden_include_is_reported(
    tmp_path: Path, file: str, line: str, complaint: str
) -> None:
    files = SOUND_INCLUDES | {"base/dtype.h": '#include "kernels/sum.h"\n', "kernels/sum.h": ""}
    files |= {"box/verbs/client/wire.h": "#include <infiniband/verbs.h>\n"}
    write_tree(tmp_path, files | {file: line + "\n"})
    assert complaint in "\n".join(include_violations(tmp_path))


SOUND_IMPORTS = {
    "box/__init__.py": "from box.memory import empty\n",
    "box/memory.py": "import os\n\nfrom . import errors\n",
    "box/errors.py": "",
    "box/cli/__init__.py": "from .bench import run\n",
    "box/cli/bench.py": "import box.memory\n\nfrom ..bench import rounds\nfrom ..errors import E\n",
    "box/bench/__init__.py": "",
    "box/bench/rounds.py": "from box import errors\n",
}


def test_sound_imports_pass(tmp_path: Path) -> None:
    assert import_violations(write_tree(tmp_path, SOUND_IMPORTS) / "box") == []


@pytest.mark.parametrize(
    ("file", "line", "complaint"),
    [
        ("box/memory.py", "from box.cli.bench import run", "box.memory imports box.cli.bench"),
        ("box/memory.py", "from .cli import main", "box.memory imports box.cli"),
        ("box/memory.py", "def f():\n    from . import cli", "box.memory imports box.cli"),
        ("box/memory.py", "from box.bench import rounds", "box.memory imports box.bench.rounds"),
        ("box/cli/info.py", "import box.bench", "box.cli.info imports box.bench"),
        ("box/errors.py", "import box.memory", "cycle: box."),
        ("box/errors.py", "from box import memory", "cycle: box."),
    ],
)
def test_a_forbidden_import_is_reported(
    tmp_path: Path, file: str, line: str, complaint: str
) -> None:
    sound = SOUND_IMPORTS["box/memory.py"] if file == "box/memory.py" else ""
    write_tree(tmp_path, SOUND_IMPORTS | {file: f"{sound}{line}\n"})
    assert complaint in "\n".join(import_violations(tmp_path / "box"))


def test_only_one_header_compares_releases_of_pytorch() -> None:
    compares = re.compile(r"\b(TORCH_VERSION_(MAJOR|MINOR|PATCH)|TORCH_ABI_VERSION)\b")
    sources = [*(ROOT / "csrc").rglob("*.h"), *(ROOT / "csrc").rglob("*.cpp")]
    found = {str(path.relative_to(ROOT)) for path in sources if compares.search(path.read_text())}
    assert found == {"csrc/process_group/torch_version.h"}
