"""The steps of a release: its version, its SBOMs, bare systems, builds and trials."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
SCRIPTS = ROOT / "scripts"
sys.path.insert(0, str(SCRIPTS))

import torch_releases  # noqa: E402
import versions  # noqa: E402


def write(folder: Path, files: Mapping[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def versioned(folder: Path, version: str, heading: str) -> Path:
    return write(
        folder,
        {
            "torch_hbmcomm/version.py": f'"""The version."""\n\n__version__ = "{version}"\n',
            "CHANGELOG.md": f"# Changelog\n\n## {heading}\n\n## 0.1.0 (2026-01-02)\n",
        },
    )


@pytest.mark.parametrize(
    ("version", "heading", "tag"),
    [
        ("0.2.0", "0.2.0 (2026-12-01)", "v0.2.0"),
        ("0.2.0", "0.2.0", None),
        ("0.2.0.dev0", "Unreleased (0.2.0)", None),
    ],
)
def test_a_consistent_version_passes(
    tmp_path: Path, version: str, heading: str, tag: str | None
) -> None:
    assert versions.check(versioned(tmp_path, version, heading), tag) == version


@pytest.mark.parametrize(
    ("version", "heading", "tag", "cause"),
    [
        ("0.2.0", "0.2.0", "v0.3.0", r"the tag is v0\.3\.0, and .* has 0\.2\.0"),
        ("0.2.0", "0.2.0", "0.2.0", r"push the tag v0\.2\.0"),
        ("0.2.0", "0.1.0 (2026-01-02)", "v0.2.0", r'CHANGELOG\.md is "0\.1\.0 \(2026-01-02\)"'),
        ("0.2.0", "0.2.0.1", "v0.2.0", r'begin the heading with "0\.2\.0"'),
        ("0.2.0", "Unreleased (0.2.0)", None, r'begin the heading with "0\.2\.0"'),
        ("0.2.0.dev0", "0.2.0", None, r'begin the heading with "Unreleased \(0\.2\.0\)"'),
        ("0.2.0.dev0", "Unreleased (0.2.0)", "v0.2.0.dev0", r"a development version"),
        ("two", "0.2.0", None, r"has no line `__version__"),
    ],
)
def test_an_inconsistent_version_is_refused(
    tmp_path: Path, version: str, heading: str, tag: str | None, cause: str
) -> None:
    with pytest.raises(versions.Mismatch, match=cause):
        versions.check(versioned(tmp_path, version, heading), tag)


# -- SBOMs

METADATA = """\
Metadata-Version: 2.4
Name: torch-hbmcomm
Version: {version}
License-Expression: BSD-3-Clause
Requires-Dist: torch<2.14,>=2.13
Requires-Dist: numpy
Requires-Dist: matplotlib; extra == "bench"

