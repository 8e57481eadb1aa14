"""A native module that does not fit is refused; the error names the cause and the remedy."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest
import torch

from torch_hbmcomm import native

ROOT = Path(__file__).resolve().parents[3]
HERE = EXTENSION_SUFFIXES[0]


@pytest.fixture(autouse=True)
def fresh_loader() -> Iterator[None]:
    native.load.cache_clear()
    yield
    native.load.cache_clear()


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an installed torch_hbmcomm without native files, and have native.py find it."""
    folder = tmp_path / "torch_hbmcomm"
    folder.mkdir()
    monkeypatch.setattr(native, "__file__", str(folder / "native.py"))
    return folder


def add_module(package: Path, release: str, suffix: str = HERE) -> None:
    folder = package / f"torch_{release.replace('.', '_')}"
    folder.mkdir()
    (folder / f"_C{suffix}").touch()


def refusal() -> str:
    with pytest.raises(ImportError) as caught:
        native.load()
    return str(caught.value)


def test_the_module_for_the_running_pytorch_is_loaded() -> None:
    major, minor = torch.__version__.split(".")[:2]
    module = native.load()
    assert module.__name__ == "torch_hbmcomm._C"
    assert module.__file__ is not None
    assert Path(module.__file__).parent.name == f"torch_{major}_{minor}"


@pytest.mark.parametrize(
    ("given", "processors", "arenas"),
    [(None, 64, "64"), ("", 64, "64"), ("7", 64, "7"), (None, 2, None), ("", 2, None)],
)
def test_memkinds_arenas_are_bounded_unless_they_are_set(
    monkeypatch: pytest.MonkeyPatch, given: str | None, processors: int, arenas: str | None
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: processors)
    monkeypatch.setenv("MEMKIND_ARENA_NUM_PER_KIND", "")  # so that monkeypatch restores it
    monkeypatch.delenv("MEMKIND_ARENA_NUM_PER_KIND")
    if given is not None:
        monkeypatch.setenv("MEMKIND_ARENA_NUM_PER_KIND", given)
    native._bound_arenas()
    assert os.environ.get("MEMKIND_ARENA_NUM_PER_KIND") == arenas


def test_functions_not_needed_at_start_register_at_first_use() -> None:
    code = """
from torch_hbmcomm.native import load
module = load()
early = set(vars(module))
assert module.reduce_isa()
late = set(vars(module)) - early
assert {"error_feedback_pack", "memory_info", "mpi_info", "warn"} <= late, late
assert {"Options", "ProcessGroupHbm", "create"} <= early, early
module.nothing
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stderr.splitlines()[-1] == (
        "AttributeError: module 'torch_hbmcomm._C' has no attribute 'nothing'"
    )


def test_refusal_names_the_pytorches_that_the_wheel_serves(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for release in "2.9", "2.13", "2.11":
        add_module(package, release)
    monkeypatch.setattr(torch, "__version__", "2.16.1+cpu")
    text = refusal()
    assert "for PyTorch 2.16.1 and Python" in text
    assert "serves PyTorch 2.9, 2.11 and 2.13." in text
    assert "pip install 'torch==2.13.*'" in text
    assert "pip install --upgrade torch_hbmcomm" in text


def test_a_wheel_for_another_python_is_refused(package: Path) -> None:
    add_module(package, "2.13", ".cpython-39-x86_64-linux-gnu.so")
    assert "for another Python; install torch_hbmcomm with this one" in refusal()


def test_refusal_names_an_install_of_the_box_alone(package: Path) -> None:
    text = refusal()
    assert "the memory box alone (hbmcomm-box)" in text
    assert "`pip install torch_hbmcomm`" in text


@pytest.mark.parametrize("served", [[], ["2.11"], ["2.11", "2.12"]])
@pytest.mark.parametrize("suffix", [HERE, ".cpython-39-x86_64-linux-gnu.so"])
def test_refusal_of_a_wheel_does_not_advise_a_build(
    package: Path, monkeypatch: pytest.MonkeyPatch, served: list[str], suffix: str
) -> None:
    for release in served:
        add_module(package, release, suffix)
    monkeypatch.setattr(torch, "__version__", "2.13.0")
    text = refusal().replace(sys.executable, "python")  # the path may contain "build"
    assert not re.search(r"\bmake\b|build", text)


def test_refusal_in_a_checkout_advises_a_build(package: Path) -> None:
    (package.parent / "setup.py").touch()
    text = refusal()
    assert "`make build`" in text
    assert f"`pip install --no-build-isolation --editable {package.parent}`" in text


def test_only_the_loader_advises_make() -> None:
    listed = subprocess.run(
        ["git", "grep", "-lE", r"`make |\bmake build", "--", "csrc", "torch_hbmcomm"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    ).stdout.split()
    assert [name for name in listed if not name.endswith("CMakeLists.txt")] == [
        "torch_hbmcomm/native_advice.py"
    ]


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("torch_version", "2.10.0", r"built for PyTorch 2\.10\.0, and this is 2\."),
        ("version", "9.9", r"of version 9\.9, and the Python files .* hbmcomm-box was installed"),
    ],
)
def test_a_module_of_another_release_or_version_is_refused(
    monkeypatch: pytest.MonkeyPatch, key: str, value: str, text: str
) -> None:
    module = native.load()
    native.load.cache_clear()
    information = module.build_info() | {key: value}
    monkeypatch.setattr(module, "build_info", lambda: information)
    assert re.search(text, refusal())
