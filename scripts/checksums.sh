#!/bin/sh
# Prints the SHA-256 of each file of a release, as `sha256sum --check` reads it in the directory of the
# files.
#
#   scripts/checksums.sh FOLDER
set -eu
cd "$1"
sha256sum -- *