The text below the fields.
"""
LZMA = b"the library of a Debian"
MANYLINUX = "manylinux_2_27_x86_64.manylinux_2_28_x86_64"


def wheel(folder: Path, libraries: Mapping[str, bytes], platform: str, version: str = "") -> Path:
    """Write a small wheel, with libraries in torch_hbmcomm.libs."""
    version = version or versions.of_package()
    info = f"torch_hbmcomm-{version}.dist-info"
    of_path = hashlib.sha256(b"/usr/lib64/libnuma.so.1.0.0").hexdigest()
    purl = "pkg:rpm/almalinux/numactl-libs@2.0.16-1.el8"
    numa = {"name": "numactl-libs", "version": "2.0.16-1.el8", "purl": purl}
    itself = {"name": "torch_hbmcomm", "version": version, "bom-ref": "pkg:pypi/torch_hbmcomm"}
    found = {"components": [itself, {"bom-ref": f"{purl}#{of_path}", **numa}]}
    folder.mkdir(exist_ok=True)
    path = folder / f"torch_hbmcomm-{version}-cp311-cp311-{platform}.whl"
    with zipfile.ZipFile(path, "w") as files:
        files.writestr("torch_hbmcomm/version.py", "")
        files.writestr(f"{info}/METADATA", METADATA.format(version=version))
        files.writestr(f"{info}/sboms/auditwheel.cdx.json", json.dumps(found))
        for name, content in libraries.items():
            files.writestr(f"torch_hbmcomm.libs/{name}", content)
    return path


def described(folder: Path, *options: str) -> tuple[str, list[dict[str, Any]]]:
    """Run sbom.py on the wheels in `folder`. Return its output and the SBOMs."""
    pytest.importorskip("cyclonedx")
    into = folder.parent / "sbom"
    command = [sys.executable, str(SCRIPTS / "sbom.py"), str(folder), "--into", str(into)]
    done = subprocess.run([*command, *options], text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout, [json.loads(path.read_text()) for path in sorted(into.glob("*.cdx.json"))]


def components(bom: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {one["name"]: one for one in bom["components"]}


def test_an_sbom_has_the_wheel_and_its_requirements(tmp_path: Path) -> None:
    path = wheel(tmp_path / "dist", {}, MANYLINUX)
    _, [bom] = described(tmp_path / "dist")
    assert (bom["bomFormat"], bom["specVersion"]) == ("CycloneDX", "1.6")
    itself = bom["metadata"]["component"]
    assert (itself["name"], itself["version"]) == ("torch-hbmcomm", versions.of_package())
    assert itself["hashes"][0]["content"] == hashlib.sha256(path.read_bytes()).hexdigest()
    assert itself["licenses"] == [{"expression": "BSD-3-Clause"}]
    found = components(bom)
    assert found["torch"]["purl"] == "pkg:pypi/torch"
    assert found["torch"]["properties"][0]["value"] == "torch<2.14,>=2.13"
    scopes = {name: found[name]["scope"] for name in ("torch", "numpy", "matplotlib")}
    assert scopes == {"torch": "required", "numpy": "required", "matplotlib": "optional"}
    [edges] = [one for one in bom["dependencies"] if one["ref"] == itself["bom-ref"]]
    assert set(edges["dependsOn"]) == {one["bom-ref"] for one in bom["components"]}


def test_an_sbom_has_each_library_and_its_package(tmp_path: Path) -> None:
    system = write(
        tmp_path / "system",
        {
            "etc/os-release": 'NAME="Debian"\nID=debian\n',
            "usr/lib/x86_64-linux-gnu/liblzma.so.5.4.1": LZMA,
            "var/lib/dpkg/info/liblzma5:amd64.list": "/.\n/lib/x86_64-linux-gnu/liblzma.so.5.4.1\n",
            "var/lib/dpkg/status": "Package: liblzma5\nStatus: install ok installed\n"
            "Architecture: amd64\nVersion: 5.4.1-1+deb12u1\nDescription: text\n more\n",
        },
    )
    copied = f"liblzma-{hashlib.sha256(LZMA).hexdigest()[:8]}.so.5.4.1"
    libraries = {
        "libnuma-01234567.so.1.0.0": b"of auditwheel's SBOM",
        copied: b"of dpkg's database",  # auditwheel strips the copy
        "libmemkind-89abcdef.so.0.0.1": b"of the container's script",
        "libother-01234567.so.1": b"unknown",
    }
    wheel(tmp_path / "dist", libraries, MANYLINUX)
    shown, [bom] = described(tmp_path / "dist", "--system", str(system))
    found = components(bom)
    for name, content in libraries.items():
        assert found[name]["hashes"][0]["content"] == hashlib.sha256(content).hexdigest()
    built = (SCRIPTS / "manylinux_libraries.sh").read_text()
    memkind = re.findall(r"^MEMKIND=(.*)$", built, re.MULTILINE)[0]
    purls = {name: found[name].get("purl") for name in libraries}
    assert purls == {
        "libnuma-01234567.so.1.0.0": "pkg:rpm/almalinux/numactl-libs@2.0.16-1.el8",
        copied: "pkg:deb/debian/liblzma5@5.4.1-1%2Bdeb12u1?arch=amd64",
        "libmemkind-89abcdef.so.0.0.1": f"pkg:generic/memkind@{memkind}",
        "libother-01234567.so.1": None,
    }
    assert found[copied]["version"] == "5.4.1-1+deb12u1"
    lost = [line for line in shown.splitlines() if "not found" in line]
    assert [line.split(":")[0].strip() for line in lost] == ["libother-01234567.so.1"]


def test_a_library_of_another_build_gets_no_package(tmp_path: Path) -> None:
    """Without the container's tag, and with another library in the named system."""
    system = write(tmp_path / "system", {"usr/lib/libmemkind.so.0": b"another build"})
    wheel(tmp_path / "dist", {"libmemkind-89abcdef.so.0": b"ours"}, "manylinux_2_35_x86_64")
    shown, [bom] = described(tmp_path / "dist", "--system", str(system))
    assert "version" not in components(bom)["libmemkind-89abcdef.so.0"]
    assert "libmemkind-89abcdef.so.0: its package was not found" in shown
    # The package that auditwheel named stays, though its library is not in the wheel.
    assert components(bom)["numactl-libs"]["version"] == "2.0.16-1.el8"


