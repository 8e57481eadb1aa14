"""Builds torch_hbmcomm._C; everything else about the package is in pyproject.toml."""

import os
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the build must not load what it builds

import native_requirements  # noqa: E402
import ninja  # noqa: E402
import torch  # noqa: E402
from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths  # noqa: E402

os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]])


class BuildNative(BuildExtension):
    """Builds through ninja, in one directory that editable installs and wheels share."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.build_temp = str(ROOT / "build" / f"extension-{sys.implementation.cache_tag}")
        self.force = True  # ninja decides what is out of date: it knows the headers

    def run(self) -> None:
        missing = native_requirements.missing()
        if missing:
            sys.exit(missing)
        versions = {
            "HBM_VERSION": self.distribution.get_version(),
            "HBM_TORCH_VERSION": torch.__version__.partition("+")[0],
        }
        for extension in self.extensions:
            extension.define_macros += [(name, f'"{text}"') for name, text in versions.items()]
            extension.include_dirs.append(str(native_requirements.mpi_include()))
        super().run()


def extension() -> Extension:
    sources = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").rglob("*.cpp"))
    native: Extension = CppExtension(
        "torch_hbmcomm._C",
        sources,
        libraries=["memkind", "numa", "hwloc"],
        extra_compile_args=["-O3", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden"],
    )
    # As system headers, PyTorch's are spared our warnings.
    for path in include_paths():
        native.extra_compile_args += ["-isystem", path]
    native.include_dirs = [str(ROOT / "csrc")]
    return native


setup(ext_modules=[extension()], cmdclass={"build_ext": BuildNative})
