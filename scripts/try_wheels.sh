#!/bin/sh
# Tries the wheels in FOLDER on a system without compiler and libraries: the memory box alone, and
# the demo of training.
#
#   scripts/try_wheels.sh FOLDER [options for pip install]
#
# Takes from FOLDER the wheels for the Python of the environment ENV (venv). If ENV does not exist,
# the script makes it. If the system has no Python 3.10 with venv, the script first installs one, as
# root. The options are for the dependencies, such as an index that has PyTorch for CPUs.
set -eu
folder=$1
shift
ENV=${ENV:-venv}
if [ ! -e "$ENV" ]; then
  python=python3
  if python3 -c 'import sys, ensurepip; assert sys.version_info >= (3, 10)' 2>/dev/null; then
    :
  elif command -v apt-get >/dev/null; then
    apt-get update && apt-get install -y --no-install-recommends python3-venv
  else
    python=python3.11
    dnf install -y "$python"
  fi
  "$python" -m venv "$ENV"
fi
chosen=$(mktemp -d)
trap 'rm -rf "$chosen"' EXIT
# Only the wheels of FOLDER, and none of a registry.
"$ENV/bin/pip" download --no-index --no-deps --find-links "$folder" --dest "$chosen/wheels" \
  torch_hbmcomm hbmcomm-box

"$ENV/bin/python" -m venv "$chosen/box"
"$chosen/box/bin/pip" install --quiet "$chosen"/wheels/hbmcomm_box-*.whl
"$chosen/box/bin/python" - <<'PROGRAM'
from torch_hbmcomm import smb

with smb.Server(memory="16MiB", token="t") as server:
    for transport in "shm", "tcp":
        with smb.connect(server.url, token="t", transport=transport) as box:
            segment = box.alloc(4096)
            segment.numpy("float32")[:] = 1
            segment.write()
            segment.accumulate(segment, "float32")
            segment.read()
            assert (segment.numpy("float32") == 2).all()
PROGRAM
echo "OK: the memory box alone"

"$ENV/bin/pip" install --quiet "$@" "$chosen"/wheels/torch_hbmcomm-*.whl
"$ENV/bin/hbmcomm" demo
"$ENV/bin/hbmcomm" info
