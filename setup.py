"""Builds the native parts by CMake; everything else about the package is in pyproject.toml.

With HBMCOMM_WITHOUT_TORCH=1 it builds the memory box alone, as the distribution hbmcomm-box, which
requires neither PyTorch nor MPI. torch_hbmcomm._C, the process group, is left out.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.dist_info import dist_info
from setuptools.dist import Distribution

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))

import dependencies  # noqa: E402
import native_build  # noqa: E402
import native_requirements  # noqa: E402
import torch_releases  # noqa: E402

WITHOUT_TORCH = dependencies.without_torch()
RELEASES: list[torch_releases.TorchRelease] = []
LIBRARIES = native_build.LIBRARIES + ([] if WITHOUT_TORCH else native_build.LIBRARIES_OF_GROUPS)
NO_RELEASE = ""  # the reason if the build needs a release of PyTorch and none was found
if not WITHOUT_TORCH:
    try:
        RELEASES = torch_releases.find()
    except LookupError as error:
        NO_RELEASE = str(error)
# An sdist may later be built for any supported release of PyTorch, so its metadata allow all of
# them. That build runs this file again, and then allows only the releases that it finds.
MINORS = [release.minor for release in RELEASES]
if NO_RELEASE or ("sdist" in sys.argv and not WITHOUT_TORCH):
    MINORS = list(range(torch_releases.OLDEST, torch_releases.NEWEST + 1))


class DistInfo(dist_info):  # type: ignore[misc]  # setuptools has no types
    """Makes the metadata, or fails if no release of PyTorch was found.

    pip calls it first, before it installs requirements and builds a wheel.
    """

    def run(self) -> None:
        if NO_RELEASE:
            sys.exit(NO_RELEASE)
        super().run()


class BuildNative(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Builds in a directory that stays, so that the next build compiles only changed files."""

    def run(self) -> None:
        missing = NO_RELEASE or native_requirements.missing()
        if missing:
            sys.exit(missing)
        self.folder = native_build.folder()
        settings = {} if WITHOUT_TORCH else self.process_group()
        targets = [
            "_smb",
            *(name.removeprefix("lib") for name in LIBRARIES),
            *(f"_C_{release.package}" for release in RELEASES),
        ]
        native_build.build(self.folder, targets, settings, quiet=not self.distribution.verbose)
        built = Path(self.build_lib) / "torch_hbmcomm"
        for left in built.glob("torch_2_*"):
            shutil.rmtree(left)  # of an earlier build, perhaps for other releases
        for release in RELEASES if self.inplace else []:
            (ROOT / "torch_hbmcomm" / release.package).mkdir(exist_ok=True)
        super().run()
        package = ROOT / "torch_hbmcomm" if self.inplace else built
        native_build.put_header(package, in_place=bool(self.inplace))

    def process_group(self) -> dict[str, str]:
        """CMake's settings for _C."""
        return {
            "HBM_VERSION": self.distribution.get_version(),
            "TORCH_RELEASES": ";".join(f"{one.version}={one.folder}" for one in RELEASES),
        }

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        built = Path(self.get_ext_filename(ext.name)).relative_to("torch_hbmcomm")
        shutil.copy2(self.folder / built, target)

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] in LIBRARIES:
            return fullname.replace(".", os.sep) + ".so"
        return str(super().get_ext_filename(fullname))


class BoxDistribution(Distribution):  # type: ignore[misc]  # setuptools has no types
    """The distribution hbmcomm-box: the memory box alone, which registers no PyTorch backend."""

    def parse_config_files(self, *arguments: object, **options: object) -> None:
        super().parse_config_files(*arguments, **options)
        self.metadata.name = "hbmcomm-box"
        self.metadata.description = (
            "A memory box: a server whose memory clients allocate, read, write and sum into over "
            "shared memory, TCP or RDMA (torch_hbmcomm without its process group)"
        )
        for group in [name for name in self.entry_points if name.startswith("torch.")]:
            del self.entry_points[group]


MODULES = [
    "_smb",
    *LIBRARIES,
    *(f"{release.package}._C" for release in RELEASES),
]

OPTIONS = {}
if WITHOUT_TORCH:
    # This build needs a directory of its own. The default one may have files of a build with
    # PyTorch, which would go into the wheel. The metadata are there, too, because pip would take
    # the box's metadata in the checkout for a second installed distribution.
    folder = "build/without-torch"
    (ROOT / folder).mkdir(parents=True, exist_ok=True)
    OPTIONS = {"build": {"build_base": folder}, "egg_info": {"egg_base": folder}}

with native_build.alone():
    setup(
        ext_modules=[Extension(f"torch_hbmcomm.{name}", sources=[]) for name in MODULES],
        cmdclass={"build_ext": BuildNative, "dist_info": DistInfo},
        distclass=BoxDistribution if WITHOUT_TORCH else Distribution,
        install_requires=dependencies.dependencies(MINORS),
        options=OPTIONS,
    )
