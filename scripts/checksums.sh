#!/bin/sh
# Prints the SHA-256 of each file of a release, as `sha256sum --check` reads it in a directory that
# has all of these files.
#
#   scripts/checksums.sh FOLDER...
set -eu
for folder in "$@"; do
  (cd "$folder" && sha256sum -- *)
done
