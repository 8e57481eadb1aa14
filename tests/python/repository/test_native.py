"""The native module is refused, with the cause, where it does not fit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from torch_hbmcomm import native


@pytest.fixture(autouse=True)
def fresh_loader() -> Iterator[None]:
    native.load.cache_clear()
    yield
    native.load.cache_clear()


def test_another_minor_version_of_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "2.14.1+cpu")
    with pytest.raises(ImportError, match=r"built for PyTorch 2\.13, and this is 2\.14\.1"):
        native.load()


def test_an_extension_built_for_another_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch_hbmcomm._C as module

    monkeypatch.setattr(module, "build_info", lambda: {"torch_version": "2.12.0"})
    with pytest.raises(ImportError, match=r"built for PyTorch 2\.12\.0, and this is 2\.13\."):
        native.load()


def test_an_extension_that_was_never_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "__file__", str(tmp_path / "native.py"))
    with pytest.raises(ImportError, match=r"no native module for Python (.|\s)*make build"):
        native.load()
