"""Writes an SBOM (software bill of materials, CycloneDX 1.6 in JSON) for each wheel of a folder.

    python scripts/sbom.py dist --into build/sbom

NAME.whl.cdx.json has the wheel with its SHA-256, its Python requirements, and each shared library
that auditwheel copied into the wheel: the file, its SHA-256, and the package that it came from. The
package is found in one of three places:

- in the SBOM that auditwheel leaves in the wheel;
- in dpkg's database, if the library's original is on this machine or in a folder named by --system,
  the root of the system that built the wheel;
- in scripts/manylinux_libraries.sh, for a library that was compiled in the container.

A library without a package is in the SBOM without a version, and the script names it. The script
refuses wheels of another version than torch_hbmcomm/version.py has.

    python scripts/sbom.py --image ROOT --name hbmcomm --into build/sbom

describes the image of a container from its mounted root (`podman image mount hbmcomm`): the
packages of dpkg, and the Python distributions.

REQUIRES: cyclonedx-python-lib and packaging, of the extra `wheels`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import re
import sys
import uuid
import zipfile
from collections.abc import Iterator, Sequence
from email.message import Message
from email.parser import Parser
from functools import cache
from pathlib import Path
from typing import NamedTuple

import versions
from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename

ROOT = Path(__file__).resolve().parent.parent
_SOURCES = ROOT / "scripts" / "manylinux_libraries.sh"
_CONTAINER = "manylinux_2_28"  # the tag of wheels that the container of _SOURCES builds
_COPIED = re.compile(r"(?P<name>.+)-(?P<digest>[0-9a-f]{8})(?P<suffix>\.so.*)")  # by auditwheel
_STATUS = "var/lib/dpkg/status"
_OURS = "torch_hbmcomm:"  # begins the names of our properties


class Package(NamedTuple):
    """The package of a library."""

    purl: str  # as in pkg:deb/debian/libnuma1@2.0.16-1
    name: str
    version: str


def of_wheel(wheel: Path, systems: Sequence[Path]) -> tuple[Bom, list[str]]:
    """Return the SBOM of a wheel, and the names of libraries whose package was not found.

    systems: roots of systems that may have the originals of the libraries.
    """
    with zipfile.ZipFile(wheel) as files:
        metadata = _metadata(files)
        libraries = {
            path: files.read(path)
            for path in sorted(files.namelist())
            if re.fullmatch(r"[^/]+\.libs/[^/]+", path)
        }
        known = _packages_of_auditwheel(files)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    root = _distribution(metadata, wheel.name, digest)
    parts = [_requirement(text) for text in metadata.get_all("Requires-Dist", [])]
    lost = []
    for path, content in libraries.items():
        library = path.rpartition("/")[2]
        package = (
            _package_in(known, library)
            or next(filter(None, (_package_of_dpkg(one, library) for one in systems)), None)
            or _package_of_container(wheel.name, library)
        )
        parts.append(_library(path, content, package))
        if package is None:
            lost.append(library)
    # Packages of libraries that were not recognised stay in the SBOM, without a file.
    used = {str(part.purl) for part in parts}
    unused = [_package(package) for package in sorted(set(known.values()))]
    parts += [part for part in unused if str(part.purl) not in used]
    return _bom(root, parts, digest), lost


def of_image(root: Path, name: str) -> Bom:
    """Return the SBOM of an image whose files are in `root`.

    Raises ValueError if the image is of neither Debian nor Ubuntu.
    """
    if not (root / _STATUS).exists():
        raise ValueError(f"{root} has no {_STATUS}: mount an image of a Debian or Ubuntu there")
    parts = [_package(package) for package in _dpkg(root).values()]
    places = ("usr/lib/python3*", "usr/local/lib/python3*", "opt/*/lib/python3*")
    found = [
        path
        for place in places
        for packages in ("site-packages", "dist-packages")
        for path in sorted(root.glob(f"{place}/{packages}/*.dist-info/METADATA"))
    ]
    for path in found:
        metadata = Parser().parsestr(path.read_text())
        parts.append(_distribution(metadata, str(path.parent.relative_to(root))))
    contents = "\n".join(sorted(str(part.purl) for part in parts))
    digest = hashlib.sha256(contents.encode()).hexdigest()
    return _bom(Component(name=name, type=ComponentType.CONTAINER, bom_ref=name), parts, digest)


def _bom(root: Component, parts: Sequence[Component], digest: str) -> Bom:
    """Make an SBOM. Its serial number follows from `digest`, so that a repetition has the same."""
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"sha256:{digest}")
    bom = Bom(serial_number=serial, components=parts)
    bom.metadata.component = root
    bom.register_dependency(root, parts)
    return bom


def _package(package: Package) -> Component:
    return Component(
        name=package.name,
        version=package.version,
        purl=PackageURL.from_string(package.purl),
        bom_ref=package.purl,
    )


def _distribution(metadata: Message, file: str, digest: str | None = None) -> Component:
    """Return the component of a Python distribution.

    file: its wheel, whose SHA-256 is `digest`, or in an image the folder of its metadata.
    """
    name, version = metadata["Name"], metadata["Version"]
    terms = metadata["License-Expression"]
    named = {"file_name": file} if digest else {}
    return Component(
        name=name,
        version=version,
        purl=PackageURL("pypi", None, canonicalize_name(name), version, named),
        bom_ref=file,
        licenses=[LicenseExpression(terms)] if terms else [],
        hashes=[_sha256(digest)] if digest else [],
    )


def _requirement(text: str) -> Component:
    """Return the component of a line `Requires-Dist`, as in "numpy" or "torch<2.14,>=2.13"."""
    needed = Requirement(text)
    of_an_extra = needed.marker is not None and "extra" in str(needed.marker)
    return Component(
        name=needed.name,
        purl=PackageURL("pypi", name=canonicalize_name(needed.name)),
        bom_ref=f"requirement:{text}",
        scope=ComponentScope.OPTIONAL if of_an_extra else ComponentScope.REQUIRED,
        properties=[Property(name=f"{_OURS}requirement", value=text)],
    )


def _library(path: str, content: bytes, package: Package | None) -> Component:
    properties = [Property(name=f"{_OURS}path", value=path)]
    if package is not None:
        properties.append(Property(name=f"{_OURS}package", value=package.name))
    return Component(
        name=path.rpartition("/")[2],
        version=package.version if package else None,
        purl=PackageURL.from_string(package.purl) if package else None,
        bom_ref=path,
        hashes=[_sha256(hashlib.sha256(content).hexdigest())],
        properties=properties,
    )


def _sha256(digest: str) -> HashType:
    return HashType(alg=HashAlgorithm.SHA_256, content=digest)


def _metadata(files: zipfile.ZipFile) -> Message:
    (path,) = (
        path for path in files.namelist() if re.fullmatch(r"[^/]+\.dist-info/METADATA", path)
    )
    return Parser().parsestr(files.read(path).decode())


def _packages_of_auditwheel(files: zipfile.ZipFile) -> dict[str, Package]:
    """Return the packages that auditwheel found, by the SHA-256 of the path of their library."""
    found = {}
    for path in files.namelist():
        if path.endswith(".dist-info/sboms/auditwheel.cdx.json"):
            for one in json.loads(files.read(path))["components"]:
                _, _, of_path = one["bom-ref"].partition("#")
                if of_path:
                    found[of_path] = Package(one["purl"], one["name"], one["version"])
    return found


def _package_in(known: dict[str, Package], library: str) -> Package | None:
    for path in _originals(library):
        if package := known.get(hashlib.sha256(path.encode()).hexdigest()):
            return package
    return None


def _originals(library: str) -> Iterator[str]:
    """Yield the paths that the original of a copied library may have."""
    if match := _COPIED.fullmatch(library):
        multiarch = [f"{one}-linux-gnu" for one in ("x86_64", "aarch64")]
        for parent in ("/lib", "/usr/lib", "/usr/local/lib"):
            for folder in (*(f"{parent}/{one}" for one in multiarch), parent, f"{parent}64"):
                yield f"{folder}/{match['name']}{match['suffix']}"


def _package_of_dpkg(system: Path, library: str) -> Package | None:
    """Return the package of a library that auditwheel copied from this system, None otherwise."""
    match = _COPIED.fullmatch(library)
    for path in _originals(library):
        file = system / path.lstrip("/")
        if match is None or not file.is_file():
            continue
        if hashlib.sha256(file.read_bytes()).hexdigest()[:8] == match["digest"]:
            return _owner(system, path)
    return None


def _owner(system: Path, path: str) -> Package | None:
    """Return the package that dpkg lists for `path`: some packages have /lib for /usr/lib."""
    paths = {path.removeprefix("/usr"), f"/usr{path.removeprefix('/usr')}"}
    for listed in sorted((system / "var/lib/dpkg/info").glob("*.list")):
        if not paths.isdisjoint(listed.read_text().splitlines()):
            return _dpkg(system).get(listed.stem.partition(":")[0])
    return None


@cache
def _dpkg(system: Path) -> dict[str, Package]:
    """Return the installed packages of a Debian or Ubuntu, by name."""
    release = (system / "etc/os-release").read_text()
    distribution = (re.findall(r'^ID="?([\w-]+)', release, re.MULTILINE) or ["debian"])[0]
    found = {}
    for paragraph in (system / _STATUS).read_text().split("\n\n"):
        fields = Parser().parsestr(paragraph, headersonly=True)
        if fields["Status"] and fields["Status"].endswith(" installed"):
            name, version, machine = fields["Package"], fields["Version"], fields["Architecture"]
            url = PackageURL("deb", distribution, name, version, {"arch": machine})
            found[name] = Package(url.to_string(), name, version)
    return found


def _package_of_container(wheel: str, library: str) -> Package | None:
    """Return the source package that _SOURCES compiles, for a library of its container's wheels."""
    if _CONTAINER in wheel:
        for name, version in re.findall(r"^([A-Z]+)=([\d.]+)$", _SOURCES.read_text(), re.MULTILINE):
            if library.startswith(f"lib{name.lower()}-"):
                url = PackageURL("generic", None, name.lower(), version)
                return Package(url.to_string(), name.lower(), version)
    return None


