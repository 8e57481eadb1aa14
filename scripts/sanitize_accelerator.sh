#!/bin/sh
# Runs the tests on the test accelerator under AddressSanitizer:
#
#   scripts/sanitize_accelerator.sh [arguments of pytest]
#
# The extension and the accelerator are instrumented. PyTorch and Python are not, so their errors do
# not show, and leak detection is off. The sanitizer does not handle SIGSEGV: one test dies of it on
# purpose.
#
# The tests run in build/address-torch/tree, a copy of the checkout with the instrumented extension.
set -eu

build=build/address-torch
release=$(PYTHONPATH=scripts python -c \
  'import torch_releases as t; one = t.installed(); print(one.package, one.version, one.folder)')
package=${release%% *}
version=$(python -c 'from importlib.metadata import version; print(version("torch_hbmcomm"))')
cmake -S csrc -B "$build" -G Ninja -DHBM_TESTS=ON -DMPI_INCLUDE="$(python scripts/mpi_include.py)" \
  -DCMAKE_BUILD_TYPE=None -DCMAKE_DISABLE_PRECOMPILE_HEADERS=ON \
  -DCMAKE_CXX_FLAGS="-O1 -g1 -fsanitize=address" -DPython_EXECUTABLE="$(command -v python)" \
  -DHBM_VERSION="$version" -DTORCH_RELEASES="$(echo "${release#* }" | sed 's/ /=/')"
cmake --build "$build" --target "_C_$package" accelerators

tree=$build/tree
rm -rf "$tree"
mkdir "$tree"
git ls-files -z --cached --others --exclude-standard | xargs -0 cp --parents -t "$tree"
cp torch_hbmcomm/*.so "$tree/torch_hbmcomm"
mkdir -p "$tree/torch_hbmcomm/$package" "$tree/build"
cp "$build/$package"/_C*.so "$tree/torch_hbmcomm/$package"
ln -s "$PWD/$build" "$tree/build/$(python -c 'import sys; print(sys.implementation.cache_tag)')"

cd "$tree"
LD_PRELOAD="$(c++ -print-file-name=libasan.so) $(c++ -print-file-name=libstdc++.so)"
ASAN_OPTIONS=detect_leaks=0:handle_segv=0
PYTHONPATH=$PWD
export LD_PRELOAD ASAN_OPTIONS PYTHONPATH
python -c 'import sys, torch_hbmcomm as p; print(p.__file__); assert p.__file__.startswith(sys.argv[1])' "$PWD"
exec python -m pytest tests/python/accelerator "$@"
