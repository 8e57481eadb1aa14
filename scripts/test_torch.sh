#!/bin/sh
# Runs the Python tests on a release of PyTorch:
#
#   scripts/test_torch.sh 2.15.0 [arguments of pytest]
#
# It installs the release into its own environment, build/torch-2.15.0-python3.11, and builds the
# extension for it in torch_hbmcomm/torch_2_15. PYTHON selects another Python, as in
# PYTHON=python3.13.
#
# WHEEL=dist/torch_hbmcomm-....whl installs that wheel instead. The tests then run in a copy of the
# checkout without its package, so they can import only the wheel's. tests/python/repository is left
# out.
set -eu

release=${1:?name a release of PyTorch, as in 2.15.0}
shift
interpreter=${PYTHON:-python3}
minor=$("$interpreter" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
folder=build/torch-$release-python$minor
python=$folder/bin/python

[ -x "$python" ] || "$interpreter" -m venv "$folder"
"$python" scripts/requirements.py --torch "$release" examples test > "$folder/requirements.txt"
echo "Installing PyTorch $release in $folder: PyPI's is built for CUDA, and brings 5 to 6 GB"
"$python" -m pip install --quiet -r "$folder/requirements.txt"
unset HBMCOMM_TORCH
if [ -n "${WHEEL:-}" ]; then
  "$python" -m pip install --quiet --force-reinstall --no-deps "$WHEEL"
else
  "$python" -m pip install --quiet --no-build-isolation --no-deps --editable .
fi

PATH=$PWD/$folder/bin:$PATH
export PATH
# Builds the test accelerator in the directory where setup.py builds the extension.
build=build/$(python -c 'import sys; print(sys.implementation.cache_tag)')-elsewhere
cmake -S csrc -B "$build" -G Ninja -DHBM_TESTS=ON -DMPI_INCLUDE="$(python scripts/mpi_include.py)" \
  -DPython_EXECUTABLE="$PWD/$python" \
  -DTORCH_RELEASES="$(PYTHONPATH=scripts python -c \
    'import torch_releases as t; print(t.installed().version, t.installed().folder, sep="=")')"
cmake --build "$build" --target accelerators
if [ -n "${WHEEL:-}" ]; then
  rm -rf "$folder/tree"
  mkdir "$folder/tree"
  git ls-files -z --cached --others --exclude-standard ':!torch_hbmcomm' |
    xargs -0 cp --parents --no-dereference -t "$folder/tree"
  ln -s "$PWD/build" "$folder/tree/build"
  cd "$folder/tree"
  python -c 'import sys, torch_hbmcomm as p; print(p.__file__); assert p.__file__.startswith(sys.prefix)'
  set -- --ignore=tests/python/repository "$@"
fi
exec python -m pytest "$@"
