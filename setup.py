"""Builds the native parts by CMake; everything else about the package is in pyproject.toml.

With HBMCOMM_WITHOUT_TORCH=1 there is no torch_hbmcomm._C, the process group, and nothing requires
PyTorch or MPI: a memory node.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the build must not load what it builds

import dependencies  # noqa: E402
import native_build  # noqa: E402
import native_requirements  # noqa: E402

WITHOUT_TORCH = dependencies.without_torch()
PRODUCTS = ["_smb", *native_build.LIBRARIES] + ([] if WITHOUT_TORCH else ["_C"])


class BuildNative(build_ext):  # type: ignore[misc]  # setuptools has no types
    """Builds in a folder that keeps what is compiled from one build to the next."""

    def run(self) -> None:
        missing = native_requirements.missing(without_torch=WITHOUT_TORCH)
        if missing:
            sys.exit(missing)
        self.folder = native_build.folder()
        settings = {} if WITHOUT_TORCH else self.process_group()
        native_build.build(self.folder, PRODUCTS, settings, quiet=not self.distribution.verbose)
        super().run()
        root = ROOT if self.inplace else Path(self.build_lib)
        native_build.put_header(root / "torch_hbmcomm", in_place=bool(self.inplace))

    def process_group(self) -> dict[str, str]:
        """CMake's settings for _C."""
        import torch
        from torch.utils.cpp_extension import TORCH_LIB_PATH, include_paths

        return {
            "HBM_PROCESS_GROUP": "ON",
            "HBM_VERSION": self.distribution.get_version(),
            "MPI_INCLUDE": str(native_requirements.mpi_include()),
            "TORCH_INCLUDES": ";".join(include_paths()),
            "TORCH_LIBRARIES_FOLDER": TORCH_LIB_PATH,
            "TORCH_VERSION": torch.__version__.partition("+")[0],
        }

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(self.folder / target.name, target)

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] in native_build.LIBRARIES:
            return fullname.replace(".", os.sep) + ".so"
        return str(super().get_ext_filename(fullname))


setup(
    ext_modules=[Extension(f"torch_hbmcomm.{name}", sources=[]) for name in PRODUCTS],
    cmdclass={"build_ext": BuildNative},
    install_requires=dependencies.dependencies(),
    # What a build of the other kind left there would go into the wheel.
    options={"build": {"build_base": "build/without-torch"}} if WITHOUT_TORCH else {},
)
