#!/usr/bin/env bash
# Builds the wheels of both distributions in a bare Debian or Ubuntu, for the Python of that system,
# as root:
#
#   HBMCOMM_TORCH=FOLDER:FOLDER scripts/debian_wheels.sh SUITE ROOT DIST
#
# ROOT is or becomes a system of SUITE (bare_system.sh), with its updates and a compiler. DIST gets
# the wheels, which run with the glibc of SUITE or later, and with an earlier one if their symbols
# allow it. HBMCOMM_TORCH names the unpacked PyTorches that the wheel of torch_hbmcomm serves. The
# build uses a copy of the checkout's files, also of those that are not committed.
set -euo pipefail

suite=${1:?name a suite, as in bookworm}
root=$(realpath -m "${2:?name a folder for the system}")
dist=$(realpath -m "${3:?name a folder for the wheels}")
: "${HBMCOMM_TORCH:?name folders of unpacked PyTorch wheels, as in build/torch/2.13}"

binds=() inside=()
IFS=: read -ra folders <<<"$HBMCOMM_TORCH"
for folder in "${folders[@]}"; do
  inside+=("/opt/torch/${#inside[@]}")
  binds+=(-b "$(realpath "$folder"):${inside[-1]}")
done

cd "$(dirname "$0")/.."
packages=$(python3 -c 'import sys; sys.path.insert(0, "scripts"); import native_requirements as n
print("g++", *(need.package for need in n.REQUIREMENTS))')
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
git ls-files -z --cached --others --exclude-standard |
  xargs -0 cp --parents --no-dereference -t "$source"
mkdir -p "$dist"
scripts/bare_system.sh -p "$packages" "${binds[@]}" -w "$source:/opt/source" -w "$dist:/opt/dist" \
  "$suite" "$root" env ${MAX_JOBS:+MAX_JOBS="$MAX_JOBS"} \
  HBMCOMM_TORCH="$(IFS=:; echo "${inside[*]}")" sh -euc '
    cd /opt/source
    [ -e /opt/tools ] || python3 -m venv /opt/tools
    /opt/tools/bin/python scripts/requirements.py --build wheels >/tmp/requirements.txt
    /opt/tools/bin/pip install --quiet -r /tmp/requirements.txt
    exec /opt/tools/bin/python scripts/wheels.py --only wheels --into /opt/dist'
