#!/bin/sh
# Builds, tests and measures hbm on a machine with a GPU and without a network, in 10 minutes:
#
#   benchmarks/gpu.sh RESULT.json [FOLDER]
#
# It uses the PyTorch of PYTHON (python3), a compiler, and the installed libraries. FOLDER has the
# packages that the machine lacks: Debian packages (.deb) of libraries and headers, and wheels
# (.whl). The script unpacks them in build/gpu, and installs nothing.
set -eu

result=$(realpath "${1:?name the file for the result, as in gpu.json}")
folder=${2:+$(realpath "$2")}
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
unpacked=$PWD/build/gpu
libraries=$unpacked/system/usr/lib/$(uname -m)-linux-gnu

mkdir -p "$unpacked/site" "$unpacked/system"
if [ -n "$folder" ]; then
  find "$folder" -name '*.deb' -exec dpkg-deb --extract {} "$unpacked/system" \;
  find "$folder" -name '*.whl' -exec "$python" -m pip install --quiet --no-index --no-deps \
    --upgrade --target "$unpacked/site" {} +
fi
export PYTHONPATH="$unpacked/site${PYTHONPATH:+:$PYTHONPATH}" PATH="$unpacked/site/bin:$PATH"
export CPATH="$unpacked/system/usr/include${CPATH:+:$CPATH}"
export LIBRARY_PATH="$libraries${LIBRARY_PATH:+:$LIBRARY_PATH}"
export LD_LIBRARY_PATH="$libraries${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}"

timeout 300 "$python" setup.py --quiet build_ext --inplace
export PYTHONPATH="$PWD:$PYTHONPATH"
device=$("$python" -c 'import torch; print(torch.accelerator.current_accelerator().type)')
HBMCOMM_TEST_DEVICE=$device timeout 120 "$python" -m pytest --quiet \
  tests/python/accelerator/test_accelerator_collectives.py \
  tests/python/accelerator/test_accelerator_training.py
timeout 180 "$python" -m benchmarks.gpu --json "$result"