def write(bom: Bom, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(JsonV1Dot6(bom).output_as_string(indent=2) + "\n")


def write_all(folder: Path, into: Path, systems: Sequence[Path]) -> None:
    """Write the SBOMs of all wheels in `folder`, and remove other wheels' SBOMs from `into`.

    Raises ValueError if there is no wheel, or if a wheel has another version than the package.
    """
    wheels, version = sorted(folder.glob("*.whl")), versions.of_package()
    if not wheels:
        raise ValueError(f"{folder} has no wheels: build them first")
    for wheel in wheels:
        if str(parse_wheel_filename(wheel.name)[1]) != version:
            raise ValueError(
                f"{wheel.name} is not of the version {version} of torch_hbmcomm/version.py: move "
                "it out of the folder"
            )
    for left in into.glob("*.whl.cdx.json"):
        left.unlink()
    for wheel in wheels:
        bom, lost = of_wheel(wheel, systems)
        write(bom, into / f"{wheel.name}.cdx.json")
        print(f"{wheel.name}: {len(bom.components)} components")
        for library in lost:
            print(f"  {library}: its package was not found, so the SBOM has no version of it")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, help="of wheels")
    parser.add_argument("--image", type=Path, help="the mounted root of an image")
    parser.add_argument("--name", default="image", help="the image's name")
    parser.add_argument("--into", type=Path, default=ROOT / "build" / "sbom")
    parser.add_argument("--system", type=Path, action="append", default=[], help="root of a system")
    asked = parser.parse_args()
    if (asked.folder is None) == (asked.image is None):
        parser.error("name a folder of wheels, or an image")
    try:
        if asked.image is not None:
            write(of_image(asked.image, asked.name), asked.into / f"{asked.name}.cdx.json")
            return
        write_all(asked.folder, asked.into, [*asked.system, Path("/")])
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
