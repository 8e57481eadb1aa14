"""`hbmcomm info`: its findings on this machine and on others, and the JSON for scripts."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from harness.command_line import invoke, run

import torch_hbmcomm
from torch_hbmcomm import native, variables
from torch_hbmcomm.cli import probes

ROWS = {probe.__name__ for probe in probes.PROBES} - {"package"} | {"torch_hbmcomm"}


class FakeExtension(ModuleType):
    """A torch_hbmcomm._C with the functions that `info` calls."""

    def __init__(
        self,
        torch_version: str = str(torch.__version__),
        mpi_error: str | None = None,
        hbm: bool = True,
    ) -> None:
        super().__init__("torch_hbmcomm._C")
        self._torch_version = torch_version
        self._mpi_error = mpi_error
        self._hbm = hbm

    def build_info(self) -> dict[str, str]:
        return {"torch_version": self._torch_version, "version": torch_hbmcomm.__version__}

    def end_interpreter(self, here: bool) -> None:
        pass

    def set_mpi_search_path(self, directories: list[str]) -> None:
        pass

    def set_mpi_trial_program(self, program: list[str]) -> None:
        pass

    def reduce_isa(self) -> str:
        return "avx512"

    def memory_available(self) -> bool:
        return self._hbm

    def memory_info(self) -> dict[str, Any]:
        node: dict[str, object] = {"id": 0, "has_cpus": True, "cpus": "0-1"}
        node |= {"total_bytes": 4096, "free_bytes": 1024, "room_bytes": 512}
        return {
            "hbm_available": self._hbm,
            "hbm_source": "a fake",
            "mode": "flat" if self._hbm else "none",
            "mode_source": "a fake",
            "cluster": "1",
            "cpu_node": 0,
            "cpu_nodes": 1,
            "room_bytes": 1 << 20,
            "closest_hbm_nodes": [0] if self._hbm else [],
            "memkind_version": "1.14.0",
            "nodes": [{**node, "is_hbm": self._hbm}],
            "segments": [],
        }

    def mpi_info(self) -> dict[str, str]:
        if self._mpi_error is not None:
            raise RuntimeError(self._mpi_error)
        return {
            "library": "/lib/libmpi.so.12",
            "version": "MPICH Version: 5",
            "abi": "MPICH",
            "found_by": "the system",
        }


StandIn = Callable[[ModuleType | None], None]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    """Yield replace(extension), which replaces torch_hbmcomm._C. With None, its import fails."""

    def replace(extension: ModuleType | None) -> None:
        monkeypatch.setitem(sys.modules, "torch_hbmcomm._C", extension)
        monkeypatch.delattr(torch_hbmcomm, "_C", raising=False)
        native.load.cache_clear()

    yield replace
    native.load.cache_clear()


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in variables.settings(os.environ):
        monkeypatch.delenv(name)


def test_info_on_this_machine_is_json_whatever_is_missing() -> None:
    result = run("info", "--json")
    document = json.loads(result.stdout)
    assert set(document) == ROWS | {"usable"}
    assert result.returncode == (0 if document["usable"] else 1), result.stderr
    for row in ROWS:
        assert {"state", "value", "found_by", "remedy"} <= set(document[row])
        if document[row]["state"] != "ok":
            assert document[row]["remedy"]
    assert document["cpu"]["cores"] >= 1


def test_info_says_usable_when_everything_is_there(stand_in: StandIn, no_settings: None) -> None:
    stand_in(FakeExtension())
    result = invoke("info", "--json")
    document = json.loads(result.output)
    assert result.exit_code == 0
    assert document["usable"]
    assert document["mpi"]["found_by"] == "the system"
    assert document["cpu"]["reduce_isa"] == "avx512"


@pytest.mark.parametrize(
    ("extension", "row", "cause"),
    [
        (None, "torch", "extension cannot be loaded"),
        (FakeExtension(torch_version="1.9.0"), "torch", "built for PyTorch 1.9.0"),
    ],
)
def test_info_shows_what_is_broken_as_a_row(
    stand_in: StandIn, extension: ModuleType | None, row: str, cause: str
) -> None:
    stand_in(extension)
    document = json.loads(invoke("info", "--json").output)
    assert document[row]["state"] == "broken"
    assert cause in document[row]["value"]
    assert document[row]["remedy"]

    shown = invoke("info")
    assert shown.exit_code == 1
    assert cause in " ".join(shown.output.split())


@pytest.mark.parametrize(
    ("transport", "state", "effect", "status"),
    [
        ("auto", "warning", "groups on one node work, groups over several do not", 0),
        ("mpi", "broken", "HBMCOMM_NODE=mpi: all groups need MPI", 1),
    ],
)
def test_info_says_what_absent_mpi_means(
    stand_in: StandIn,
    no_settings: None,
    monkeypatch: pytest.MonkeyPatch,
    transport: str,
    state: str,
    effect: str,
    status: int,
) -> None:
    stand_in(FakeExtension(mpi_error="no MPI library was found"))
    monkeypatch.setenv("HBMCOMM_NODE", transport)
    result = invoke("info", "--json")
    row = json.loads(result.output)["mpi"]
    assert (row["state"], result.exit_code) == (state, status)
    assert row["value"] == f"no MPI library was found\n{effect}"
    assert "pip install mpich" in row["remedy"]


def test_info_warns_of_two_distributions_with_the_same_files(
    stand_in: StandIn, no_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(FakeExtension())
    monkeypatch.setattr(metadata, "version", {"torch_hbmcomm": "1", "hbmcomm-box": "2"}.get)
    row = json.loads(invoke("info", "--json").output)["torch_hbmcomm"]
    assert row["state"] == "warning"
    assert row["value"] == "torch_hbmcomm 1, hbmcomm-box 2"
    assert "pip uninstall both" in row["remedy"]


def test_info_works_without_high_bandwidth_memory(stand_in: StandIn, no_settings: None) -> None:
    stand_in(FakeExtension(hbm=False))
    document = json.loads(invoke("info", "--json").output)
    assert document["usable"]
    assert document["hbm"]["state"] == "warning"


def test_info_shows_the_memory_box(
    stand_in: StandIn, no_settings: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stand_in(FakeExtension())
    monkeypatch.setenv("HOME", str(tmp_path))

    def look() -> dict[str, Any]:
        document: dict[str, Any] = json.loads(invoke("info", "--json").output)
        assert document["usable"]
        return document

    document = look()
    assert "_smb" in document["box"]["value"]
    verbs = document["box_verbs"]
    assert verbs["usable"] or verbs["why_not"] in verbs["value"]
    assert not document["box_token"]["found"]

    monkeypatch.setenv("HBMCOMM_TOKEN_FILE", str(tmp_path / "token"))
    assert look()["box_token"]["state"] == "warning"
    (tmp_path / "token").write_text("not to be shown\n")
    found = look()
    assert found["box_token"]["source"] == str(tmp_path / "token")
    assert "not to be shown" not in json.dumps(found)

    monkeypatch.setitem(sys.modules, "torch_hbmcomm._smb", None)
    assert look()["box"]["state"] == "warning"


@pytest.mark.parametrize(
    ("settings", "lines"),
    [
        (
            {},
            (
                "hbmcomm.memory.empty(): HBM node 1, 3 KiB fit, then ordinary memory, 512 B fit",
                "other tensors: ordinary memory, 512 B fit; HBMCOMM_ALLOCATOR=segment",
            ),
        ),
        ({"HBMCOMM_MEMORY": "bind"}, ("hbmcomm.memory.empty(): HBM node 1, 3 KiB fit (bind)",)),
        (
            {"HBMCOMM_MEMORY": "interleave"},
            ("empty(): HBM nodes 1 and 2, 5 KiB fit (interleave)",),
        ),
        ({"HBMCOMM_MEMORY": "ddr"}, ("hbmcomm.memory.empty(): ordinary memory, 512 B fit (ddr)",)),
        ({"HBMCOMM_ALLOCATOR": "segment"}, ("other tensors of 64 KiB and more: HBM node 1,",)),
        ({"HBMCOMM_MEMORY": "fast"}, ("unknown",)),
        ({"DDP_DISABLE_COMM_MEM": "1"}, ("staging, hbmcomm.memory.empty(): HBM node 1,",)),
    ],
)
def test_info_shows_where_memory_comes_from_and_how_much_fits(
    stand_in: StandIn,
    no_settings: None,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, str],
    lines: tuple[str, ...],
) -> None:
    extension = FakeExtension(hbm=True)
    ordinary = extension.memory_info()["nodes"][0] | {"is_hbm": False}
    fast = [ordinary | {"id": n, "is_hbm": True, "room_bytes": (4 - n) << 10} for n in (1, 2)]
    found = extension.memory_info() | {"nodes": [ordinary, *fast], "closest_hbm_nodes": [1]}
    monkeypatch.setattr(extension, "memory_info", lambda: dict(found))
    stand_in(extension)
    monkeypatch.delenv("DDP_DISABLE_COMM_MEM", raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    shown = json.loads(invoke("info", "--json").output)["places"]["value"]
    for line in lines:
        assert line in shown, shown
    assert ("DDP" in shown) != ("DDP_DISABLE_COMM_MEM" in settings or shown == "unknown")


@pytest.mark.parametrize("policy", ["bind", "hbm-please"])
def test_info_refuses_a_policy_that_cannot_be(
    stand_in: StandIn, no_settings: None, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    stand_in(FakeExtension(hbm=False))
    monkeypatch.setenv("HBMCOMM_MEMORY", policy)
    result = invoke("info", "--json")
    document = json.loads(result.output)
    assert result.exit_code == 1
    assert document["policy"]["state"] == "broken"
    assert "preferred" in document["policy"]["remedy"]


def test_info_flags_unknown_settings(
    stand_in: StandIn, no_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(FakeExtension())
    monkeypatch.setenv("HBMCOMM_LOG", "info")
    monkeypatch.setenv("HBMCOMM_MEMROY", "bind")
    settings = json.loads(invoke("info", "--json").output)["settings"]
    assert settings["set"] == {"HBMCOMM_LOG": "info", "HBMCOMM_MEMROY": "bind"}
    assert settings["unknown"] == ["HBMCOMM_MEMROY"]
    assert "HBMCOMM_MEMORY" in settings["remedy"]


@pytest.mark.parametrize(
    ("value", "backends"),
    [("", []), ("mpi,ccl", ["mpi", "ccl"]), ("all", list(variables.REPLACEABLE)), ("nccl", None)],
)
def test_info_names_the_replaced_backends(
    stand_in: StandIn,
    no_settings: None,
    monkeypatch: pytest.MonkeyPatch,
    value: str,
    backends: list[str] | None,
) -> None:
    stand_in(FakeExtension())
    monkeypatch.setenv("HBMCOMM_INSTEAD_OF", value)
    row = json.loads(invoke("info", "--json").output)["instead_of"]
    if backends is None:
        assert row["state"] == "broken" and 'place of "nccl"' in row["value"]
    else:
        assert (row["state"], row["backends"]) == ("ok", backends)
        assert all(name in row["value"] for name in backends)


def test_info_does_not_show_the_token(
    stand_in: StandIn, no_settings: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(FakeExtension())
    monkeypatch.setenv("HBMCOMM_TOKEN", "not to be shown")
    shown = invoke("info", "--json").output
    assert "not to be shown" not in shown
    assert json.loads(shown)["settings"]["set"] == {"HBMCOMM_TOKEN": "(not shown)"}
