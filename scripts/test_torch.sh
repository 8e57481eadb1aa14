#!/bin/sh
# Runs the Python tests on a release of PyTorch: scripts/test_torch.sh 2.15.0 [arguments of pytest].
# It is installed into an environment of its own, build/torch-2.15.0; the extension for it lies
# beside those for other releases, in torch_hbmcomm/torch_2_15.
set -eu

release=${1:?name a release of PyTorch, as in 2.15.0}
shift
folder=build/torch-$release
python=$folder/bin/python

[ -x "$python" ] || "${PYTHON:-python3}" -m venv "$folder"
python scripts/requirements.py --torch "$release" examples test > "$folder/requirements.txt"
echo "Installing PyTorch $release in $folder: PyPI's is built for CUDA, and brings 5 to 6 GB"
"$python" -m pip install --quiet -r "$folder/requirements.txt"
unset HBMCOMM_TORCH
"$python" -m pip install --quiet --no-build-isolation --no-deps --editable .

PATH=$PWD/$folder/bin:$PATH
export PATH
exec python -m pytest "$@"