def test_a_repeated_sbom_replaces_those_of_other_wheels(tmp_path: Path) -> None:
    first = wheel(tmp_path / "dist", {}, MANYLINUX)
    _, [before] = described(tmp_path / "dist")
    _, [again] = described(tmp_path / "dist")
    assert again["serialNumber"] == before["serialNumber"]
    first.unlink()
    wheel(tmp_path / "dist", {"libnuma-01234567.so.1": b"more"}, "manylinux_2_35_x86_64")
    _, [other] = described(tmp_path / "dist")
    assert other["serialNumber"] != before["serialNumber"]


@pytest.mark.parametrize(
    ("version", "cause"), [("0.0.1", "is not of the version"), (None, "has no wheels")]
)
def test_sboms_of_no_wheel_or_another_version_are_refused(
    tmp_path: Path, version: str | None, cause: str
) -> None:
    pytest.importorskip("cyclonedx")
    (tmp_path / "dist").mkdir()
    if version:
        wheel(tmp_path / "dist", {}, MANYLINUX, version)
    options = [str(tmp_path / "dist"), "--into", str(tmp_path / "sbom")]
    command = [sys.executable, str(SCRIPTS / "sbom.py"), *options]
    refused = subprocess.run(command, text=True, capture_output=True)
    assert refused.returncode == 1
    assert cause in refused.stderr
    assert not (tmp_path / "sbom").exists()


def test_an_image_is_described_from_its_files(tmp_path: Path) -> None:
    pytest.importorskip("cyclonedx")
    fields = "Package: {}\nStatus: {}\nArchitecture: amd64\nVersion: 2.36-9\n"
    installed = fields.format("libc6", "install ok installed")
    removed = fields.format("gone", "deinstall ok config-files")
    site = "usr/local/lib/python3.11/site-packages"
    image = write(
        tmp_path / "image",
        {
            "etc/os-release": "ID=debian\n",
            "var/lib/dpkg/status": f"{installed}\n{removed}",
            f"{site}/numpy-2.4.0.dist-info/METADATA": "Name: numpy\nVersion: 2.4.0\n",
        },
    )
    options = ["--image", str(image), "--name", "hbmcomm", "--into", str(tmp_path)]
    subprocess.run([sys.executable, str(SCRIPTS / "sbom.py"), *options], check=True)
    bom = json.loads((tmp_path / "hbmcomm.cdx.json").read_text())
    assert bom["metadata"]["component"]["type"] == "container"
    assert {name: one["purl"] for name, one in components(bom).items()} == {
        "libc6": "pkg:deb/debian/libc6@2.36-9?arch=amd64",
        "numpy": "pkg:pypi/numpy@2.4.0",
    }


# -- Bare systems


@pytest.fixture
def system(tmp_path: Path) -> Path:
    """Make a system that has this machine's programs, instead of one that debootstrap makes."""
    if os.geteuid() != 0:
        pytest.skip("a bare system takes root")
    root = write(tmp_path / "root", {"etc/os-release": "ID=debian\nVERSION_CODENAME=bookworm\n"})
    for name in ("etc/ssl/certs", "proc", "sys", "usr"):
        (root / name).mkdir(parents=True, exist_ok=True)
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / name).symlink_to(f"usr/{name}")
    return root


