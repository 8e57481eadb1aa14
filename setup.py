"""Builds the native parts; everything else about the package is in pyproject.toml.

PyTorch's builder makes torch_hbmcomm._C, the process group; CMake makes the memory box. With
HBMCOMM_WITHOUT_TORCH=1 there is no _C, and nothing requires PyTorch or MPI: a memory node.
"""

import os
import shutil
import sys
from pathlib import Path

from setuptools import Extension, setup

ROOT = Path(__file__).parent
sys.path.insert(0, str(ROOT / "scripts"))
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # the build must not load what it builds

import box_build  # noqa: E402
import dependencies  # noqa: E402
import native_requirements  # noqa: E402
import ninja  # noqa: E402

WITHOUT_TORCH = dependencies.without_torch()
if WITHOUT_TORCH:
    from setuptools.command.build_ext import build_ext as Builder
else:
    import torch
    from torch.utils.cpp_extension import BuildExtension as Builder
    from torch.utils.cpp_extension import CppExtension, include_paths

os.environ["PATH"] = os.pathsep.join([ninja.BIN_DIR, os.environ["PATH"]])

BOX_FOLDERS = {"box", "client", "door", "link", "smb", "verbs"}


class BuildNative(Builder):  # type: ignore[misc]  # one of two
    """Builds through ninja, in directories that editable installs and wheels share."""

    def finalize_options(self) -> None:
        super().finalize_options()
        tag = sys.implementation.cache_tag
        self.build_temp = str(ROOT / "build" / f"extension-{tag}")
        self.box_temp = ROOT / "build" / f"box-{tag}"
        self.force = True  # ninja decides what is out of date: it knows the headers

    def run(self) -> None:
        missing = native_requirements.missing(without_torch=WITHOUT_TORCH)
        if missing:
            sys.exit(missing)
        box_build.build(self.box_temp, quiet=not self.distribution.verbose)
        super().run()
        root = ROOT if self.inplace else Path(self.build_lib)
        box_build.put_header(root / "torch_hbmcomm", in_place=bool(self.inplace))

    def build_extension(self, ext: Extension) -> None:
        if ext.name in box_build.PRODUCTS:
            target = Path(self.get_ext_fullpath(ext.name))
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.box_temp / target.name, target)
            return
        versions = {
            "HBM_VERSION": self.distribution.get_version(),
            "HBM_TORCH_VERSION": torch.__version__.partition("+")[0],
        }
        ext.define_macros += [(name, f'"{text}"') for name, text in versions.items()]
        ext.include_dirs.append(str(native_requirements.mpi_include()))
        super().build_extension(ext)

    def get_ext_filename(self, fullname: str) -> str:
        if fullname.rpartition(".")[2] in box_build.LIBRARIES:
            return fullname.replace(".", os.sep) + ".so"
        return str(super().get_ext_filename(fullname))


def process_group() -> Extension:
    sources = [
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "csrc").rglob("*.cpp"))
        if path.parent.name not in BOX_FOLDERS and not path.name.startswith("smb_")
    ]
    native: Extension = CppExtension(
        "torch_hbmcomm._C",
        sources,
        libraries=["memkind", "numa", "hwloc"],
        # OpenMP for at::parallel_for, over the runtime library that PyTorch has loaded.
        extra_compile_args=["-O3", "-g1", "-Wall", "-Wextra", "-fvisibility=hidden", "-fopenmp"],
    )
    # As system headers, PyTorch's are spared our warnings.
    for path in include_paths():
        native.extra_compile_args += ["-isystem", path]
    native.include_dirs = [str(ROOT / "csrc")]
    return native


box = [Extension(name, sources=[]) for name in box_build.PRODUCTS]
setup(
    ext_modules=box if WITHOUT_TORCH else [process_group(), *box],
    cmdclass={"build_ext": BuildNative},
    install_requires=dependencies.dependencies(),
    # What a build of the other kind left there would go into the wheel.
    options={"build": {"build_base": "build/without-torch"}} if WITHOUT_TORCH else {},
)
