#!/bin/sh
# Tries the wheels in FOLDER on a system without compiler and libraries: the memory box alone, and
# the demo of training.
#
#   scripts/try_wheels.sh FOLDER [options for pip install]
#
# Takes from FOLDER the wheels for the Python of the environment ENV (venv), and makes ENV if it does
# not exist. The options are for the dependencies, such as an index that has PyTorch for CPUs.
set -eu
folder=$1
shift
ENV=${ENV:-venv}
[ -e "$ENV" ] || python3 -m venv "$ENV"
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