def bare(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [SCRIPTS / "bare_system.sh", "-b", "/usr:/usr", *words]
    environment = os.environ | {"SECRET": "of this environment"}
    return subprocess.run(command, env=environment, text=True, capture_output=True)


def test_a_command_sees_the_folders_bound_into_a_bare_system(system: Path, tmp_path: Path) -> None:
    write(tmp_path, {"here/file": "text", "there/file": "old"})
    binds = ["-b", f"{tmp_path}/here:/opt/here", "-w", f"{tmp_path}/there:/opt/there"]
    program = "cat /opt/here/file; echo new >/opt/there/file; echo /proc/[0-9]* | wc -w; env"
    done = bare(*binds, "bookworm", system, "sh", "-euc", program)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("text")
    assert "SECRET" not in done.stdout
    assert (tmp_path / "there" / "file").read_text() == "new\n"
    refused = bare(*binds, "bookworm", system, "sh", "-c", "echo new >/opt/here/file")
    assert refused.returncode != 0
    assert (tmp_path / "here" / "file").read_text() == "text"
    assert str(tmp_path) not in Path("/proc/mounts").read_text()


def test_a_bare_system_passes_the_exit_status(system: Path) -> None:
    assert bare("bookworm", system, "sh", "-c", "exit 7").returncode == 7


def test_a_bare_system_of_another_suite_is_refused(system: Path) -> None:
    refused = bare("trixie", system, "true")
    assert refused.returncode == 1
    assert "has bookworm, not trixie" in refused.stderr


# -- Steps, with programs that only write down their arguments

WRITES_DOWN = """#!/bin/sh
case "$*" in *readlink*) echo /usr/bin/python3.99; exit ;; esac
echo "$(basename "$0") without=${HBMCOMM_WITHOUT_TORCH:-}" $* >>CALLS
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Make a checkout with the scripts of this one. It writes the calls of programs to CALLS."""
    root = tmp_path / "checkout"
    # Another process may be writing compiled modules.
    shutil.copytree(SCRIPTS, root / "scripts", ignore=shutil.ignore_patterns("__pycache__"))
    versioned(root, "0.2.0.dev0", "Unreleased (0.2.0)")
    shutil.copy(ROOT / "pyproject.toml", root)
    for program in ("scripts/bare_system.sh", "bin/pipx"):
        write(root, {program: WRITES_DOWN.replace("CALLS", str(tmp_path / "CALLS"))})
        (root / program).chmod(0o755)
    subprocess.run(["git", "init", "--quiet", root], check=True)
    return root


def step(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{checkout}/bin:{os.environ['PATH']}"}
    command = [sys.executable, "scripts/release.py", *words]
    return subprocess.run(command, cwd=checkout, env=environment, text=True, capture_output=True)


def calls(checkout: Path) -> list[str]:
    return (checkout.parent / "CALLS").read_text().splitlines()


def test_all_steps_refuse_files_of_an_earlier_build(checkout: Path) -> None:
    write(checkout, {"dist/old.whl": ""})
    refused = step(checkout, "all")
    assert refused.returncode == 1
    assert "old.whl of an earlier build: move its files away" in refused.stderr


def test_the_checksums_are_of_wheels_and_sboms(checkout: Path) -> None:
    write(checkout, {"dist/a.whl": "a", "build/sbom/a.whl.cdx.json": "{}"})
    assert step(checkout, "checksums").returncode == 0
    sums = (checkout / "build" / "SHA256SUMS").read_text().splitlines()
    assert [line.split()[1] for line in sums] == ["a.whl", "a.whl.cdx.json"]


def test_the_container_builds_the_named_packages(checkout: Path) -> None:
    words = ["wheels", "--in", "manylinux"]
    assert step(checkout, *words).returncode == 0
    assert step(checkout, *words, "--package", "hbmcomm-box").returncode == 0
    assert [line.split()[:3] for line in calls(checkout)] == [
        ["pipx", f"without={flag}", "run"] for flag in "011"
    ]
    assert step(checkout, "wheels", "--package", "hbmcomm-box").returncode == 2


def test_a_suite_builds_a_copy_of_the_checkout(checkout: Path) -> None:
    torch = checkout / "build" / "torch"
    minors = range(torch_releases.OLDEST, torch_releases.NEWEST + 1)
    installed = torch_releases.installed().minor  # its files are not in build/torch
    one, *_, other = [f"2.{minor}" for minor in minors if minor != installed]
    for release in (one, other):
        write(torch / release, {"torch/version.py": f"__version__ = '{release}.0'\n"})
    done = step(checkout, "wheels", "--in", "trixie", "--torch", one, other)
    assert done.returncode == 0, done.stderr
    call = " ".join(calls(checkout))
    for words in (
        f" -b {torch}/{one}:/opt/torch/0 -b {torch}/{other}:/opt/torch/1 ",
        f" -w {checkout}/dist:/opt/dist trixie {checkout}/build/bare/trixie-build env ",
        " HBMCOMM_TORCH=/opt/torch/0:/opt/torch/1 sh ",
    ):
        assert words in call
    assert re.search(r"-p g\+\+ python3-dev .*libmemkind-dev", call)


def test_a_trial_uses_the_wheels_on_a_bare_system(checkout: Path) -> None:
    write(checkout, {"build/bare/trixie/venv/old": ""})
    done = step(checkout, "try", "--in", "manylinux", "trixie")
    assert done.returncode == 0, done.stderr
    [call] = calls(checkout)
    assert f"-b {checkout}/dist:/opt/dist -b {checkout}/scripts:/opt/scripts trixie" in call
    assert "/opt/scripts/try_wheels.sh /opt/dist --extra-index-url" in call
    assert not (checkout / "build/bare/trixie/venv").exists()
